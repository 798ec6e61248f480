"""The quantities of a module, in each arithmetic, and how far two modules' are apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import PASSES, Difference, distance, finite_norm, same_values
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.fold.layout import AnyFold
from driftlab.precision import FLOAT32, Precision
from driftlab.rounding import UNIT_ROUND_OFF


def differences(
    both: dict[str, tuple[Passes, Passes]],
    fold: AnyFold,
    prefixes: tuple[str, str],
    used: set[str] | None,
    exact: Passes | None = None,
    precision: Precision = FLOAT32,
) -> list[Difference]:
    """All quantities of two modules.

    Args:
        both: arithmetic -> the passes of both in it.
        used: the outputs that count, all where None.
        exact: the truth, where it is none of ``both``.
        precision: in which both ran as they are.
    """
    read = {
        a: tuple(by_reference_names(p, fold, prefixes, i) for i, p in enumerate(pair))
        for a, pair in both.items()
    }
    truth = read["shadow" if "shadow" in read else "float64" if "float64" in read else "float32"][0]
    truth = by_reference_names(exact, fold, prefixes, 0) if exact else truth
    known = exact is not None or len(read) > 1
    found = [
        replace(
            _difference(pass_, name, tensor, _of(read, pass_, name), known),
            precision=precision,
            unit=_unit(both, pass_, name.removeprefix(prefixes[0] and f"{prefixes[0]}."), precision),
        )
        for pass_ in PASSES
        for name, tensor in truth.get(pass_, {}).items()
        if all(name in pair[i].get(pass_, {}) for pair in read.values() for i in (0, 1))
        and (used is None or pass_ not in ("forward", "eval") or name in used)
    ]
    largest = max((d.size for d in found if d.pass_ == "weight gradient"), default=0.0)
    return [replace(d, scale=largest) if d.pass_ == "weight gradient" else d for d in found]


def _of(read: dict, pass_: str, name: str) -> dict[str, tuple[Tensor, Tensor]]:
    return {a: (mine[pass_][name], theirs[pass_][name]) for a, (mine, theirs) in read.items()}


def _unit(both: dict, pass_: str, name: str, precision: Precision) -> float:
    """The unit round-off of what the reference stores the quantity in; under autocast that differs."""
    own = both["float32"][0].dtypes.get(pass_, {}).get(name) if "float32" in both else None
    own = own if own is not None and own.is_floating_point else precision.dtype
    return max(torch.finfo(own).eps / 2, UNIT_ROUND_OFF["float32"])


def _difference(pass_: str, name: str, truth: Tensor, pairs: dict, known: bool) -> Difference:
    """Of one quantity, ``pairs``: arithmetic -> the reference's and the candidate's."""
    errors, change = {}, None
    if "float32" in pairs and known:
        mine, theirs = pairs["float32"]
        errors = {"reference": distance(mine, truth), "candidate": distance(theirs, truth)}
    if "shadow64" in pairs:
        change = distance(pairs["shadow64"][0], pairs["shadow"][0])
    reshaped = any(a.shape != b.shape for a, b in pairs.values())
    return Difference(
        pass_,
        name,
        finite_norm(truth),
        {arithmetic: distance(b, a) for arithmetic, (a, b) in pairs.items()},
        errors,
        same=all(same_values(a, b) for how, (a, b) in pairs.items() if not how.startswith("shadow")),
        finite=bool(truth.isfinite().any()),
        own_change=change,
        numbers=truth.numel(),
        reshaped=reshaped,
        less_finite=not reshaped and any((a.isfinite() & ~b.isfinite()).any() for a, b in pairs.values()),
    )


def by_reference_names(passes: Passes, fold: AnyFold, prefixes: tuple[str, str], index: int) -> dict:
    """Weights, gradients and buffers under the reference's full names; its buffers get no gradient."""
    read = dict(passes.tensors)
    if not index:  # what is a weight in the candidate may be a buffer here
        none = {n: torch.zeros_like(b) for n, b in read["buffer"].items()}
        read["weight gradient"] = none | read["weight gradient"]
    for pass_ in ("weight gradient", "buffer"):
        prefix = f"{prefixes[index]}." if prefixes[index] else ""
        named = {prefix + name: tensor for name, tensor in read[pass_].items()}
        read[pass_] = dict(fold(named)) if index else named
    return read


def read_both(
    modules: tuple[nn.Module, nn.Module],
    recorded: Recorded,
    arithmetic: str,
    fold: AnyFold,
    prefixes: tuple[str, str] = ("", ""),
    **options: Any,
) -> tuple[dict, dict]:
    """What the two modules give, by the reference's names. ``options`` as of ``run``."""
    own = run(modules[0], recorded, arithmetic, **options)
    other = run(modules[1], recorded, arithmetic, beside=own, **options)
    return by_reference_names(own, fold, prefixes, 0), by_reference_names(other, fold, prefixes, 1)


def used_outputs(recorded: Recorded) -> set[str] | None:
    """The outputs that a gradient came back to; None where all count, as in a frozen part."""
    if recorded.loss is not None:
        return None
    return {name for name, gradient in recorded.gradients.items() if gradient is not None} or None


def exact_passes(module: nn.Module, recorded: Recorded, **options: Any) -> Passes | None:
    """Of a module by itself, where it runs in more than float32. ``options`` as of ``run``."""
    for arithmetic in ("shadow", "float64"):
        try:
            return run(module, recorded, arithmetic, **options)
        except CannotRunError:
            continue
    return None
