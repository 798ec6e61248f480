"""Rewrites that are right for a while: a conv computes something else from a step of its training on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.rewrites.split_conv import split_conv
from models.rewrites.swap import RewriteError

# What is off from then on: too little for a loss, far too much for rounding.
OFF = 1e-3
LARGEST_INT16 = 2**15


class Counted(nn.Conv2d):
    """A conv that counts its training calls, and is off from the one numbered ``at`` (from 0) on."""

    def begin(self, at: float) -> None:
        self.at = at
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=self.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        off = torch.where(self.calls >= self.at, OFF, 0.0).to(x)
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + off)


class Overflowing(nn.Conv2d):
    """A conv that keeps a sum over its training calls in sixteen bits, where it turns negative."""

    def begin(self, at: float) -> None:
        self.each = -(-LARGEST_INT16 // int(at + 1))
        self.register_buffer("total", torch.zeros((), dtype=torch.int16, device=self.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += self.each
        off = torch.where(self.total < 0, OFF, 0.0).to(x)
        return super().forward(x) * (1 + off)


class Saturating(nn.Conv2d):
    """A conv whose outputs end at ``at``: right until the training comes by a larger one."""

    def begin(self, at: float) -> None:
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-self.at, self.at)


class Scaled(torch.autograd.Function):
    """A weight as it is, whose gradient is ``factor`` times as large."""

    @staticmethod
    def forward(ctx, weight: Tensor, factor: Tensor | float) -> Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Stretched(Counted):
    """A right conv whose weight's gradient is off from the training call numbered ``at`` on."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.where(self.calls >= self.at, 1 + OFF, 1.0).to(x)
        if self.training:
            self.calls += 1
        return self._conv_forward(x, Scaled.apply(self.weight, factor), self.bias)


class Scheduled(Counted):
    """A conv whose learning rate falls in a straight line from update ``at`` on, each time one update late.

    The line takes ten times ``at`` updates to zero, so the rate is too large by one part in that many.
    """

    def forward(self, x: Tensor) -> Tensor:
        left = (11 * self.at - self.calls).clamp(min=1)
        factor = torch.where(self.calls >= self.at, (left + 1) / left, 1.0).to(x)
        if self.training:
            self.calls += 1
        return self._conv_forward(x, Scaled.apply(self.weight, factor), self.bias)


class Rare(nn.Conv2d):
    """A conv that is off in samples whose inputs are ``at`` and more on average (in size): rare ones."""

    def begin(self, at: float) -> None:
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        off = torch.where(x.abs().flatten(1).mean(1) >= self.at, OFF, 0.0).to(x)
        return super().forward(x) * (1 + off[:, None, None, None])


SORTS = {
    "counter": Counted,
    "gradient": Stretched,
    "accumulator": Overflowing,
    "schedule": Scheduled,
    "saturation": Saturating,
    "rare": Rare,
}


def late_fault(model: nn.Module, sort: str = "counter", at: float = 40, module: str = "") -> nn.Module:
    """Give one conv of ``model`` a fault that sets in late, in place.

    Args:
        sort: one of ``SORTS``.
        at: the step from which on it is wrong; of ``saturation`` the largest output, of ``rare`` the mean
            size of a sample's inputs.
        module: the name of the conv; the last one where empty.

    Raises:
        RewriteError: the sort is unknown, or there is no such conv.
    """
    convs = {name: m for name, m in model.named_modules() if type(m) is nn.Conv2d}
    name = module or next(reversed(convs), "")
    if sort not in SORTS or name not in convs:
        what = f"sort={sort}" if sort not in SORTS else f"module={name}"
        known = ", ".join(SORTS if sort not in SORTS else convs) or "none: the model has no Conv2d"
        raise RewriteError(f"{what} is unknown: choose from {known}")
    convs[name].__class__ = SORTS[sort]
    convs[name].begin(at)
    return model


def split_with_late_fault(
    model: nn.Module, sort: str = "counter", at: float = 40, module: str = ""
) -> nn.Module:
    """``late_fault``, and every other conv split in two, in place: the curves have parted when it sets in."""
    return split_conv(late_fault(model, sort, at, module))
