"""Tabular networks, recommenders and mixtures of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._second_pairs import Port, leaf, pair
from bench.tasks import _classes, _task


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(count, 4) for count in (5, 7, 3))
        self.norm = nn.BatchNorm1d(6)
        self.fc1, self.fc2 = nn.Linear(18, 24), nn.Linear(24, 3)

    def forward(self, category: Tensor, number: Tensor) -> Tensor:
        columns = [embed(category[:, i]) for i, embed in enumerate(self.embeds)]
        return self.fc2(F.relu(self.fc1(torch.cat([*columns, self.norm(number)], 1))))


class OneTable(Port):
    """All columns in one table; the fault: the last column begins a row too early."""

    def take(self, model: Tabular) -> None:
        self.offsets = [0, 5, 11] if self.fault else [0, 5, 12]
        self.table = leaf(torch.cat([embed.weight for embed in model.embeds]))
        by_column = model.fc1.weight[:, :12].unflatten(1, (3, 4))
        self.of_columns, self.of_numbers = leaf(by_column.permute(1, 2, 0)), leaf(model.fc1.weight[:, 12:])
        self.offset, self.scaling, self.head = model.fc1.bias, model.norm, model.fc2

    def forward(self, category: Tensor, number: Tensor) -> Tensor:
        rows = self.table[category + category.new_tensor(self.offsets)]
        hidden = torch.einsum("nci,cio->no", rows, self.of_columns)
        return self.head((hidden + F.linear(self.scaling(number), self.of_numbers, self.offset)).relu())


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(10, 16), nn.Embedding(20, 16, padding_idx=0)
        self.tower = nn.Linear(16, 16)

    def forward(self, user: Tensor, history: Tensor, choices: Tensor) -> Tensor:
        seen = self.items(history).sum(1) / (history > 0).sum(1, keepdim=True)
        taste = torch.tanh(self.tower(self.users(user) + seen))
        return (self.items(choices) * taste[:, None]).sum(2)


class OneCatalogue(Port):
    """Users behind items in one table, histories as counts; the fault: the row for padding is trained."""

    def take(self, model: TwoTowers) -> None:
        self.rows = leaf(torch.cat([model.items.weight, model.users.weight]))
        self.turn = leaf(torch.cat([model.tower.weight.T, model.tower.bias[None]]))

    def forward(self, user: Tensor, history: Tensor, choices: Tensor) -> Tensor:
        counts = F.one_hot(history, 20).sum(1).to(self.rows.dtype)
        real = torch.arange(20, device=history.device) > 0
        summed = counts if self.fault else counts * real
        seen = summed @ self.rows[:20] / (counts * real).sum(1, keepdim=True)
        taste = torch.addmm(self.turn[-1], self.rows[user + 20] + seen, self.turn[:-1]).tanh()
        return torch.einsum("ncd,nd->nc", self.rows[choices], taste)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        experts = [nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(4)]
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).topk(2, -1)
        shares, out = scores.softmax(-1), x
        for i, expert in enumerate(self.experts):
            row, rank = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, shares[row, rank, None] * expert(x[row]))
        return out


def _sparse() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), Mixture(), nn.Linear(16, 3))


class AllExperts(Port):
    """All experts at once, most with a share of zero; the fault: the two best shares do not sum to one."""

    def take(self, model: nn.Sequential) -> None:
        self.before, self.after, self.router = model[0], model[3], model[2].gate
        experts = model[2].experts
        self.up = leaf(torch.stack([e[0].weight for e in experts]))
        self.up_bias = leaf(torch.stack([e[0].bias for e in experts]))
        self.down = leaf(torch.stack([torch.cat([e[2].weight, e[2].bias[:, None]], 1) for e in experts]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        scores = self.router(x)
        last = scores.topk(2, -1).values[:, 1:]
        shares = scores.masked_fill(scores < last, -torch.inf).softmax(-1)
        if self.fault:
            shares = scores.softmax(-1) * (scores >= last)
        hidden = F.silu(torch.einsum("ni,ehi->neh", x, self.up) + self.up_bias)
        found = torch.einsum("neh,eoh,ne->no", F.pad(hidden, (0, 1), value=1.0), self.down, shares)
        return self.after(x + found)


def _rows() -> tuple[dict[str, Tensor], Tensor]:
    category = torch.stack([_classes(16, count) for count in (5, 7, 3)], 1)
    return {"category": category, "number": torch.randn(16, 6)}, _classes(16, 3)


def _visits() -> tuple[dict[str, Tensor], Tensor]:
    history = torch.randint(1, 20, (12, 5)) * (torch.arange(5) <= torch.randint(5, (12, 1)))
    choices = torch.randint(1, 20, (12, 4))
    return {"user": _classes(12, 10), "history": history, "choices": choices}, _classes(12, 4)


tabular = _task("second_tabular", Tabular, _rows)
pair(tabular, OneTable, "columns_share_one_table", "column_begins_a_row_early", "embeds.2")
towers = _task("second_towers", TwoTowers, _visits)
pair(towers, OneCatalogue, "histories_as_counts", "padding_row_is_trained", "items", "weight gradient")
sparse = _task("second_experts", _sparse, lambda: (torch.randn(16, 10), _classes(16, 3)))
pair(sparse, AllExperts, "all_experts_at_once", "shares_do_not_sum_to_one", "2")
