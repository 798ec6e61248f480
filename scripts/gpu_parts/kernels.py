"""By how much TF32 and kernels that sum in any order would have misled, operation by operation.

Errors are relative distances (2-norm) to the same operation in float64 on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from scripts.gpu_parts.part import Check, Found, Items, Part

if TYPE_CHECKING:
    from torch import Tensor

    from scripts.gpu_parts.operations import Operation

REPEATS = 5
AS_TF32 = 8  # times less than TF32 must what has kept its bits err
TF32_WAYS = ("allow_tf32", "fp32_precision")


def items(check: Check) -> Items:
    from scripts.gpu_parts.operations import operations

    asked = operations(check.smoke)
    return {operation.name: partial(_measured, operation) for operation in asked}


def _measured(operation: Operation, check: Check) -> Found:
    """Not right where float32 has lost bits as driftlab settles it, or does not repeat itself and could."""
    from driftlab.process import settled

    ways = {
        "as torch comes": nullcontext,
        "settled": partial(settled, cuda=True),
        **{way: partial(tf32_on, way) for way in TF32_WAYS},
    }
    exact = _passes(operation, wide=True)
    errors, differ = {}, {}
    for way, setting in ways.items():
        with setting():
            first = _passes(operation)
            errors[way] = {name: _distance(t, exact[name]) for name, t in first.items()}
            if way in ("as torch comes", "settled"):
                differ[way] = _repeats(operation, first)
    lost = [f"{name} errs {errors['settled'][name]:.1e}" for name in exact if _lost(operation, name, errors)]
    unsteady = any(differ["settled"].values()) and operation.repeats
    lines = [_line(name, errors, differ) for name in exact]
    factor = max(_factor(name, errors) for name in exact)
    reading = f"TF32 errs up to {factor:.3g} times more" if factor > 2 else "TF32 changes nothing"
    reading += _steadiness(differ)
    if lost:
        reading = f"float32 has lost bits though TF32 is off: {', '.join(lost)}"
    elif unsteady:
        reading = "it does not repeat itself in spite of driftlab's settings" + _steadiness(differ)
    return Found(reading, not (lost or unsteady), {"errors": errors, "repeats_differ_by": differ}, lines)


@contextmanager
def tf32_on(way: str) -> Iterator[None]:
    """As somebody turns TF32 on, by torch's older switches or by its newer one; as it was afterwards."""
    import torch

    from driftlab.process.flags import putting_back

    put_back = putting_back()
    try:
        if way == "fp32_precision":
            torch.backends.fp32_precision = "tf32"
        else:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        yield
    finally:
        put_back()


def _passes(operation: Operation, *, wide: bool = False) -> dict[str, Tensor]:
    """The output and the gradient of each floating input, in float64."""
    import torch

    dtype = torch.float64 if wide else operation.dtype
    # float64 is given the same numbers, rounded to the operation's own dtype
    given = {
        name: t.to(operation.dtype) if t.is_floating_point() else t for name, t in operation.inputs().items()
    }
    there = [
        t.to("cuda", dtype).requires_grad_() if t.is_floating_point() else t.to("cuda")
        for t in given.values()
    ]
    out = operation.call(*there)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(operation.dtype)
    out.backward(upstream.to("cuda", dtype))
    gradients = {f"{name} gradient": t.grad for name, t in zip(given, there, strict=True) if t.requires_grad}
    return {name: t.detach().double() for name, t in ({"forward": out} | gradients).items()}


def _distance(tensor: Tensor, other: Tensor) -> float:
    """Of ``tensor`` from ``other``, relative to it."""
    from driftlab.fold.layout import relative_distance

    return float(relative_distance(tensor, other))


def _repeats(operation: Operation, first: dict[str, Tensor]) -> dict[str, float]:
    """By how much the same call differs, at most, by pass; 0 where every bit is the same."""
    again = [_passes(operation) for _ in range(REPEATS)]
    return {name: max(_distance(other[name], t) for other in again) for name, t in first.items()}


def _lost(operation: Operation, name: str, errors: dict[str, dict[str, float]]) -> bool:
    """Whether it has lost bits though TF32 is off: it errs by more than halfway, in powers of two, between
    what float32 and TF32 round (``driftlab/rounding.py``), and as TF32 does, within a factor of 8.

    The first alone accuses float32's own sums where they are long: the gradient of a weight over 32,768
    pixels errs 9.1e-6 on an H200, a recurrent layer of cuDNN's 8.0e-6, where TF32 errs 7.8e-4 and 5.5e-4.
    """
    import torch

    from driftlab.rounding import HALFWAY_BITS, UNIT_ROUND_OFF

    if operation.dtype is not torch.float32:
        return False
    error, with_tf32 = errors["settled"][name], max(errors[way][name] for way in TF32_WAYS)
    return error > UNIT_ROUND_OFF["float32"] * HALFWAY_BITS and error > with_tf32 / AS_TF32


def _factor(name: str, errors: dict[str, dict[str, float]]) -> float:
    """TF32's error over float32's; what float32 gets exactly is compared with its unit round-off."""
    least = max(errors["settled"][name], 2**-24)
    return max(errors[way][name] for way in TF32_WAYS) / least


def _steadiness(differ: dict[str, dict[str, float]]) -> str:
    free, settled = (max(differ[way].values()) for way in ("as torch comes", "settled"))
    if settled:
        return f"; repeats differ by {settled:.1e}, settled or not"
    return (
        f"; repeats differ by {free:.1e} as torch comes, by no bit settled" if free else "; repeats are equal"
    )


def _line(name: str, errors: dict[str, dict[str, float]], differ: dict[str, dict[str, float]]) -> str:
    settled, free = errors["settled"][name], differ["as torch comes"][name]
    others = [f"{way} {error[name]:.1e}" for way, error in errors.items() if error[name] != settled]
    repeats = [f"repeats differ by {free:.1e}"] if free else []
    return f"{name} {settled:.1e}" + "".join(f", {text}" for text in [*others, *repeats])


PART = Part("kernels", "Where TF32 or a kernel that sums in any order would have misled", 1.5, items)
