"""Running the bench: every case through ``diagnose``, and what came out of it."""

from __future__ import annotations

import importlib
import pkgutil
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from types import ModuleType

import torch

from bench import cases
from bench.case import PLACED, REGISTERED, Case
from driftlab import diagnose
from driftlab.words import Verdict


@dataclass(frozen=True)
class Outcome:
    """What the diagnosis of one case said, beside its label.

    Attributes:
        right: whether the verdict is among the labels.
        placed: whether module, pass and step are right; None where no place was asked for.
    """

    name: str
    kind: str
    task: str
    held_out: bool
    label: str
    verdict: str
    right: bool
    placed: bool | None
    where: dict | None
    headline: str
    seconds: float

    def as_dict(self) -> dict:
        return asdict(self)


def run_case(case: Case) -> Outcome:
    """Diagnose one case with one thread; what it raises is an outcome too."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"loss": case.task.loss} | case.options
            found = diagnose(case.task.network(), case.rewrite, case.task.batches(), **options)
        verdict, where, headline = str(found.verdict), found.where, found.headline
        right = found.verdict in case.labels
    except Exception as error:
        verdict, where, headline, right = "raised", None, f"{type(error).__name__}: {error}", False
    return Outcome(
        case.name,
        case.kind,
        case.task.name,
        case.held_out,
        str(case.labels[0]),
        verdict,
        right,
        _placed(case, where) if right and case.modules and verdict in PLACED else None,
        where.as_dict() if where else None,
        headline,
        round(time.perf_counter() - began, 2),
    )


def _placed(case: Case, where) -> bool:
    if where is None:
        return False
    step = case.step is None or where.step == case.step
    return where.module in case.modules and where.pass_ in case.passes and step


def confusion(outcomes: list[Outcome]) -> dict[str, Counter]:
    """label -> how often each verdict was given for it."""
    table: dict[str, Counter] = {str(v): Counter() for v in Verdict}
    for outcome in outcomes:
        table[outcome.label][outcome.verdict if not outcome.right else outcome.label] += 1
    return {label: row for label, row in table.items() if row}


def all_cases(room: ModuleType = cases) -> list[Case]:
    """Every case of every file of ``room``: ``bench.cases``, which are planted, or ``bench.real_bugs``."""
    for module in sorted(m.name for m in pkgutil.iter_modules(room.__path__) if m.name[0] != "_"):
        importlib.import_module(f"{room.__name__}.{module}")
    return [case for case in REGISTERED.values() if case.room == room.__name__]
