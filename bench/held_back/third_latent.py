"""DeepSeek's layers: attention inside the latents, stacked experts for all tokens, a balancing buffer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import later, leaf, pile
from bench.held_back._third_ports import BACK, faults
from bench.tasks import _task, _tokens_loss

W, V, EXPERTS = 20, 23, 5


def turned(x: Tensor) -> Tensor:
    """[N, T, ..., 4] rotated by place, halves apart."""
    t = torch.arange(x.shape[1], device=x.device, dtype=x.dtype).view(-1, *[1] * (x.dim() - 2))
    angles = t * x.new_tensor([1.0, 0.1])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class LatentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.down = nn.Linear(W, 20, bias=False), nn.Linear(W, 12, bias=False)
        self.norm, self.up = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(12, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, place = self.q(x).unflatten(2, (2, 10)).split([6, 4], 3)
        latent, shared = self.down(x).split([8, 4], 2)
        k, v = self.up(self.norm(latent)).unflatten(2, (2, 12)).split(6, 3)
        k = torch.cat([k, turned(shared)[:, :, None].expand(-1, -1, 2, -1)], 3)
        q, k, v = (t.transpose(1, 2) for t in (torch.cat([q, turned(place)], 3), k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Router(nn.Module):
    """The two best by score and balance, weighted by score; training moves the balance to the idle."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(EXPERTS, W))
        self.register_buffer("balance", 0.6 * torch.rand(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x @ self.weight.T).sigmoid()
        chosen = (scores + self.balance).topk(2).indices
        if self.training:
            load = F.one_hot(chosen.flatten(), EXPERTS).sum(0).to(x.dtype)
            self.balance.add_(torch.sign(load.mean() - load), alpha=0.01)
        weights = scores.gather(1, chosen)
        return weights / weights.sum(1, keepdim=True), chosen


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((W, 16), (W, 16), (16, W)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.shared = Router(), Expert()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows)
        mixed = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, slot = (chosen == i).nonzero().unbind(1)
            mixed = mixed.index_add(0, row, weights[row, slot, None] * expert(rows[row]))
        return (self.shared(rows) + 2.5 * mixed).view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(W, eps=1e-6), LatentAttention()
        self.norm2, self.moe = nn.RMSNorm(W, eps=1e-6), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.moe(self.norm2(x))


class Latent(nn.Module):
    """Tokens [N, T] -> logits [N, T, V]."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(V, W), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(W, eps=1e-6), nn.Linear(W, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (6, 9))
    return tokens[:, :-1], tokens[:, 1:]


class Absorbed(nn.Module):
    """Queries go into the latents' room, values come out of it; the shared expert is the stack's last."""

    def __init__(self, model: Latent, wrong: str = ""):
        super().__init__()
        self.wrong, blocks = wrong, model.blocks
        self.table, self.head = leaf(model.embed.weight), leaf(model.head.weight.T)
        self.norms = nn.ParameterList([leaf(model.norm.weight)])
        self.norms.extend(leaf(m.weight) for b in blocks for m in (b.norm1, b.norm2, b.attn.norm))
        self.ask = pile(b.attn.q.weight.view(2, 10, W) for b in blocks)
        self.press = pile(b.attn.down.weight.T for b in blocks)
        self.open = pile(b.attn.up.weight.view(2, 2, 6, 8) for b in blocks)
        self.close = pile(b.attn.out.weight.view(W, 2, 6) for b in blocks)
        self.choose = pile(b.moe.router.weight.T for b in blocks)
        every = [[*b.moe.experts, b.moe.shared] for b in blocks]
        self.wide = pile(torch.stack([torch.cat([e.gate.weight, e.up.weight]).T for e in es]) for es in every)
        self.narrow = pile(torch.stack([e.down.weight.T for e in es]) for es in every)
        for i, b in enumerate(blocks):
            self.register_buffer(f"offset{i}", b.moe.router.balance.clone())

    def norm(self, i: int, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norms[i]

    def attend(self, i: int, x: Tensor) -> Tensor:
        q, place = torch.einsum("ntd,hed->nthe", x, self.ask[i]).split([6, 4], 3)
        raw, shared = (x @ self.press[i]).tensor_split([8], 2)
        latent, opened = self.norm(3 * i + 3, raw), self.open[i]
        scores = torch.einsum("nthe,hel,nsl->nhts", q, opened[:, 0], latent)
        scores = scores + torch.einsum("nthe,nse->nhts", turned(place), turned(shared))
        width = 6 if self.wrong == "scale_leaves_out_the_places" and i == 0 else 10
        weights = (scores / width**0.5).masked_fill(later(x.shape[1], x.device), -torch.inf).softmax(3)
        seen = raw if self.wrong == "values_from_raw_latents" and i == 1 else latent
        return torch.einsum("nhts,nsl,hel,dhe->ntd", weights, seen, opened[:, 1], self.close[i])

    def gates(self, i: int, x: Tensor) -> Tensor:
        offset, scores = getattr(self, f"offset{i}"), torch.special.expit(x @ self.choose[i])
        biased = scores + offset
        if self.wrong == "balance_unused_in_eval_mode" and i == 1 and not self.training:
            biased = scores
        mask = torch.zeros_like(scores).scatter(-1, biased.detach().topk(2).indices, 1.0)
        if self.training:
            load, toward = mask.sum((0, 1)), -1 if self.wrong == "balance_moves_to_the_busy" and i == 0 else 1
            offset.copy_(offset + 0.01 * toward * (load.mean() - load).sign())
        picked = mask * (biased if self.wrong == "gates_from_balanced_scores" and i == 0 else scores)
        total = picked.sum(-1, keepdim=True)
        return picked / (total.detach() if self.wrong == "sum_of_gates_does_not_teach" and i == 1 else total)

    def feed(self, i: int, x: Tensor) -> Tensor:
        gate, up = torch.einsum("ntd,kde->knte", x, self.wide[i]).chunk(2, 3)
        each = torch.einsum("knte,ked->kntd", F.silu(gate) * up, self.narrow[i])
        own = 2.5 if self.wrong == "shared_expert_scaled_too" and i == 1 else 1.0
        return own * each[-1] + 2.5 * torch.einsum("kntd,ntk->ntd", each[:-1], self.gates(i, x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table[tokens]
        for i in range(2):
            x = x + self.attend(i, self.norm(3 * i + 1, x))
            x = x + self.feed(i, self.norm(3 * i + 2, x))
        return self.norm(0, x) @ self.head


latent = _task("third_latent", Latent, _batch, _tokens_loss)
faults(
    latent,
    Absorbed,
    values_from_raw_latents=("blocks.1.attn",),
    scale_leaves_out_the_places=("blocks.0.attn",),
    gates_from_balanced_scores=("blocks.0.moe.router",),
    shared_expert_scaled_too=("blocks.1.moe",),
    sum_of_gates_does_not_teach=("blocks.1.moe.router", *BACK),
    balance_moves_to_the_busy=("blocks.0.moe.router", "buffer"),
    balance_unused_in_eval_mode=("blocks.1.moe.router", "eval"),
)
