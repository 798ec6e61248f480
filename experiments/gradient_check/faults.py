"""Networks with right and with wrong gradients, and what two checks say about them."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function, gradcheck

from driftlab.gradients import gradient_check
from models.resnet import ResNet18


class _Product(Function):
    """x @ W^T with a backward pass that a caller may spoil."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, spoil: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spoil = spoil
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        return gradient @ weight, ctx.spoil(gradient.T @ x), None


class Spoiled(nn.Module):
    """A linear layer [N, size] -> [N, size] whose weight gradient goes through ``spoil``."""

    def __init__(self, size: int, spoil: Callable[[Tensor], Tensor]):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)
        self.spoil = spoil

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.spoil)


class Detached(nn.Module):
    """A residual block whose branch is cut off from the gradient."""

    def __init__(self, size: int):
        super().__init__()
        self.branch = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x).detach()


class FrozenStatistics(nn.Module):
    """Batch normalisation that forgets that its variance depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(0, unbiased=False).detach()
        return (x - x.mean(0)) / (variance + 1e-5).sqrt()


SIZE, BATCH = 256, 16


def _mlp(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(32, SIZE), nn.ReLU(), layer, nn.ReLU(), nn.Linear(SIZE, 10))


def _spoiled(spoil: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: _mlp(Spoiled(SIZE, spoil))


def _element_times(factor: float) -> Callable[[], nn.Module]:
    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[7, 3] *= factor
        return gradient

    return _spoiled(spoil)


def _convs() -> nn.Module:
    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 64, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), head)


@dataclass(frozen=True)
class Planted:
    """A network whose gradient is known to be right or wrong; ``shape`` is that of an input."""

    name: str
    right: bool
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (32,)


PLANTED = (
    Planted("a factor of 1/2 missing", False, _spoiled(lambda g: g / 2)),
    Planted("a factor of 1.0001", False, _spoiled(lambda g: 1.0001 * g)),
    Planted("a detached branch", False, lambda: _mlp(Detached(SIZE))),
    Planted("wrong sign in 1 element of 65,536", False, _element_times(-1)),
    Planted("1 element of 65,536 dropped", False, _element_times(0)),
    Planted("1 element of 65,536 off by 1 %", False, _element_times(1.01)),
    Planted("the gradient transposed", False, _spoiled(lambda g: g.T)),
    Planted("batch-norm variance taken as constant", False, lambda: _mlp(FrozenStatistics())),
    Planted("multilayer perceptron, ReLU", True, _spoiled(lambda g: g)),
    Planted("convolution, batch norm, max-pool", True, _convs, (3, 16, 16)),
    Planted("dropout", True, lambda: _mlp(nn.Dropout(0.3))),
    Planted("encoder layer (attention, GELU)", True, lambda: _mlp(_encoder())),
    Planted("ResNet18 of width 4", True, lambda: ResNet18(width=4), (3, 32, 32)),
)


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(SIZE, 4, SIZE, dropout=0.0, activation="gelu", batch_first=True)


def warm_up() -> None:
    """The first gradcheck of a process imports for seconds."""
    gradcheck(torch.sin, torch.ones(1, dtype=torch.float64, requires_grad=True), fast_mode=True)
    torch.func.functional_call(nn.Linear(1, 1), {}, (torch.ones(1, 1),))


def compared(planted: Planted, seed: int, device: torch.device) -> dict:
    """One network before both checks: what they say, and what it costs."""
    torch.manual_seed(seed)
    network = planted.build().to(device)
    inputs = torch.randn(BATCH, *planted.shape).to(device)
    targets = torch.randint(0, 10, (BATCH,)).to(device)

    def loss(outputs: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    ours = gradient_check(network, inputs, loss, seed=seed)
    passed, seconds, calls = _by_gradcheck(network, inputs, loss)
    return {
        "name": planted.name,
        "right": planted.right,
        "ours": str(ours.outcome),
        "suspect": str(ours.suspect) if ours.suspect else None,
        "sees": ours.sees,
        "ratio": max((d.ratio for d in ours.differences), default=None),
        "seconds": ours.seconds,
        "forwards": ours.evaluations,
        "theirs": "pass" if passed else "fail",
        "their_seconds": seconds,
        "their_forwards": calls,
    }


def _by_gradcheck(network: nn.Module, inputs: Tensor, loss: Callable) -> tuple[bool, float, int]:
    """``torch.autograd.gradcheck`` in fast mode with its defaults, in float64, by inputs and parameters.

    Where fast mode fails it runs the slow one, two forward passes for every number, to word its message; that
    is left out, since it would take hours here.
    """
    network, calls = network.double(), 0
    names, parameters = zip(*network.named_parameters(), strict=True)

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss(torch.func.functional_call(network, dict(zip(names, weights, strict=True)), (x,)))

    leaves = [t.detach().double().clone().requires_grad_() for t in (inputs, *parameters)]
    began = time.perf_counter()
    worded = mock.patch.object(sys.modules["torch.autograd.gradcheck"], "_run_slow_mode_and_get_error")
    with warnings.catch_warnings(), worded as words:
        words.return_value = ""
        warnings.simplefilter("ignore")
        passed = gradcheck(function, leaves, fast_mode=True, raise_exception=False)
    return bool(passed), time.perf_counter() - began, calls
