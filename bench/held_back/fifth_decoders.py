"""Decoders rewritten: all blocks in one weight; rotary halves in place of pairs, windows by unfolding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_decoders import AlibiDecoder, Biased, Grouped, alibi_decoder, grouped_decoder
from bench.held_back._fifth_ports import SAME, centred, pairs, scaled, shares
from bench.held_back._fourth_ports import Port, leaf, pile, wrong


class OneWeight(Port):
    """Steps before sequences; each kind of weight stacked over the blocks."""

    def take(self, model: AlibiDecoder) -> None:
        attends = [block.attention for block in model.blocks]
        qkv = [[getattr(attend, name) for name in "qkv"] for attend in attends]
        self.qkv = pile(torch.stack([f.weight.view(4, 6, 24) for f in fs]) for fs in qkv)
        self.qkv_shift = pile(torch.stack([f.bias.view(4, 6) for f in fs]) for fs in qkv)
        self.out = pile(attend.out.weight.view(24, 4, 6) for attend in attends)
        self.out_shift = pile(attend.out.bias for attend in attends)
        names = ("attention_before", "attention_after", "mlp_before", "mlp_after")
        norms = [[getattr(block, name) for name in names] for block in model.blocks]
        self.norms = pile(torch.stack([p for norm in each for p in norm.parameters()]) for each in norms)
        self.up = pile(block.mlp[0].weight.T for block in model.blocks)
        self.up_shift = pile(block.mlp[0].bias for block in model.blocks)
        self.down = pile(block.mlp[2].weight.T for block in model.blocks)
        self.down_shift = pile(block.mlp[2].bias for block in model.blocks)
        self.table, self.last = leaf(model.embed.weight), pile(model.norm.parameters())
        self.head, self.head_shift = leaf(model.head.weight.T), leaf(model.head.bias)

    def norm(self, i: int, which: int, x: Tensor) -> Tensor:
        wide = self.fault == "sandwich_norm_with_another_eps" and (i, which) == (0, 3)
        return centred(x, *self.norms[i, 2 * which : 2 * which + 2], eps=1e-3 if wide else 1e-5)

    def attend(self, i: int, x: Tensor) -> Tensor:
        shift = self.qkv_shift[i][:, None, :, None]
        q, k, v = torch.einsum("tnc,shdc->snhtd", x, self.qkv[i]) + shift
        steps = torch.arange(len(x)).to(x)
        behind = steps[:, None] - steps
        slopes = 0.25 ** torch.arange(1, 5).to(x)
        if self.fault == "last_head_without_its_bias" and i == 2:
            slopes = slopes * (torch.arange(4) < 3).to(x)
        scores = torch.einsum("nhtd,nhsd->nhts", q * 6**-0.5, k) - slopes[:, None, None] * behind
        mixed = shares(scores.masked_fill(behind < 0, float("-inf"))) @ v
        return torch.einsum("nhtd,chd->tnc", mixed, self.out[i]) + self.out_shift[i]

    def forward(self, drawn: Tensor) -> Tensor:
        x = self.table[drawn.T]
        for i in range(len(self.qkv)):
            x = x + self.norm(i, 1, self.attend(i, self.norm(i, 0, x)))
            h = F.gelu(self.norm(i, 2, x) @ self.up[i] + self.up_shift[i], approximate="tanh")
            x = x + self.norm(i, 3, h @ self.down[i] + self.down_shift[i])
        return (centred(x, *self.last) @ self.head + self.head_shift).transpose(0, 1)


class Halves(Port):
    """Even features before odd ones in queries and keys, so that the halves turn against each other."""

    def take(self, model) -> None:
        order = torch.tensor([0, 2, 4, 1, 3, 5])
        self.table = leaf(model.embed.weight)
        self.own_head = leaf(model.head.weight) if self.fault == "head_no_longer_tied" else None
        self.last = leaf(model.norm.weight)
        self.layers = nn.ModuleList()
        for block in model.blocks:
            a, m = block.attention, block.mlp
            weights = {
                "norms": torch.stack([block.norm1.weight, block.norm2.weight]),
                "q": a.q.weight.view(2, 2, 6, 24)[:, :, order],
                "kv": torch.stack([a.k.weight.view(2, 6, 24)[:, order], a.v.weight.view(2, 6, 24)]),
                "out": a.out.weight.view(24, 2, 2, 6),
                "wide": torch.cat([m.up.weight, m.gate.weight]),
                "down": m.down.weight,
            }
            self.layers.append(nn.ParameterDict({name: leaf(w) for name, w in weights.items()}))

    def turned(self, i: int, x: Tensor) -> Tensor:
        """[N, T, ..., 6], turned by the step."""
        steps, powers = torch.arange(x.shape[1]).to(x), torch.arange(3).to(x) / 3
        angles = steps.view(-1, *[1] * (x.ndim - 2)) / 50.0**powers
        cos, sin = angles.cos(), angles.sin()
        if self.fault == "rotary_tables_in_bfloat16" and i == 1:
            cos, sin = cos.bfloat16().to(x), sin.bfloat16().to(x)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def banded(self, q: Tensor, k: Tensor, v: Tensor, window: int = 4) -> Tensor:
        """For each step its own few keys."""
        k, v = (F.pad(y, (0, 0, 0, 0, window - 1, 0)).unfold(1, window, 1) for y in (k, v))
        scores = torch.einsum("ntgpd,ntgdw->ntgpw", q, k) / 6**0.5
        early = torch.arange(q.shape[1])[:, None] + torch.arange(window) < window - 1
        scores = scores.masked_fill(early[:, None, None], float("-inf"))
        return torch.einsum("ntgpw,ntgdw->ntgpd", scores.softmax(-1), v)

    def masked(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores [N, groups, queries of a group, T, T]."""
        scores = torch.einsum("ntgpd,nsgd->ngpts", q, k) / 6**0.5
        back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        window = 5 if self.fault == "window_one_step_wider" and i == 2 else 4
        scores = scores.masked_fill((back < 0) | (back >= window), float("-inf"))
        return torch.einsum("ngpts,nsgd->ntgpd", scores.softmax(-1), v)

    def attend(self, i: int, x: Tensor) -> Tensor:
        w = self.layers[i]
        q = self.turned(i, torch.einsum("ntc,gpdc->ntgpd", x, w["q"]))
        k, v = torch.einsum("ntc,sgdc->sntgd", x, w["kv"])
        k = self.turned(i, k)
        mixed = self.banded(q, k, v) if self.fault == "windows_by_unfolding" else self.masked(i, q, k, v)
        return torch.einsum("ntgpd,cgpd->ntc", mixed, w["out"])

    def forward(self, drawn: Tensor) -> Tensor:
        x = F.embedding(drawn, self.table)
        for i, w in enumerate(self.layers):
            x = x + self.attend(i, scaled(x, w["norms"][0]))
            up, gate = (scaled(x, w["norms"][1]) @ w["wide"].T).chunk(2, -1)
            x = x + (up * gate * gate.sigmoid()) @ w["down"].T
        head = self.table if self.own_head is None else self.own_head
        return scaled(x, self.last) @ head.T


