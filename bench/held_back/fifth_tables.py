"""A table of categories and numbers: a factorisation machine, cross layers and a deep net side by side."""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of
from bench.held_back._fifth_tables import fault, joined, right, turned
from bench.held_back._fourth_ports import Port, Rows, leaf, pile
from bench.tasks import _task

SIZES = (7, 5, 11, 4, 9)


class Fields(nn.Module):
    """[N, 5] -> [N, 5, width]: a table for each field."""

    def __init__(self, width: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in SIZES)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([table(column) for table, column in zip(self.tables, rows.T, strict=True)], 1)


class Pairs(nn.Module):
    """The sum of the products of every two fields."""

    def forward(self, fields: Tensor) -> Tensor:
        return 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1)


class Cross(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.linear(x) + x


class DeepCross(nn.Module):
    """Rows [N, 5] and numbers [N, 4] -> a logit for each."""

    def __init__(self):
        super().__init__()
        self.fields, self.alone = Fields(6), Fields(1)
        self.scale = nn.BatchNorm1d(4)
        self.pairs = Pairs()
        self.cross = nn.ModuleList(Cross(34) for _ in range(3))
        hidden = [nn.Linear(34, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU()]
        self.deep = nn.Sequential(*hidden)
        self.head = nn.Linear(34 + 16, 1)

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        fields = self.fields(rows)
        first = torch.cat([fields.flatten(1), self.scale(numbers)], 1)
        x = first
        for cross in self.cross:
            x = cross(first, x)
        both = self.head(torch.cat([x, self.deep(first)], 1))[:, 0]
        return both + self.alone(rows).sum((1, 2)) + self.pairs(fields)


class OneTable(Port):
    """All fields in one table that holds their lone weights as its last column; layers by stacked weights."""

    def take(self, model: DeepCross) -> None:
        tables, alone = model.fields.tables, model.alone.tables
        self.starts = [0, *accumulate(SIZES[:-1])]
        if self.fault == "last_field_starts_a_row_early":
            self.starts[-1] -= 1
        rows = [torch.cat([t.weight, a.weight], 1) for t, a in zip(tables, alone, strict=True)]
        self.table = joined(rows)
        self.w_cross = pile(layer.linear.weight.T for layer in model.cross)
        self.b_cross = pile(layer.linear.bias for layer in model.cross)
        deep = model.deep
        self.w_deep = nn.ParameterList([turned(deep[0]), turned(deep[3])])
        self.b_deep = nn.ParameterList([leaf(deep[0].bias), leaf(deep[3].bias)])
        self.norms = nn.ModuleList([Rows(model.scale), Rows(deep[1])])
        self.w_head, self.b_head = leaf(model.head.weight[0]), leaf(model.head.bias)

    def crossed(self, first: Tensor) -> Tensor:
        x = first
        for step, (weight, bias) in enumerate(zip(self.w_cross, self.b_cross, strict=True)):
            gate = x if step == 2 and self.fault == "last_cross_with_itself" else first
            x = x + gate * torch.addmm(bias, x, weight)
        return x

    def deep(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[1](x @ self.w_deep[0] + self.b_deep[0]))
        return F.relu(h @ self.w_deep[1] + self.b_deep[1])

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        found = self.table[rows + torch.tensor(self.starts)]
        fields, alone = found[..., :6], found[..., 6]
        first = torch.cat([fields.flatten(1), self.norms[0](numbers)], 1)
        i, j = torch.triu_indices(5, 5, 1)
        pairs = (fields[:, i] * fields[:, j]).sum((1, 2))
        crossed, deep = self.crossed(first), self.deep(first)
        return crossed @ self.w_head[:34] + deep @ self.w_head[34:] + self.b_head + alone.sum(1) + pairs


def _batch() -> tuple[dict[str, Tensor], Tensor]:
    rows = torch.stack([torch.randint(size, (24,)) for size in SIZES], 1)
    return {"rows": rows, "numbers": 2 * torch.randn(24, 4) + 1}, torch.randint(2, (24,))


def _clicked(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits))


def matrices_decay(params: list) -> torch.optim.Optimizer:
    """AdamW that decays what has two axes or more."""
    params = list(params)
    kept = [p for p in params if p.ndim < 2]
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.3)


def named_decay(module: OneTable) -> torch.optim.Optimizer:
    """The same choice by the names that the weights of the port have."""
    kept = [p for name, p in module.named_parameters() if not name.startswith(("table", "w_"))]
    decayed = [p for name, p in module.named_parameters() if name.startswith(("table", "w_"))]
    groups = [{"params": kept, "weight_decay": 0.0}, {"params": decayed}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.3)


deep_cross = _task("fifth_deep_cross", DeepCross, _batch, _clicked)


@in_place_of("pairs", ("round_off", "bit_identical"), "another formula", deep_cross)
class PairsByGram(Pairs):
    """Every two fields by their inner products, the lower triangle of them."""

    def forward(self, fields: Tensor) -> Tensor:
        return (fields @ fields.mT).tril(-1).sum((1, 2))


ADAMW = {"optimizer": matrices_decay}
right(deep_cross, OneTable, "one_table_for_all_fields", "port, packed weights")
right(
    deep_cross,
    OneTable,
    "one_table_decayed_by_name",
    "port, decay groups",
    **ADAMW,
    candidate_optimizer=named_decay,
)
fault(deep_cross, OneTable, "last_field_starts_a_row_early", "off by one", "fields.tables.4")
fault(deep_cross, OneTable, "last_cross_with_itself", "another operand", "cross.2")
fault(
    deep_cross,
    OneTable,
    "stacked_biases_decay",
    "weight decay on the wrong group",
    ("cross.0.linear", "cross.1.linear", "cross.2.linear"),
    "update",
    **ADAMW,
    candidate_optimizer=lambda module: matrices_decay(module.parameters()),
)
