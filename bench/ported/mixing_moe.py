"""A mixture of experts as a loop against stacked kernels: all experts at once, or over sorted tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._mixing_moe import EXPERTS, GATES, HIDDEN, MOE, RATE, TOP, moe
from bench.ported._text import dense, kept


class Experts(nn.Module):
    """Kernels of all experts, [E, D, 2 H] and [E, H, D]; ``fault`` names what is wrong, if anything."""

    def __init__(self, own: nn.Module, fault: str, sort: bool):
        super().__init__()
        self.router, self.fault, self.sort = kept(own.gate.weight.T), fault, sort
        joint = [torch.cat([e.w1.weight, e.w3.weight]).T for e in own.experts]
        self.wi, self.wo = kept(torch.stack(joint)), kept(torch.stack([e.w2.weight.T for e in own.experts]))
        self.register_buffer("balance", own.expert_bias.clone())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> weights and indices, [T, k] each."""
        scores = torch.softmax(x @ self.router, -1)
        picked = torch.topk(scores + self.balance, TOP, dim=-1).indices
        weights = torch.take_along_dim(scores, picked, 1)
        if self.fault == "detached":
            weights = weights.detach()
        if self.fault == "biased":
            weights = torch.take_along_dim(scores + self.balance, picked, 1)
        if self.fault != "raw":
            weights = weights / weights.sum(1, keepdim=True)
        self.count(picked)
        return weights, picked

    def count(self, picked: Tensor) -> None:
        if self.training:
            load = F.one_hot(picked, EXPERTS).sum((0, 1)).to(self.balance.dtype)
            wanted = picked.shape[0] / EXPERTS if self.fault == "share" else picked.numel() / EXPERTS
            with torch.no_grad():
                self.balance.add_(torch.sign(wanted - load), alpha=RATE)

    def all_at_once(self, x: Tensor, weights: Tensor, picked: Tensor) -> Tensor:
        gate, up = torch.einsum("td,edh->teh", x, self.wi).split(HIDDEN, -1)
        every = torch.einsum("teh,ehd->ted", F.silu(gate) * up, self.wo)
        combine = torch.zeros(len(x), EXPERTS, dtype=x.dtype, device=x.device).scatter(1, picked, weights)
        return torch.einsum("te,ted->td", combine, every)

    def by_expert(self, x: Tensor, weights: Tensor, picked: Tensor) -> Tensor:
        order = picked.flatten().argsort(stable=True)
        rows, counts = order // TOP, picked.flatten().bincount(minlength=EXPERTS).tolist()
        results = []
        for part, wi, wo in zip(x[rows].split(counts), self.wi, self.wo, strict=True):
            gate, up = (part @ wi).chunk(2, -1)
            results.append((F.silu(gate) * up) @ wo)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return (torch.cat(results)[back].unflatten(0, (-1, TOP)) * weights[..., None]).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return (self.by_expert if self.sort else self.all_at_once)(flat, *self.route(flat)).reshape(x.shape)


class Stacked(nn.Module):
    def __init__(self, model: nn.Module, fault: str = "", sort: bool = False):
        super().__init__()
        self.wte, self.out = kept(model.embed_tokens.weight), dense(model.lm_head.weight)
        self.before = nn.ModuleList(layer.norm_in for layer in model.layers)
        self.token_mixers = nn.ModuleList(dense(layer.mix.weight, layer.mix.bias) for layer in model.layers)
        self.after = nn.ModuleList([*(layer.norm_out for layer in model.layers), model.norm])
        self.ffns = nn.ModuleList(Experts(layer.block_sparse_moe, fault, sort) for layer in model.layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, length = self.wte[input_ids], input_ids.shape[1]
        mean = torch.ones(length, length, dtype=x.dtype, device=x.device).tril()
        mean = mean / mean.sum(1, keepdim=True)
        for i, ffn in enumerate(self.ffns):
            x = x + self.token_mixers[i](mean @ self.before[i](x))
            x = x + ffn(self.after[i](x))
        return self.out(self.after[-1](x))


@case(SAME, "stacked experts, all at once", moe)
def experts_all_at_once(model: nn.Module) -> nn.Module:
    return Stacked(model)


@case(SAME, "stacked experts, sorted tokens", moe)
def experts_over_sorted_tokens(model: nn.Module) -> nn.Module:
    return Stacked(model, sort=True)


@case("bug", "routing", moe, module=MOE)
def expert_weights_not_made_to_sum_to_one(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The weights of the chosen experts are used as the softmax gave them, without their sum divided out."""
    return Stacked(model, "raw" if wrong else "")


@case("bug", "routing", moe, module=MOE)
def expert_bias_in_the_weights_too(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The balancing bias, which should only choose the experts, goes into their weights as well."""
    return Stacked(model, "biased" if wrong else "", sort=True)


@case("bug", "detached branch", moe, module=(*MOE, *GATES), passes=("input gradient", "weight gradient"))
def router_without_a_gradient(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The chosen experts' weights are detached, so that the router never learns."""
    return Stacked(model, "detached" if wrong else "", sort=True)


@case("bug", "state", moe, module=MOE, passes="buffer")
def expert_load_against_half_of_the_share(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The load, which counts each token for both its experts, is held against a share that counts it once."""
    return Stacked(model, "share" if wrong else "")