pairs(SAME, alibi_decoder, OneWeight, alibi_blocks_in_one_weight="blocks stacked, steps first")
wrong(
    alibi_decoder,
    OneWeight,
    last_head_without_its_bias=("fault of one head", "blocks.2.attention"),
    sandwich_norm_with_another_eps=("another eps", "blocks.0.mlp_after"),
)
pairs(
    SAME,
    grouped_decoder,
    Halves,
    rotary_halves_with_permuted_rows="another layout of rotary features",
    windows_by_unfolding="gathered in place of masked",
)
pairs(
    "reduced_precision",
    grouped_decoder,
    Halves,
    rotary_tables_in_bfloat16=("tables in fewer bits", "blocks.1.attention"),
)
wrong(
    grouped_decoder,
    Halves,
    window_one_step_wider=("off by one", "blocks.2.attention"),
    head_no_longer_tied=("untied weight", ("embed", "head"), "weight gradient"),
)


@method_of("blocks.1.attention", SAME, "a bias the softmax cancels", alibi_decoder, method="bias")
def bias_by_the_key_alone(self: Biased, x: Tensor) -> Tensor:
    slopes = 2.0 ** (-8 / self.heads * torch.arange(1, self.heads + 1).to(x))
    steps = torch.arange(x.shape[1]).to(x)
    rising = (slopes[:, None] * steps)[:, None].expand(-1, len(steps), -1)
    return rising.masked_fill(steps > steps[:, None], float("-inf"))


@method_of("blocks.2.attention", SAME, "positions counted from elsewhere", grouped_decoder, method="turn")
def rotary_from_another_start(self: Grouped, x: Tensor) -> Tensor:
    longer = F.pad(x, (0, 0, 7, 0))
    return Grouped.turn(self, longer)[:, :, 7:]
