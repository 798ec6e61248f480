"""A case in low precision: a reference, a candidate with its weights, inputs and the true label."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

import bench.low_precision as room

PRECISIONS = ("bf16-true", "bf16-mixed", "16-true", "16-mixed")
LABELS = ("right", "bug", "fewer_bits")


@dataclass(frozen=True)
class Case:
    """One pair whose relation is known.

    Attributes:
        name: one of a kind.
        kind: the family of kernels.
        precision: "-true" has the module and its inputs in that dtype; "-mixed" has a float32 module under
            ``torch.autocast("cpu", dtype)``.
        label: "right", "bug" or "fewer_bits".
        make: gives the reference, the candidate and the inputs (a tensor, a tuple or a dict), float32 as
            made and the same at every call; the judge casts them for "-true".
        atol: the absolute tolerance that a test in real use has for this kind of kernel.
        rtol: its relative one.
        source: where that test stands.
        held_out: it is of the half that is judged last.
        factor: of fewer bits, how many times the root mean square error of the reference the candidate has,
            against float64, in the pass where that is largest.
    """

    name: str
    kind: str
    precision: str
    label: str
    make: Callable[[], tuple[nn.Module, nn.Module, object]]
    atol: float
    rtol: float
    source: str
    held_out: bool
    factor: float | None = None


def cases() -> list[Case]:
    """Every case, file by file; a file has its own in ``CASES``."""
    names = sorted(m.name for m in pkgutil.iter_modules(room.__path__))
    modules = [importlib.import_module(f"{room.__name__}.{name}") for name in names if name != "case"]
    return [case for module in modules for case in getattr(module, "CASES", ())]
