"""A distilled image transformer with talking heads: pixels regrouped, heads first, weights in few tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import leaf, pile
from bench.held_back._third_ports import faults
from bench.tasks import _task

W, HEADS = 24, 4


class Talking(nn.Module):
    """Scores are mixed over the heads before the softmax, weights after it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = self.before((q @ k.mT * 6**-0.5).permute(0, 2, 3, 1))
        weights = self.after(scores.softmax(2)).permute(0, 3, 1, 2)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class ByClass(nn.Module):
    """Only the first two tokens ask; all of them answer."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(W, W), nn.Linear(W, 2 * W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x[:, :2]), self.kv(x).chunk(2, 2)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(W), attn, nn.LayerNorm(W)
        self.mlp = nn.Sequential(nn.Linear(W, 32), nn.GELU(), nn.Linear(32, W))
        self.gamma1, self.gamma2 = (nn.Parameter(0.3 + 0.1 * torch.randn(W)) for _ in range(2))

    def forward(self, x: Tensor, around: Tensor | None = None) -> Tensor:
        y = x if around is None else torch.cat([x, around], 1)
        x = x + self.gamma1 * self.attn(self.norm1(y))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class Distilled(nn.Module):
    """[N, 3, 12, 12] -> two heads' logits in training, their mean in eval mode."""

    def __init__(self):
        super().__init__()
        self.patch, self.drop = nn.Conv2d(3, W, 4, stride=4), nn.Dropout(0.1)
        self.position, self.ask = (
            nn.Parameter(0.2 * torch.randn(9, W)),
            nn.Parameter(0.2 * torch.randn(1, 2, W)),
        )
        self.blocks, self.last = nn.ModuleList([Block(Talking()), Block(Talking())]), Block(ByClass())
        self.norm, self.head, self.head_dist = nn.LayerNorm(W), nn.Linear(W, 5), nn.Linear(W, 5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.drop(self.patch(x).flatten(2).mT.contiguous() + self.position)
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.last(self.ask.expand(len(x), -1, -1), x))
        both = self.head(x[:, 0]), self.head_dist(x[:, 1])
        return both if self.training else (both[0] + both[1]) / 2


def _loss(out: Tensor | tuple | dict, target: Tensor) -> Tensor:
    out = tuple(out.values()) if isinstance(out, dict) else out
    out = out if isinstance(out, tuple) else (out,)
    return sum(F.cross_entropy(logits, target) for logits in out) / len(out)


class Regrouped(nn.Module):
    def __init__(self, model: Distilled, wrong: str = ""):
        super().__init__()
        self.wrong, layers = wrong, [*model.blocks, model.last]
        self.patch, self.patch_bias = leaf(model.patch.weight.permute(2, 3, 1, 0)), leaf(model.patch.bias)
        self.places, self.ask = leaf(model.position), leaf(model.ask[0])
        self.qkv = pile(b.attn.qkv.weight.T.reshape(W, 3, HEADS, 6) for b in model.blocks)
        self.qkv_bias = pile(b.attn.qkv.bias.view(3, HEADS, 6) for b in model.blocks)
        self.talk = pile(torch.stack([b.attn.before.weight, b.attn.after.weight]) for b in model.blocks)
        self.talk_bias = pile(torch.stack([b.attn.before.bias, b.attn.after.bias]) for b in model.blocks)
        last = model.last.attn
        self.asks, self.asks_bias = leaf(last.q.weight.T), leaf(last.q.bias)
        self.answers, self.answers_bias = pile(last.kv.weight.chunk(2)), pile(last.kv.bias.chunk(2))
        self.out = pile(b.attn.proj.weight for b in layers)
        self.out_bias = pile(b.attn.proj.bias for b in layers)
        self.scales = pile(torch.stack([b.gamma1, b.gamma2]) for b in layers)
        self.feeds = nn.ModuleList(nn.ModuleList([b.norm1, b.norm2, b.mlp]) for b in layers)
        self.norm = model.norm
        self.heads = pile([model.head.weight.T, model.head_dist.weight.T])
        self.heads_bias = pile([model.head.bias, model.head_dist.bias])

    def talking(self, i: int, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("npd,dche->cnphe", x, self.qkv[i]) + self.qkv_bias[i][:, None, None]
        (before, after), (shift, shift2) = self.talk[i], self.talk_bias[i][..., None, None]
        if self.wrong == "weights_mixed_by_the_transpose" and i:
            after = after.T
        scores = torch.einsum("nphe,nqhe,gh->ngpq", q / 6**0.5, k, before) + shift
        weights = torch.einsum("nhpq,gh->ngpq", scores.softmax(3), after) + shift2
        return torch.einsum("ngpq,nqge->npge", weights, v).flatten(2)

    def asking(self, x: Tensor) -> Tensor:
        seen = x[:, 2:] if self.wrong == "class_tokens_see_patches_alone" else x
        q = (x[:, :2] @ self.asks + self.asks_bias).unflatten(2, (HEADS, 6))
        kv = torch.einsum("npd,ced->cnpe", seen, self.answers) + self.answers_bias[:, None, None]
        k, v = kv.unflatten(3, (HEADS, 6))
        weights = torch.einsum("nphe,nqhe->nhpq", q, k).mul(6**-0.5).softmax(3)
        return torch.einsum("nhpq,nqhe->nphe", weights, v).flatten(2)

    def layer(self, i: int, x: Tensor, around: Tensor | None = None) -> Tensor:
        norm1, norm2, mlp = self.feeds[i]
        y = norm1(x if around is None else torch.cat([x, around], 1))
        mixed = self.asking(y) if i == 2 else self.talking(i, y)
        scale, scale2 = self.scales[i]
        if self.wrong == "one_branch_without_its_scale" and i == 0:
            scale2 = 1.0
        x = x + scale * F.linear(mixed, self.out[i], self.out_bias[i])
        return x + scale2 * mlp(norm2(x))

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        patches = x.unflatten(3, (3, 4)).unflatten(2, (3, 4))
        x = torch.einsum("ncaubw,uwcd->nabd", patches, self.patch) + self.patch_bias
        x = (x.transpose(1, 2) if self.wrong == "patches_placed_by_columns" else x).flatten(1, 2)
        on = self.training or self.wrong == "dropout_stays_on_in_eval_mode"
        x = F.dropout(x + self.places, 0.1, on)
        x = self.layer(1, self.layer(0, x))
        x = self.norm(self.layer(2, self.ask.expand(len(x), 2, W), x))
        logits = torch.einsum("npd,pdc->pnc", x, self.heads) + self.heads_bias[:, None]
        if self.training:
            return {"logits": logits[0], "distilled": logits[1]}
        return logits[0] if self.wrong == "class_head_alone_in_eval_mode" else logits.mean(0)


distilled = _task(
    "third_distilled", Distilled, lambda: (torch.randn(8, 3, 12, 12), torch.randint(5, (8,))), _loss
)
faults(
    distilled,
    Regrouped,
    weights_mixed_by_the_transpose=("blocks.1.attn.after",),
    patches_placed_by_columns=(("", "patch"),),
    class_tokens_see_patches_alone=("last.attn",),
    one_branch_without_its_scale=("blocks.0",),
    dropout_stays_on_in_eval_mode=("drop", "eval"),
    class_head_alone_in_eval_mode=("", "eval"),
)
