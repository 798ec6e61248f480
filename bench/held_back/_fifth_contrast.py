"""Two towers that learn by contrast: a teacher and a queue of its keys in buffers, the loss inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, KEYS, QUEUE = 24, 8, 48
PARTS = ("running_mean", "running_var", "weight", "bias")


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1)


class Tower(nn.Module):
    """[N, 10] -> unit vectors [N, 8]."""

    def __init__(self):
        super().__init__()
        self.fc1, self.norm1 = nn.Linear(10, WIDTH), nn.BatchNorm1d(WIDTH)
        self.fc2, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.act = nn.ReLU()
        self.fc3, self.unit = nn.Linear(WIDTH, KEYS), Unit()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.fc1(x)))
        x = self.act(self.norm2(self.fc2(x)))
        return self.unit(self.fc3(x))


class Teacher(nn.Module):
    """A running mean of a tower, in buffers; its norms have running statistics of their own."""

    def __init__(self, tower: Tower):
        super().__init__()
        for name, value in [*tower.named_parameters(), *tower.named_buffers()]:
            self.register_buffer(name.replace(".", "_"), value.detach().clone())

    @torch.no_grad()
    def follow(self, tower: Tower) -> None:
        for name, value in tower.named_parameters():
            self.get_buffer(name.replace(".", "_")).lerp_(value, 0.1)

    def normed(self, x: Tensor, name: str) -> Tensor:
        parts = [
            self.get_buffer(f"{name}_{part}") for part in ("running_mean", "running_var", "weight", "bias")
        ]
        return F.batch_norm(x, *parts, self.training)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(F.linear(x, self.fc1_weight, self.fc1_bias), "norm1").relu()
        x = self.normed(F.linear(x, self.fc2_weight, self.fc2_bias), "norm2").relu()
        return F.normalize(F.linear(x, self.fc3_weight, self.fc3_bias), dim=1)


class Queue(nn.Module):
    """The keys of the last batches; it gives those from before this batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(QUEUE, KEYS), dim=1))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, keys: Tensor) -> Tensor:
        rows = self.rows.clone()
        if self.training:
            self.rows[(self.place + torch.arange(len(keys))) % QUEUE] = keys
            self.place.copy_((self.place + len(keys)) % QUEUE)
        return rows


class Compare(nn.Module):
    """For each query its loss: its own key among those of the queue."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, query: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ rows.T], 1) * self.scale.exp()
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long), reduction="none")


class Contrast(nn.Module):
    """Two views [N, 10] -> the losses [N] and the queries [N, 8]."""

    def __init__(self):
        super().__init__()
        self.tower = Tower()
        self.teacher, self.queue, self.compare = Teacher(self.tower), Queue(), Compare()

    def forward(self, view: Tensor, other: Tensor) -> dict[str, Tensor]:
        query = self.tower(view)
        if self.training:
            self.teacher.follow(self.tower)
        keys = self.teacher(other)
        return {"losses": self.compare(query, keys, self.queue(keys)), "query": query}
