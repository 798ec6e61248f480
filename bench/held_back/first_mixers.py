"""More mixers: experts, a low-rank adapter on frozen layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import BACK, both, leaf, pile
from bench.held_back._first_shell import W, ported, shell


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(W, 12), nn.GELU(), nn.Linear(12, W)) for _ in range(4)
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = self.router(x).softmax(-1).topk(2)
        return best / best.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x.flatten(0, 1))
        out = torch.zeros_like(x).flatten(0, 1)
        for i, expert in enumerate(self.experts):
            row, slot = (chosen == i).nonzero().unbind(1)
            out = out.index_add(0, row, gates[row, slot, None] * expert(x.flatten(0, 1)[row]))
        return out.view_as(x)


class Dense(nn.Module):
    """Every expert for every token, in stacked tensors."""

    def __init__(self, m: Experts, wrong: bool):
        super().__init__()
        self.wrong, self.pick = wrong, leaf(m.router.weight.T)
        self.up, self.up_bias = pile(e[0].weight for e in m.experts), pile(e[0].bias for e in m.experts)
        self.down, self.down_bias = pile(e[2].weight.T for e in m.experts), pile(e[2].bias for e in m.experts)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = (x @ self.pick).softmax(-1).topk(2)
        best = best if self.wrong else F.normalize(best, p=1, dim=-1)
        gates = torch.zeros_like(x[..., :4]).scatter(-1, chosen, best)
        inner = F.gelu(torch.einsum("...d,efd->...ef", x, self.up) + self.up_bias)
        return torch.einsum("...ef,efd,...e->...d", inner, self.down, gates) + gates @ self.down_bias


class Sorted(nn.Module):
    """Tokens sorted by expert; the softmax over the two best alone."""

    def __init__(self, m: Experts, wrong: bool):
        super().__init__()
        self.gate, self.mlps, self.wrong = m.router, m.experts, wrong

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).topk(2)
        gates, order = best.softmax(-1).flatten(), chosen.flatten().argsort(stable=True)
        parts = x.flatten(0, 1)[order // 2].split(chosen.flatten().bincount(minlength=4).tolist())
        done = torch.cat([mlp(part) for mlp, part in zip(self.mlps, parts, strict=True)])[order.argsort()]
        return (
            ((gates.detach() if self.wrong else gates)[:, None] * done).unflatten(0, (*x.shape[:2], 2)).sum(2)
        )


class Masked(Experts):
    """All tokens through each expert, the second may overwrite the first."""

    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        (gates, chosen), out = self.route(x), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (gates * (chosen == i)).sum(-1, keepdim=True)
            out = torch.where(share > 0, expert(x) * share + (0 if self.wrong else out), out)
        return out


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(3, inputs) / 4), nn.Parameter(torch.randn(outputs, 3) / 4)
        self.scale = 6 / 3

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Adapted(W, 24), Adapted(24, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class OneProduct(nn.Module):
    """Base and adapter's first half as one matrix product; the frozen tensors stay frozen."""

    def __init__(self, m: Lora, wrong: bool):
        super().__init__()
        self.scales = m.up.scale, 1.0 if wrong else m.down.scale
        self.low = nn.ParameterList(leaf(t) for t in (m.up.a, m.down.a, m.up.b.T, m.down.b.T))
        for name, tensor in m.named_parameters():
            if not tensor.requires_grad:
                self.register_parameter(name.replace(".", "_"), leaf(tensor).requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        kept = ((self.up_base_weight, self.up_base_bias), (self.down_base_weight, self.down_base_bias))
        for i, (weight, bias) in enumerate(kept):
            y, z = F.linear(x.tanh() if i else x, torch.cat([weight, self.low[i]])).split(
                [len(weight), 3], -1
            )
            x = torch.addmm(y.flatten(0, 1) + bias, z.flatten(0, 1), self.low[i + 2], alpha=self.scales[i])
            x = x.unflatten(0, y.shape[:2])
        return x


class Merged(Adapted):
    """One merged weight in eval mode."""

    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        scale = 6 if self.wrong else self.scale
        return F.linear(x, self.base.weight + scale * self.b @ self.a, self.base.bias)


moe, lora = shell("first_moe", Experts), shell("first_lora", Lora)
both(moe, ported(Dense), "all_experts_for_all", "two_best_not_renormed", "layers.0.mixer")
both(moe, ported(Sorted), "tokens_sorted_by_expert", "router_does_not_learn", "layers.1.mixer", passes=BACK)
both(moe, Masked, "experts_under_a_mask", "second_expert_overwrites", "layers.1.mixer")
both(lora, ported(OneProduct), "adapter_in_one_product", "one_branch_unscaled", "layers.0.mixer.down")
both(lora, Merged, "merged_in_eval_mode", "merged_with_alpha_alone", "layers.0.mixer.up", passes="eval")
