"""Networks on sequences written anew, rightly: packed attention, stacked experts, an LSTM by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._heldout_fault_parts import shuffled
from bench.cases._heldout_fault_sequence import EncoderLayer, MaskedEncoder, Tagger
from bench.cases._heldout_fault_tables import Mixture, MixtureNet
from bench.cases._rewritten import linear_of


class PackedLayer(nn.Module):
    """An EncoderLayer without dropout: q, k and v in one product, heads in the batch, both permuted."""

    def __init__(self, layer: EncoderLayer, seed: int):
        super().__init__()
        a, width = layer.attention, layer.norm1.normalized_shape[0]
        self.heads, self.depth = a.heads, width // a.heads
        heads = shuffled(a.heads, seed)
        rows = torch.arange(width).view(a.heads, -1)[heads].flatten()
        qkv = (a.query, a.key, a.value)
        self.packed = linear_of(
            torch.cat([p.weight[rows] for p in qkv]), torch.cat([p.bias[rows] for p in qkv])
        )
        self.merge = linear_of(a.out.weight[:, rows], a.out.bias)
        units = shuffled(2 * width, seed + 10)
        self.w1 = linear_of(layer.mlp.up.weight[units], layer.mlp.up.bias[units])
        self.w2 = linear_of(layer.mlp.down.weight[:, units], layer.mlp.down.bias)
        self.before, self.between = layer.norm1, layer.norm2

    def scaled(self, scores: Tensor) -> Tensor:
        return scores / self.depth**0.5

    def looks(self, mask: Tensor) -> Tensor:
        """The mask [N, T] for scores [N * heads, T, T]."""
        return mask.repeat_interleave(self.heads, 0)[:, None]

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~self.looks(mask), float("-inf")).softmax(-1)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        n, t, d = x.shape
        parts = self.packed(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.flatten(1, 2)
        mixed = torch.bmm(self.weigh(self.scaled(torch.bmm(q, k.transpose(1, 2))), mask), v)
        return self.merge(mixed.view(n, self.heads, t, -1).transpose(1, 2).reshape(n, t, d))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attend(self.before(x), mask)
        return self.w2(F.gelu(self.w1(self.between(x)))) + x


class PackedEncoder(nn.Module):
    """MaskedEncoder of PackedLayers; ``layers`` may name another class for a layer."""

    def __init__(self, net: MaskedEncoder, layers: dict[int, type[PackedLayer]] | None = None):
        super().__init__()
        self.tok, self.pos = net.embed, nn.Parameter(net.position.detach().clone())
        kinds = [(layers or {}).get(i, PackedLayer) for i in range(len(net.layers))]
        self.stack = nn.ModuleList(
            kind(layer, i) for i, (kind, layer) in enumerate(zip(kinds, net.layers, strict=True))
        )
        self.last, self.out = net.norm, net.fc

    def place(self, tokens: Tensor) -> Tensor:
        return self.tok(tokens) + self.pos[: tokens.shape[1]]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.place(tokens)
        for layer in self.stack:
            x = layer(x, mask)
        share = mask.to(x.dtype) / mask.sum(1, keepdim=True)
        return self.out(torch.einsum("ntd,nt->nd", self.last(x), share))


class StackedMixture(nn.Module):
    """Mixture whose experts, in another order, lie in one tensor each way; every expert sees every row."""

    def __init__(self, mixture: Mixture):
        super().__init__()
        order = shuffled(len(mixture.experts), 3).tolist()
        experts = [mixture.experts[i] for i in order]
        self.switch = linear_of(mixture.router.weight[order], mixture.router.bias[order])
        for name, layers in (("up", [e.up for e in experts]), ("down", [e.down for e in experts])):
            self.register_parameter(
                f"{name}_w", nn.Parameter(torch.stack([x.weight for x in layers]).detach())
            )
            self.register_parameter(f"{name}_b", nn.Parameter(torch.stack([x.bias for x in layers]).detach()))

    def weights(self, x: Tensor) -> Tensor:
        """[N, experts]: zero but for the two best."""
        best, chosen = self.switch(x).topk(2, -1)
        return torch.zeros_like(x[:, : len(self.up_w)]).scatter(1, chosen, best.softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("nd,ehd->enh", x, self.up_w) + self.up_b[:, None])
        results = torch.baddbmm(self.down_b[:, None], hidden, self.down_w.transpose(1, 2))
        return torch.einsum("ne,end->nd", self.weights(x), results)


def stacked(net: MixtureNet, kind: type[StackedMixture] = StackedMixture) -> MixtureNet:
    """``net`` with its experts stacked."""
    net.mixture = kind(net.mixture)
    return net


class HandLSTM(nn.Module):
    """A bidirectional LSTM stepped by hand; each direction has two linear layers, gates in torch's order."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.inputs, self.states = nn.ModuleList(), nn.ModuleList()
        for end in ("", "_reverse"):
            w_ih, w_hh, b_ih, b_hh = (
                getattr(lstm, f"{kind}_l0{end}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            self.inputs.append(linear_of(w_ih, b_ih))
            self.states.append(linear_of(w_hh, b_hh))

    def start(self, direction: int, x: Tensor) -> tuple[Tensor, Tensor]:
        zeros = x.new_zeros(x.shape[0], self.states[0].in_features)
        return zeros, zeros

    def recurrent(self, direction: int, h: Tensor, steps: int) -> Tensor:
        return self.states[direction](h)

    def finish(self, direction: int, h: Tensor, c: Tensor) -> None:
        """What happens after the last step."""

    def run(self, direction: int, x: Tensor) -> Tensor:
        h, c = self.start(direction, x)
        found = []
        for u in self.inputs[direction](x).unbind(1):
            i, f, g, o = (u + self.recurrent(direction, h, x.shape[1])).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        self.finish(direction, h, c)
        return torch.stack(found, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.cat([self.run(0, x), self.run(1, x.flip(1)).flip(1)], -1), None


def by_hand(net: Tagger, kind: type[HandLSTM] = HandLSTM) -> Tagger:
    """``net`` with its LSTM by hand."""
    net.lstm = kind(net.lstm)
    return net
