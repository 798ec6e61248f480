"""What somebody's own package may hold, for the tests that train it."""

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler
from torch.utils.data import Dataset


class Net(nn.Module):
    """Images [N, 3, H, W] -> logits [N, n_classes]."""

    def __init__(self, hidden: int = 4, n_classes: int = 2):
        super().__init__()
        self.conv = nn.Conv2d(3, hidden, 3, stride=4)
        self.fc = nn.Linear(hidden, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().mean((2, 3)))


class Pixels(nn.Module):
    """Of no number of classes: it gives as many numbers as it is told."""

    def __init__(self, length: int = 12):
        super().__init__()
        self.fc = nn.Linear(3, length)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def any_keyword(**given: int) -> nn.Module:
    """Hands all to a class that takes no number of classes."""
    return Pixels(**given)


def no_network() -> dict:
    return {}


def no_memory(optimizer: torch.optim.Optimizer) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def distance(outputs: Tensor, targets: Tensor, power: int = 2) -> Tensor:
    """A loss of outputs [N, classes] and classes [N]."""
    wanted = nn.functional.one_hot(targets, outputs.shape[1])
    return (outputs - wanted.to(outputs)).abs().pow(power).mean()


class Distance(nn.Module):
    """The same as a class, with a weight of each class in a buffer."""

    def __init__(self, power: int = 2):
        super().__init__()
        self.power = power
        self.register_buffer("weight", torch.ones(10))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return distance(outputs * self.weight, targets, self.power)


def rising(optimizer: torch.optim.Optimizer, updates: int = 4) -> LRScheduler:
    return LinearLR(optimizer, 0.1, total_iters=updates)


def no_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """Returns nothing."""


class Rows(Dataset):
    """Rows of numbers with noise, and which of three classes; drawn when it is made."""

    classes = ("a", "b", "c")

    def __init__(self, train: bool = True, length: int = 40, noise: float = 0.1):
        self.rows, self.noise, self.train = torch.randn(length, 5), noise, train

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[dict, int]:
        drawn = torch.randn(5) + np.random.randn() + random.random()
        return {"row": self.rows[number] + self.noise * drawn, "shift": torch.ones(2)}, number % 3


def one_set(length: int = 24) -> Dataset:
    return Rows(length=length)


class Drifting(Rows):
    """Draws from a generator of its own."""

    generator = np.random.default_rng(0)

    def __getitem__(self, number: int) -> tuple[dict, int]:
        return {"row": self.rows[number] + self.generator.random()}, 0


class OfRows(nn.Module):
    """{"row": [N, 5], "shift": [N, 2]} by name -> logits [N, num_classes]."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.first, self.fc = nn.Linear(5, 6), nn.Linear(6, num_classes)
        self.drop = nn.Dropout(0.2)

    def forward(self, row: Tensor, shift: Tensor) -> Tensor:
        return self.fc(self.drop(self.first(row).relu())) + shift.mean(1, keepdim=True)


class Doubled(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return x[:, :half] @ self.weight[:, :half].T + x[:, half:] @ self.weight[:, half:].T + self.bias


def by_halves(model: nn.Module) -> nn.Module:
    model.fc = Doubled(model.fc)
    return model
