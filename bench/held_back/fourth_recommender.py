"""A recommender of two tasks: crossed features, a factorization machine, experts shared by gates."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import Port, leaf, parts, pile, wrong
from bench.tasks import _task


class Machine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(18, 18)

    def forward(self, start: Tensor, x: Tensor) -> Tensor:
        return start * self.linear(x) + x


class Dice(nn.Module):
    """Each value by a slope between ``slope`` and one, according to where it lies in the batch."""

    def __init__(self):
        super().__init__()
        self.norm, self.slope = nn.BatchNorm1d(16, affine=False), nn.Parameter(0.25 + 0.1 * torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(self.norm(x))
        return share * x + (1 - share) * self.slope * x


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        modes = (12, "mean"), (8, "sum")
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, 6, mode=mode, padding_idx=0) for n, mode in modes)
        self.numbers, self.machine = nn.Linear(5, 6), Machine()
        self.crosses = nn.ModuleList(Cross() for _ in range(2))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(18, 16), Dice()) for _ in range(3))
        self.gates = nn.ModuleList(nn.Sequential(nn.Linear(18, 3), nn.Softmax(1)) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(16, 1) for _ in range(2))

    def forward(self, seen: Tensor, bought: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        fields = [self.bags[0](seen), self.bags[1](bought), torch.tanh(self.numbers(numbers))]
        pairs = self.machine(torch.stack(fields, 1))
        x = start = torch.cat(fields, 1)
        for cross in self.crosses:
            x = cross(start, x)
        found = torch.stack([expert(x) for expert in self.experts], 2)
        mixed = [(found * gate(x)[:, None]).sum(2) for gate in self.gates]
        click, buy = (tower(h)[:, 0] + pairs for tower, h in zip(self.towers, mixed, strict=True))
        return {"click": torch.sigmoid(click), "buy": torch.sigmoid(click) * torch.sigmoid(buy)}


class OneOfEach(Port):
    """One table, one tensor of all experts, one of all gates; the pairs of fields are counted one by one."""

    def take(self, model: Recommender) -> None:
        self.table = leaf(torch.cat([bag.weight for bag in model.bags]))
        self.of_numbers, self.shift = leaf(model.numbers.weight.T), leaf(model.numbers.bias)
        self.crosses = pile(torch.cat([c.linear.weight.T, c.linear.bias[None]]) for c in model.crosses)
        linears, dices = ([expert[i] for expert in model.experts] for i in (0, 1))
        self.experts, self.offsets = pile(e.weight for e in linears), pile(e.bias for e in linears)
        self.slopes = pile(d.slope for d in dices)
        self.register_buffer("centers", torch.cat([d.norm.running_mean for d in dices]))
        self.register_buffer("spreads", torch.cat([d.norm.running_var for d in dices]))
        self.gates = pile(torch.cat([g[0].weight.T, g[0].bias[None]]) for g in model.gates)
        self.towers = leaf(torch.cat([torch.cat([t.weight, t.bias[None]], 1) for t in model.towers]))

    def fields(self, seen: Tensor, bought: Tensor, numbers: Tensor) -> Tensor:
        real = (seen > 0).to(numbers.dtype)
        count = seen.shape[1] if self.fault == "padding_thins_the_mean" else real.sum(1, keepdim=True)
        first = (self.table[seen] * (real / count)[..., None]).sum(1)
        rows = F.embedding(bought + 12, self.table, None, None, 2.0, self.fault == "rare_rows_learn_faster")
        second = torch.einsum("nkc,nk->nc", rows, (bought > 0).to(rows.dtype))
        return torch.stack([first, second, torch.tanh(numbers @ self.of_numbers + self.shift)], 1)

    def forward(self, seen: Tensor, bought: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = (fields := self.fields(seen, bought, numbers)).unbind(1)
        pairs = (a * b + a * c + b * c).sum(1)
        if self.fault == "fields_pair_with_themselves":
            pairs = pairs + 0.5 * fields.square().sum((1, 2))
        x = start = fields.flatten(1)
        for i, cross in enumerate(self.crosses):
            by = x if i and self.fault == "crossed_with_the_last" else start
            x = torch.addcmul(x, by, x @ cross[:18] + cross[18])
        found = torch.einsum("ni,ehi->neh", x, self.experts) + self.offsets
        flat = F.batch_norm(found.flatten(1), self.centers, self.spreads, training=self.training)
        upper = torch.sigmoid(flat).view_as(found)
        if self.fault == "slope_on_the_upper_side":
            upper = torch.stack([upper[:, 0], 1 - upper[:, 1], upper[:, 2]], 1)
        found = found * torch.lerp(self.slopes, torch.ones_like(self.slopes), upper)
        logits = torch.einsum("ni,tie->nte", x, self.gates[:, :18]) + self.gates[:, 18]
        shares = logits.softmax(1 if self.fault == "shares_over_the_tasks" else 2)
        scores = torch.einsum("neh,nte,th->tn", found, shares, self.towers[:, :16]) + self.towers[:, 16:]
        click, buy = torch.sigmoid(scores + pairs)
        return click, click * buy


def _two_losses(outputs: tuple | dict, targets: Tensor) -> Tensor:
    chances = torch.stack(parts(outputs), 1)
    return F.binary_cross_entropy(chances, targets.to(chances))


def _visits() -> tuple[dict[str, Tensor], Tensor]:
    seen = torch.randint(1, 12, (16, 5)) * (torch.arange(5) <= torch.randint(5, (16, 1)))
    rest = {"bought": torch.randint(8, (16, 3)), "numbers": torch.randn(16, 5)}
    return {"seen": seen, **rest}, torch.randint(2, (16, 2)).float()


wrong(
    _task("fourth_recommender", Recommender, _visits, _two_losses),
    OneOfEach,
    fields_pair_with_themselves=("a term too many", "machine"),
    crossed_with_the_last=("the wrong operand in one layer", "crosses.1"),
    padding_thins_the_mean=("padding in a mean", "bags.0"),
    shares_over_the_tasks=("axis of a softmax", ("gates.0.1", "gates.1.1")),
    slope_on_the_upper_side=("an activation turned round", "experts.1.1"),
    rare_rows_learn_faster=("gradient by frequency", "bags.1", "weight gradient"),
)
