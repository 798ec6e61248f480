"""What somebody's own package may hold, for the tests that train it."""

from torch import Tensor, nn


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
