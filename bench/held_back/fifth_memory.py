"""Attention with a memory of the segment before, by index of distances and in another layout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_ports import SAME, centred, flattened, next_token, pairs, shares, tokens
from bench.held_back._fourth_ports import Port, wrong
from bench.tasks import _task


class Places(nn.Module):
    """Sines and cosines of the distances length - 1 to 0."""

    def forward(self, x: Tensor, length: int) -> Tensor:
        rates = 100.0 ** (-torch.arange(10).to(x) / 10)
        angles = torch.arange(length - 1, -1, -1).to(x)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1)


class Relative(nn.Module):
    """Attention of a segment to itself and to the memory before it (Transformer-XL)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.r, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.u, self.v = (nn.Parameter(0.5 * torch.randn(heads, width // heads)) for _ in range(2))

    def shift(self, scores: Tensor) -> Tensor:
        n, h, t, s = scores.shape
        return F.pad(scores, (1, 0)).view(n, h, s + 1, t)[:, :, 1:].reshape(n, h, t, s)

    def scores(self, x: Tensor, k: Tensor, places: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (self.heads, -1))
        r = self.r(places).unflatten(1, (self.heads, -1))
        content = torch.einsum("nthd,nshd->nhts", q + self.u, k)
        scores = content + self.shift(torch.einsum("nthd,shd->nhts", q + self.v, r))
        later = torch.ones_like(scores[0, 0]).triu(1 + k.shape[1] - x.shape[1]).bool()
        return (scores / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))

    def forward(self, x: Tensor, memory: Tensor, places: Tensor) -> Tensor:
        context = torch.cat([memory.detach(), x], 1)
        k, v = self.kv(context).unflatten(2, (2, self.heads, -1)).unbind(2)
        mixed = torch.einsum("nhts,nshd->nthd", self.scores(x, k, places).softmax(-1), v)
        return self.out(mixed.flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention, self.norm1 = Relative(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor, places: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, memory, places))
        return self.norm2(x + self.mlp(x))


class Segments(nn.Module):
    """Three segments of six tokens; a block's memory is what it was given of the segment before."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(19, 20), Places()
        self.blocks = nn.ModuleList(Block(20, 2) for _ in range(3))
        self.head = nn.Linear(20, 19)

    def forward(self, drawn: Tensor) -> Tensor:
        logits, memories = [], [torch.empty(0)] * len(self.blocks)
        for segment in drawn.split(6, 1):
            x, given = self.embed(segment), []
            memories = [m if m.numel() else x[:, :0] for m in memories]
            for block, memory in zip(self.blocks, memories, strict=True):
                given.append(x)
                x = block(x, memory, self.places(x, memory.shape[1] + x.shape[1]))
            memories = given
            logits.append(self.head(x))
        return torch.cat(logits, 1)


class TimeFirst(Port):
    """[T, N, C]; one block over all segments after the other; distances by index, not by a shift."""

    def take(self, model: Segments) -> None:
        self.table, self.head = flattened(model.embed), flattened(model.head)
        self.layers = nn.ModuleList(flattened(block) for block in model.blocks)

    def places(self, x: Tensor, length: int) -> Tensor:
        """Of the distances 0 to length - 1."""
        angles = torch.outer(torch.arange(length).to(x), 0.01 ** (torch.arange(10).to(x) / 10))
        return torch.cat([angles.sin(), angles.cos()], 1)

    def attend(self, i: int, x: Tensor, memory: Tensor) -> Tensor:
        w, (t, m) = self.layers[i], (len(x), len(memory))
        q, own = x @ w["attention_q_weight"].T, F.linear(x, w["attention_kv_weight"])
        k, v = torch.cat([F.linear(memory, w["attention_kv_weight"]), own]).chunk(2, 2)
        r = self.places(x, t + m) @ w["attention_r_weight"].T
        q, k, v, r = (y.unflatten(-1, (2, 10)) for y in (q, k, v, r))
        back = torch.arange(t)[:, None] + m - torch.arange(t + m)
        by_place = torch.einsum("inhd,khd->nhik", q + w["attention_v"], r)
        by_place = by_place.gather(3, back.clamp(min=0).expand_as(by_place))
        scores = (torch.einsum("inhd,jnhd->nhij", q + w["attention_u"], k) + by_place) * 10**-0.5
        mixed = torch.einsum("nhij,jnhd->inhd", shares(scores.masked_fill(back < 0, -1e30)), v)
        return mixed.flatten(2) @ w["attention_out_weight"].T

    def block(self, i: int, x: Tensor, memory: Tensor) -> Tensor:
        w = self.layers[i]
        x = centred(x + self.attend(i, x, memory), w["norm1_weight"], w["norm1_bias"])
        h = F.linear(x, w["mlp_0_weight"], w["mlp_0_bias"]).relu()
        h = x + F.linear(h, w["mlp_2_weight"], w["mlp_2_bias"])
        return centred(h, w["norm2_weight"], w["norm2_bias"])

    def forward(self, drawn: Tensor) -> dict[str, Tensor]:
        x = self.table["weight"][drawn.T].split(6)
        for i in range(len(self.layers)):
            y = []
            for j, segment in enumerate(x):
                kept = x[j - 1] if j else segment[:0]
                if self.fault == "memory_after_the_block" and j:
                    kept = y[j - 1]
                if self.fault != "memory_keeps_its_graph" or i != 1:
                    kept = kept.detach()
                y.append(self.block(i, segment, kept))
            x = y
        return F.linear(torch.cat(x).transpose(0, 1), self.head["weight"], self.head["bias"])


segments = _task("fifth_segments", Segments, tokens(4, 18, 19), next_token)
pairs(SAME, segments, TimeFirst, distances_by_index="another layout, gathered in place of shifted")
wrong(
    segments,
    TimeFirst,
    memory_keeps_its_graph=("missing detach", "blocks.1.attention", "input gradient"),
    memory_after_the_block=("another tensor kept", ""),
)


@method_of("blocks.1.attention", SAME, "softmax in two parts", segments)
def memory_and_segment_apart(self: Relative, x: Tensor, memory: Tensor, places: Tensor) -> Tensor:
    """Each part's own average, weighed by the parts' log-sum-exps."""
    parts = [part for part in (memory.detach(), x) if part.shape[1]]
    k, v = zip(*(self.kv(p).unflatten(2, (2, self.heads, -1)).unbind(2) for p in parts), strict=True)
    scores = self.scores(x, torch.cat(k, 1), places).split([p.shape[1] for p in parts], 3)
    weights = torch.stack([s.logsumexp(3) for s in scores]).softmax(0)
    means = torch.stack(
        [torch.einsum("nhts,nshd->nhtd", s.softmax(3), y) for s, y in zip(scores, v, strict=True)]
    )
    return self.out((weights[..., None] * means).sum(0).transpose(1, 2).flatten(2))


@method_of("blocks.2.attention", "bug", "padding side", segments, method="shift")
def shift_padded_at_the_wrong_end(self: Relative, scores: Tensor) -> Tensor:
    n, h, t, s = scores.shape
    return F.pad(scores, (0, 1)).view(n, h, s + 1, t)[:, :, :-1].reshape(n, h, t, s)
