"""Two ports of RWKV-6: branches that see all pairs of tokens at once, and flat chunks with a state."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirteenth_receptance import RWKV, next_token, strides

task = few("thirteenth_receptance", RWKV, strides, next_token)
SHIFTED = ("blocks.1.ffn", "blocks.1.ffn.time_shift")


class Blend(nn.Module):
    """Five mixtures of each token and its predecessor, stacked in front: r, k, v, g, w."""

    def __init__(self, att: nn.Module):
        super().__init__()
        order = [3, 1, 2, 4, 0]
        self.first = leaf(att.time_maa_x.flatten())
        self.share = pile(getattr(att, f"time_maa_{name}")[0] for name in "rkvgw")
        self.down = leaf(att.time_maa_w1.unflatten(1, (5, -1)).permute(1, 0, 2)[order])
        self.up = leaf(att.time_maa_w2[order])

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        hidden = torch.tanh(torch.lerp(x, before, self.first).flatten(0, 1) @ self.down)
        return torch.lerp(x, before, (self.share + hidden @ self.up).unflatten(1, x.shape[:2]))


class Recall(nn.Module):
    """Time mixing in one piece: a score for each pair of tokens, the own one by the bonus."""

    def __init__(self, att: nn.Module):
        super().__init__()
        self.blend, self.bonus, self.base = Blend(att), leaf(att.time_faaaa), leaf(att.time_decay.flatten())
        self.maps = pile(x.weight.T for x in (att.receptance, att.key, att.value, att.gate))
        self.down, self.up, self.bend = leaf(att.time_decay_w1.T), leaf(att.time_decay_w2.T), torch.tanh
        self.heads, self.eps, self.over_time = att.ln_x.num_groups, att.ln_x.eps, False
        self.gain, self.shift, self.out = (leaf(x) for x in (*att.ln_x.parameters(), att.output.weight.T))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.blend(x)
        r, k, v, gate = (mixed[:4].flatten(1, 2) @ self.maps).unflatten(1, x.shape[:2])
        logs = -F.linear(self.bend(F.linear(mixed[4], self.down)), self.up, self.base).exp()
        r, k, v, logs = (z.unflatten(2, self.bonus.shape).transpose(1, 2) for z in (r, k, v, logs))
        sums = logs.cumsum(2)
        apart = (sums - logs)[:, :, :, None] - sums[:, :, None]
        past = torch.ones(apart.shape[2:4], dtype=torch.bool, device=x.device).tril(-1)
        kept = apart.masked_fill(~past[..., None], -torch.inf).exp()
        own = torch.eye(len(past), dtype=x.dtype, device=x.device)[:, :, None] * self.bonus[:, None, None]
        scores = (r[:, :, :, None] * k[:, :, None] * (kept + own)).sum(-1)
        return (self.normed((scores @ v).transpose(1, 2).flatten(2)) * F.silu(gate)) @ self.out

    def normed(self, y: Tensor) -> Tensor:
        rows = y.transpose(1, 2) if self.over_time else y.flatten(0, 1)
        rows = F.group_norm(rows, self.heads, self.gain, self.shift, self.eps)
        return rows.transpose(1, 2) if self.over_time else rows.view_as(y)


class Squares(nn.Module):
    def __init__(self, ffn: nn.Module):
        super().__init__()
        self.share_k, self.share_r = leaf(ffn.time_maa_k[0, 0]), leaf(ffn.time_maa_r[0, 0])
        self.wide, self.narrow, self.door = (leaf(x.weight.T) for x in (ffn.key, ffn.value, ffn.receptance))

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        hidden = F.relu(torch.lerp(x, before, self.share_k) @ self.wide).square() @ self.narrow
        return hidden * torch.sigmoid(torch.lerp(x, before, self.share_r) @ self.door)


class Branch(nn.Module):
    def __init__(self, norm: nn.LayerNorm, body: nn.Module):
        super().__init__()
        self.norm, self.body, self.late = norm, body, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y if self.late else x) + self.body(y)


class FinchBranches(Port):
    """A table, and a trunk of norm, six branches, norm and head."""

    def take(self, model: RWKV) -> None:
        self.table, pairs = leaf(model.emb.weight), []
        for block in model.blocks:
            pairs += [Branch(block.ln1, Recall(block.att)), Branch(block.ln2, Squares(block.ffn))]
        self.trunk = nn.Sequential(model.blocks[0].ln0, *pairs, model.ln_out, model.head)
        self.unused = 0 if self.fault == "finch_token_zero_embedded_as_padding" else None
        pairs[0].body.over_time = self.fault == "finch_head_norm_also_over_time"
        if self.fault == "finch_middle_decay_lora_without_its_tanh":
            pairs[2].body.bend = nn.Identity()
        pairs[5].late = self.fault == "finch_last_channel_residual_taken_behind_its_norm"

    def forward(self, tokens: Tensor) -> Tensor:
        return self.trunk(F.embedding(tokens, self.table, self.unused))


class FinchChunks(Port):
    """Stacked weights; chunks of four in training, token by token with kept states in eval mode."""

    def take(self, model: RWKV) -> None:
        blocks = model.blocks
        atts, ffns, (h, n) = [b.att for b in blocks], [b.ffn for b in blocks], blocks[0].att.time_faaaa.shape
        norms = [blocks[0].ln0, *(norm for b in blocks for norm in (b.ln1, b.ln2)), model.ln_out]
        self.table, self.final = leaf(model.emb.weight), leaf(model.head.weight)
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.head_norms = pile(torch.stack([a.ln_x.weight, a.ln_x.bias]).view(2, h, 1, n) for a in atts)
        self.maa = pile(torch.cat([getattr(a, f"time_maa_{c}")[0] for c in "xwrkvg"]) for a in atts)
        self.down = pile(a.time_maa_w1.unflatten(1, (5, -1))[:, [0, 3, 1, 2, 4]] for a in atts)
        self.up = pile(a.time_maa_w2[[0, 3, 1, 2, 4]] for a in atts)
        self.decay, self.bonus = pile(a.time_decay.view(h, n) for a in atts), pile(a.time_faaaa for a in atts)
        self.decay_down = pile(a.time_decay_w1 for a in atts)
        self.decay_up = pile(a.time_decay_w2.unflatten(1, (h, n)) for a in atts)
        maps = ([a.receptance, a.key, a.value, a.gate] for a in atts)
        self.maps = pile(torch.stack([x.weight.unflatten(0, (h, n)) for x in four]) for four in maps)
        self.out = pile(a.output.weight.unflatten(1, (h, n)) for a in atts)
        self.ffn_maa = pile(torch.cat([f.time_maa_k[0], f.time_maa_r[0]]) for f in ffns)
        self.ffn_in = pile(torch.cat([f.key.weight, f.receptance.weight]) for f in ffns)
        self.ffn_out = pile(f.value.weight for f in ffns)

    def norm(self, j: int, x: Tensor) -> Tensor:
        unbiased = self.fault == "finch_middle_norm_by_sample_variance" and j == 3
        spread, center = torch.var_mean(x, -1, correction=int(unbiased), keepdim=True)
        return (x - center) / (spread + 1e-5).sqrt() * self.norms[j, 0] + self.norms[j, 1]

    def recall(self, i: int, parts: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        pieces = []
        for r, k, v, logs in zip(*(part.split(4, 2) for part in parts), strict=True):
            if self.fault == "finch_last_state_cut_loose_at_each_chunk" and i == 2:
                state = state.detach()
            sums = logs.cumsum(2)
            gone, left = sums - logs, sums[:, :, -1:] - sums
            mask = torch.full((r.shape[2],) * 2, -torch.inf).to(r).triu()[..., None]
            near = (gone[:, :, :, None] - sums[:, :, None] + mask).exp()
            y = torch.einsum("bhik,bhijk,bhjk,bhjv->bhiv", r, near, k, v) + (r * gone.exp()) @ state
            u, across = self.bonus[i][:, None], i == 0 and self.fault == "finch_bonus_laid_along_the_values"
            own = (r * k).sum(-1, keepdim=True) * u if across else (r * u * k).sum(-1, keepdim=True)
            pieces.append(y + own * v)
            state = sums[:, :, -1].exp()[..., None] * state + (k * left.exp()).mT @ v
        return torch.cat(pieces, 2), state

    def time(self, i: int, x: Tensor, last: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gap = torch.cat([last, x[:, :-1]], 1) - x
        low = torch.einsum("btc,cmd->mbtd", x + gap * self.maa[i, 0], self.down[i]).tanh()
        share = self.maa[i, 1:, None, None] + torch.einsum("mbtd,mdc->mbtc", low, self.up[i])
        mixed = x + gap * share
        r, k, v, g = torch.einsum("mbtc,mhnc->mbhtn", mixed[1:], self.maps[i])
        lift = torch.einsum("btd,dhn->bhtn", (mixed[0] @ self.decay_down[i]).tanh(), self.decay_up[i])
        y, state = self.recall(i, (r, k, v, -(self.decay[i][:, None] + lift).exp()), state)
        spread, center = torch.var_mean(y, -1, correction=0, keepdim=True)
        y = (y - center) / (spread + 64e-5).sqrt() * self.head_norms[i, 0] + self.head_norms[i, 1]
        return torch.einsum("bhtn,chn->btc", y * g * g.sigmoid(), self.out[i]), state

    def channel(self, i: int, x: Tensor, last: Tensor) -> Tensor:
        gap, width = torch.cat([last, x[:, :-1]], 1) - x, self.ffn_out.shape[2]
        k = (x + gap * self.ffn_maa[i, 0]) @ self.ffn_in[i, :width].T
        r = (x + gap * self.ffn_maa[i, 1]) @ self.ffn_in[i, width:].T
        return r.sigmoid() * ((k * k.relu()) @ self.ffn_out[i].T)

    def run(self, x: Tensor, kept: list) -> Tensor:
        for i, (last, state, quiet) in enumerate(kept):
            a = self.norm(2 * i + 1, x)
            y, state = self.time(i, a, last, state)
            x = x + y
            b = self.norm(2 * i + 2, x)
            x = x + self.channel(i, b, quiet)
            shared = self.fault == "finch_decoding_keeps_one_token_for_both_middle_mixers" and i == 1
            kept[i] = a[:, -1:], state, (a if shared else b)[:, -1:]
        return self.norm(7, x) @ self.final.T

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(0, self.table[tokens])
        (layers, h, n), none = self.bonus.shape, torch.zeros_like(x[:, :1])
        kept = [(none, x.new_zeros(len(x), h, n, n), none) for _ in range(layers)]
        return torch.cat([self.run(part, kept) for part in x.split(x.shape[1] if self.training else 1, 1)], 1)


right(task, "finch_network_of_branches", "all pairs at once in a tree of branches", FinchBranches)
right(task, "finch_network_by_chunks", "stacked weights, chunks with a state, decoding", FinchChunks)
wrong(
    task,
    FinchBranches,
    finch_token_zero_embedded_as_padding=("a padding index", "emb", "weight gradient"),
    finch_head_norm_also_over_time=("an axis too many", ("blocks.0.att.ln_x", "blocks.0.att")),
    finch_middle_decay_lora_without_its_tanh=("an activation missing", "blocks.1.att"),
    finch_last_channel_residual_taken_behind_its_norm=("residual behind the norm", "blocks.2"),
)
wrong(
    task,
    FinchChunks,
    finch_middle_norm_by_sample_variance=("unbiased variance", "blocks.1.ln1"),
    finch_last_state_cut_loose_at_each_chunk=("a state detached", "blocks.2.att", GRADIENTS),
    finch_bonus_laid_along_the_values=("a factor along another axis", "blocks.0.att"),
    finch_decoding_keeps_one_token_for_both_middle_mixers=("one state for two", SHIFTED, "eval"),
)
