"""What somebody's own package may hold, for the tests that train it."""

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler


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
