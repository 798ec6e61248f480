"""The split that was asked about, every dtype and pass, against the original and the exact result."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.split_gradient.case import Case, Operands, draw_as_asked, with_53_bits
from experiments.split_gradient.passes import (
    PASSES,
    Passes,
    bound,
    distance,
    exact,
    magnitudes,
    passes,
    ratio,
    terms,
    ulp,
    whole,
)

# As they are called in tables; the last has digits of its own below those of float32.
FULL_FLOAT64 = "float64, 53-bit operands"
DTYPES = {
    **{
        str(d).removeprefix("torch."): d
        for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    },
    FULL_FLOAT64: torch.float64,
}


def measure_literal(case: Case, seed: int, device: str) -> dict:
    """Rows by dtype and pass, the dtypes that the device does not compute, where the difference arises."""
    drawn = draw_as_asked(case, seed)
    rows, missing = [], {}
    for name, dtype in DTYPES.items():
        operands = with_53_bits(drawn, seed) if name == FULL_FLOAT64 else drawn.to(dtype)
        try:
            sides = _sides(case, operands, device)
        except RuntimeError as error:  # torch's word for a kernel that there is none of
            if dtype.itemsize > 2:
                raise
            missing[name] = str(error).splitlines()[0][:120]
            continue
        if not all(bool(t.isfinite().all()) for side in sides for t in side.values()):
            missing[name] = f"a result is larger than its largest number, {torch.finfo(dtype).max:g}"
            continue
        rows += [{"dtype": name, **row} for row in _compared(case, operands, sides)]
    return {"rows": rows, "missing": missing, "causes": _causes(case, drawn.to(torch.float32, device))}


def _sides(case: Case, operands: Operands, device: str) -> tuple[Passes, Passes]:
    there = operands.to(operands.weight.dtype, device)
    sides = whole(there), passes(there, case.split)
    return tuple({name: t.cpu() for name, t in side.items()} for side in sides)


def _compared(case: Case, operands: Operands, sides: tuple[Passes, Passes]) -> list[dict]:
    magnitude, count, truth = magnitudes(operands), terms(operands), exact(operands)
    return [
        {"pass": p}
        | _difference(case, p, sides[0][p], sides[1][p], magnitude[p], count[p])
        | _errors(sides[0][p], sides[1][p], truth[p])
        for p in PASSES
    ]


def _difference(
    case: Case, pass_: str, mine: Tensor, theirs: Tensor, magnitude: Tensor, count: Tensor
) -> dict:
    apart = (mine.double() - theirs.double()).abs()
    at = int(apart.argmax())
    allowed = bound(case, pass_, magnitude, count, mine.dtype)
    spacing = ulp(mine, mine.dtype).flatten()
    return {
        "difference": float(apart.max()),
        "relative": float(apart.max() / mine.double().abs().max()),
        "ulps": float(apart.flatten()[at] / spacing[at]),
        "ulp": float(spacing.max()),
        "terms": int(count.max()),
        "share": float(ratio(apart, allowed).max()),
        "bound": float(allowed.max()),
        "size": float(mine.double().abs().max()),
    }


def _errors(mine: Tensor, theirs: Tensor, truth: list[Tensor]) -> dict:
    """How far both are from the exact result: the largest element, and the root mean square."""
    found = {}
    for name, values in (("whole", mine), ("split", theirs)):
        error = distance(values, truth)
        found[f"error_{name}"] = float(error.max())
        found[f"rms_{name}"] = float(error.square().mean().sqrt())
        found[f"error_ulps_{name}"] = float((error / ulp(mine, mine.dtype)).max())
    return found


def _causes(case: Case, operands: Operands) -> dict:
    """Which parts' weight gradients differ, and whether the cut of the sum or another kernel makes it.

    The original convolution on an output gradient that is zero outside a part sums up that part alone, with
    the kernel of the original: the sum of these is the original with its sum cut, and nothing else.
    """
    mine, theirs = whole(operands), passes(operands, case.split)
    apart = (mine["weight gradient"] - theirs["weight gradient"]).abs()
    # autograd runs the last part first and adds the others to it
    cut = sum(whole(part)["input gradient"] for part in reversed(_one_part_each(case, operands)))
    rows = mine["weight gradient"]
    return {
        "weight_gradient_by_part": [float(t.max()) for t in apart.split(list(case.split))],
        "rows_of_one_convolution": float((rows.amax(0) - rows.amin(0)).max()),
        "cut": float((mine["input gradient"] - cut).abs().max()),
        "kernel": float((theirs["input gradient"] - cut).abs().max()),
    }


def _one_part_each(case: Case, operands: Operands) -> list[Operands]:
    found, start = [], 0
    for size in case.split:
        masked = torch.zeros_like(operands.gradient)
        masked[:, start : start + size] = operands.gradient[:, start : start + size]
        found.append(Operands(operands.weight, operands.inputs, masked))
        start += size
    return found
