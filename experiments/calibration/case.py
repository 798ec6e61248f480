"""A case of the bench: a rewrite of a known network with its true label and the true place."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from driftlab.verdict import Verdict
from experiments.calibration import cases
from experiments.calibration.tasks import Task

ANY = ("forward", "input gradient", "weight gradient", "update", "buffer", "eval")


@dataclass(frozen=True)
class Case:
    """One pair whose relation is known.

    Attributes:
        name: of the function that makes the candidate.
        kind: the kind of rewrite or fault in a few words; faults of one kind differ in place or size.
        labels: the verdicts that are right, the plain one first.
        task: makes the reference, the batches and the loss.
        rewrite: the candidate from a deep copy of the reference.
        modules: the module names that are a right place; empty where no place is asked for.
        passes: the passes that are right.
        step: the first step at which the fault shows; None where that is not asked for.
        options: more keywords for ``diagnose``.
        file: that it stands in.
    """

    name: str
    kind: str
    labels: tuple[Verdict, ...]
    task: Task
    rewrite: Callable[[nn.Module], nn.Module]
    modules: tuple[str, ...] = ()
    passes: tuple[str, ...] = ANY
    step: int | None = None
    options: dict = field(default_factory=dict)
    file: str = ""

    @property
    def held_out(self) -> bool:
        """Whether it was written after the rules were made, to be judged by them once."""
        return self.file.startswith("heldout")


_CASES: dict[str, Case] = {}


def case(
    label: str | tuple[str, ...],
    kind: str,
    on: Task,
    *,
    module: str | tuple[str, ...] = (),
    passes: str | tuple[str, ...] = ANY,
    step: int | None = None,
    **options: object,
) -> Callable:
    """Register the decorated rewrite, ``function(model) -> model``, as a case under its own name."""

    def register(rewrite: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
        name = rewrite.__name__
        if name in _CASES:
            raise ValueError(f"two cases are called {name}")
        labels = tuple(Verdict(value) for value in ([label] if isinstance(label, str) else label))
        modules = (module,) if isinstance(module, str) else module
        allowed = (passes,) if isinstance(passes, str) else passes
        file = rewrite.__module__.rpartition(".")[2]
        _CASES[name] = Case(name, kind, labels, on, rewrite, modules, allowed, step, options, file)
        return rewrite

    return register


def all_cases() -> list[Case]:
    """Every case of every file under ``cases/``."""
    for module in sorted(m.name for m in pkgutil.iter_modules(cases.__path__) if m.name[0] != "_"):
        importlib.import_module(f"{cases.__name__}.{module}")
    return list(_CASES.values())
