"""Mixtures of experts, two for each token; rewritten to run all experts on all tokens at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, method_of
from bench.held_back._fifth_decoders import Gated, Grouped
from bench.held_back._fifth_ports import SAME, next_token, pairs, scaled, tokens
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.tasks import _task


class Experts(nn.Module):
    """Two gated experts for each token, and how unequally the tokens are spread."""

    def __init__(self, width: int, hidden: int, count: int):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        nn.init.normal_(self.router.weight, std=0.3)
        self.experts = nn.ModuleList(Gated(width, hidden) for _ in range(count))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = logits.topk(2)
        return best.softmax(-1), chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        logits = self.router(flat)
        weights, chosen = self.choose(logits)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, rank = (chosen == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, weights[token, rank, None] * expert(flat[token]))
        counted = F.one_hot(chosen, len(self.experts)).to(x).mean((0, 1))
        return y.view_as(x), len(self.experts) * counted @ logits.softmax(-1).mean(0)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.attention, self.mixture = Grouped(width, 4, 6), Experts(width, 12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.mixture(self.norm2(x))
        return x + y, balance


class Mixtures(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(21, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = nn.RMSNorm(16, eps=1e-6)
        self.head = nn.Linear(16, 21, bias=False)

    def forward(self, drawn: Tensor) -> dict[str, Tensor]:
        x, balances = self.embed(drawn), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return {"logits": self.head(self.norm(x)), "balance": torch.stack(balances).sum()}


class AllAtOnce(Port):
    """Experts stacked; a token's gates are zero for those not chosen."""

    def take(self, model: Mixtures) -> None:
        self.table, self.head, self.final = (leaf(p.weight) for p in (model.embed, model.head, model.norm))
        blocks = model.blocks
        self.attention_norms = pile(block.norm1.weight for block in blocks)
        self.mixture_norms = pile(block.norm2.weight for block in blocks)
        self.attend = nn.ModuleList(block.attention for block in blocks)
        self.route = pile(block.mixture.router.weight for block in blocks)
        for name in ("gate", "up", "down"):
            stacks = [torch.stack([getattr(e, name).weight for e in b.mixture.experts]) for b in blocks]
            setattr(self, name, pile(stacks))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def open(self, i: int, logits: Tensor) -> Tensor:
        """Each expert's weight for each token, [M, 4]."""
        threshold = logits.topk(2, -1).values[:, -1:]
        gates = logits.masked_fill(logits < threshold, float("-inf")).softmax(-1)
        if self.fault == "experts_full_after_the_warm_up" and i == 1 and self.training and self.seen > 6:
            place = (gates > 0).long().cumsum(0)
            gates = gates * (place <= 21)
        return gates.detach() if self.fault == "router_hears_the_balance_alone" and i == 2 else gates

    def mix(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        logits = flat @ self.route[i].T
        gates = self.open(i, logits)
        gate = torch.einsum("mc,ehc->emh", flat, self.gate[i])
        up = torch.einsum("mc,ehc->emh", flat, self.up[i])
        if self.fault == "expert_gated_by_the_other_half" and i == 0:
            other = torch.arange(4)[:, None, None] == 2
            gate, up = torch.where(other, up, gate), torch.where(other, gate, up)
        y = torch.einsum("me,emh,ech->mc", gates, F.silu(gate) * up, self.down[i])
        shares = (gates > 0).to(x).mean(0) / 2
        return y.view_as(x), 4 * (shares * logits.softmax(-1)).sum(-1).mean()

    def forward(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.seen += 1
        x, total = self.table[drawn], 0.0
        for i, attention in enumerate(self.attend):
            x = x + attention(scaled(x, self.attention_norms[i]))
            y, balance = self.mix(i, scaled(x, self.mixture_norms[i]))
            x, total = x + y, total + balance
        return {"balance": total, "logits": scaled(x, self.final) @ self.head.T}


def _balanced(outputs: dict, targets: Tensor) -> Tensor:
    return next_token(outputs["logits"], targets) + 0.05 * outputs["balance"]


def decayed(weights, others) -> torch.optim.Optimizer:
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=5e-3)


def matrices_decayed(parameters) -> torch.optim.Optimizer:
    """Decay for whatever has two axes or more."""
    parameters = list(parameters)
    return decayed([p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2])


def all_but_norms_decayed(module: nn.Module) -> torch.optim.Optimizer:
    named = list(module.named_parameters())
    norms = [p for name, p in named if "norm" in name or name == "final"]
    return decayed([p for _, p in named if not any(p is norm for norm in norms)], norms)


mixtures = _task("fifth_mixtures", Mixtures, tokens(5, 10, 21), _balanced)
pairs(SAME, mixtures, AllAtOnce, mixtures_all_at_once="masked in place of indexed")
wrong(
    mixtures,
    AllAtOnce,
    expert_gated_by_the_other_half=("fault of one expert", "blocks.0.mixture.experts.2"),
    router_hears_the_balance_alone=(
        "one detach too many",
        ("blocks.2.mixture", "blocks.2.mixture.router"),
        ("weight gradient", "input gradient"),
    ),
)


@case("bug", "sets in later", mixtures, module="blocks.1.mixture", step=6)
def experts_full_after_the_warm_up(model: Mixtures) -> nn.Module:
    return AllAtOnce(model, "experts_full_after_the_warm_up")


@case(
    SAME,
    "groups of the optimizer by name",
    mixtures,
    optimizer=matrices_decayed,
    candidate_optimizer=all_but_norms_decayed,
)
def stacked_norms_spared(model: Mixtures) -> nn.Module:
    return AllAtOnce(model)


@case(
    "bug",
    "weight decay on the wrong group",
    mixtures,
    module=tuple(f"blocks.{i}.norm{j}" for i in range(3) for j in (1, 2)),
    passes="update",
    optimizer=matrices_decayed,
    candidate_optimizer=lambda module: matrices_decayed(module.parameters()),
)
def stacked_norms_decayed(model: Mixtures) -> nn.Module:
    return AllAtOnce(model)


@method_of("blocks.1.mixture", SAME, "softmax before the choice", mixtures, method="choose")
def shares_of_all_made_whole_again(self: Experts, logits: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = logits.softmax(-1).topk(2)
    return best / best.sum(-1, keepdim=True), chosen


@method_of("blocks.2.mixture", "bug", "missing normalisation", mixtures, method="choose")
def shares_of_all_left_as_they_are(self: Experts, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.softmax(-1).topk(2)
