"""What ``assert_equivalent`` says of each case, beside what a tolerance set by hand says of it."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bench.low_precision.case import Case
from bench.rates import TODAY, Rate
from driftlab import DiagnoseError, assert_equivalent
from driftlab.network.calling import calling, cast, each_tensor, named_leaves
from driftlab.precision import PRECISIONS

SAID = {"not the same function": "bug", "fewer bits": "fewer_bits", "would mean nothing": "nondeterministic"}
OURS, TOLERANCE = "assert_equivalent", "assert_close"


@dataclass(frozen=True)
class Judged:
    """One case.

    Attributes:
        said: "right", "bug", "fewer_bits", or what was raised.
        right: whether that is its label.
        measured: by the probe that accused.
        by_tolerance: whether ``torch.testing.assert_close`` accuses it, with the tolerances in use.
    """

    name: str
    kind: str
    precision: str
    label: str
    held_out: bool
    said: str
    right: bool
    measured: str
    by_tolerance: bool
    seconds: float

    def as_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Judged:
        """A line of the file that ``as_dict`` wrote."""
        flags = {name: row[name] == "True" for name in ("held_out", "right", "by_tolerance")}
        return cls(**{**row, **flags, "seconds": float(row["seconds"])})


def judged(case: Case) -> Judged:
    """With one thread, as a unit test has it."""
    torch.set_num_threads(1)
    reference, candidate, inputs = case.make()
    accused = by_tolerance(case, reference, candidate, inputs)
    began = time.perf_counter()
    said, measured = _said(case, reference, candidate, inputs)
    seconds = round(time.perf_counter() - began, 2)
    right = said == case.label
    known = case.name, case.kind, case.precision, case.label, case.held_out
    return Judged(*known, said, right, measured, accused, seconds)


def _said(case: Case, reference: nn.Module, candidate: nn.Module, inputs: object) -> tuple[str, str]:
    try:
        assert_equivalent(reference, candidate, inputs, precision=case.precision)
    except AssertionError as error:
        measured = re.search(r"Measured: (\S+)", str(error))
        word = next(word for text, word in SAID.items() if text in str(error).splitlines()[0])
        return word, measured[1] if measured else ""
    except DiagnoseError as error:
        return f"refused: {error}", ""
    return "right", ""


def by_tolerance(case: Case, reference: nn.Module, candidate: nn.Module, inputs: object) -> bool:
    """Whether outputs, input gradients or gradients of parameters of one name differ by more."""
    mine, theirs = (_computed(case, module, inputs) for module in (reference, candidate))
    common = [n for n in mine if n in theirs and mine[n].shape == theirs[n].shape]
    return any(not _close(case, mine[n], theirs[n]) for n in common)


def _close(case: Case, mine: Tensor, theirs: Tensor) -> bool:
    try:
        torch.testing.assert_close(
            theirs.float(), mine.float(), atol=case.atol, rtol=case.rtol, equal_nan=True
        )
    except AssertionError:
        return False
    return True


def _computed(case: Case, module: nn.Module, inputs: object) -> Mapping[str, Tensor]:
    precision = PRECISIONS[case.precision]
    module, leaves = copy.deepcopy(module).to(precision.dtype), []

    def leaf(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        if tensor.is_floating_point():
            leaves.append(tensor.requires_grad_())
        return tensor

    given = each_tensor(leaf, cast(inputs, precision.dtype))
    torch.manual_seed(0)
    with precision.forward(module):
        outputs = named_leaves(calling(module, given)(module, given))
    generator = torch.Generator().manual_seed(0)
    sum((o.float() * torch.randn(o.shape, generator=generator)).sum() for o in outputs.values()).backward()
    gradients = {f"input {i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    gradients |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return pytree.tree_map(Tensor.detach, outputs | gradients)


def rates(found: Iterable[Judged], when: str = TODAY) -> list[Rate]:
    """Right of all, by half and label: of ``assert_equivalent``, and of a tolerance."""
    found = list(found)
    counted = []
    for held_out, label in product((False, True), ("right", "bug", "fewer_bits")):
        part = [j for j in found if (j.held_out, j.label) == (held_out, label)]
        cases = f"{'held out' if held_out else 'first'}: {label}"
        by_tolerance = sum(j.by_tolerance != (label == "right") for j in part)
        if part:
            counted.append(Rate(when, cases, OURS, "right", sum(j.right for j in part), len(part)))
            counted.append(Rate(when, cases, TOLERANCE, "right", by_tolerance, len(part)))
    return counted


def summary(rates: Iterable[Rate]) -> str:
    """A table in Markdown, of what ``rates`` gives."""
    rates = list(rates)
    lines = ["| half | label | cases | right | right by tolerance |", "| --- | --- | --- | --- | --- |"]
    for own, habit in zip(rates[::2], rates[1::2], strict=True):
        lines.append(f"| {own.cases.replace(': ', ' | ')} | {own.n} | {own} | {habit.count} |")
    return "\n".join(lines)


def together(rates: Iterable[Rate], by: str) -> Rate:
    """Over all halves and labels."""
    chosen = [r for r in rates if r.by == by]
    return Rate(chosen[0].when, "all", by, "right", sum(r.count for r in chosen), sum(r.n for r in chosen))


def wrong(found: Iterable[Judged]) -> str:
    """Those that are not what their label says, a line each."""
    lines = [f"- `{j.name}` ({j.precision}): {j.label}, and it said {j.said}" for j in found if not j.right]
    return "\n".join(["", "Wrong:" if lines else "None is wrong.", "", *lines])
