"""A case of the bench: a rewrite of a known network with its true label and the true place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from bench.surgery import recast, replace
from bench.tasks import Task
from driftlab.words import Verdict

PLACED = (Verdict.BUG, Verdict.REDUCED_PRECISION, Verdict.NONDETERMINISTIC)
GRADIENTS = ("input gradient", "weight gradient")
ANY = ("forward", "input gradient", "weight gradient", "update", "buffer", "eval")


@dataclass(frozen=True)
class Source:
    """Where a case comes from.

    Attributes:
        link: the thread in which it was published, or the library's home.
        versions: in which it was, or that it was made of.
        wrong: what was wrong, in a sentence; empty for what never was.
    """

    link: str
    versions: str
    wrong: str = ""


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
        passes: the passes that are right: the forward pass unless the case names others.
        step: the first step at which the fault shows; None where that is not asked for.
        options: more keywords for ``diagnose``.
        file: that it stands in.
        room: the package of that file.
        source: where it comes from, if others made it.
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
    room: str = ""
    source: Source | None = None

    @property
    def held_out(self) -> bool:
        """Whether it was written after the rules were made, to be judged by them once."""
        return self.file.startswith("heldout") or self.room in ("bench.ported", "bench.held_back")


# by the folder that a case stands in, and its name: the benches may use the same words
REGISTERED: dict[tuple[str, str], Case] = {}

Names = str | tuple[str, ...]


def _each(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def case(
    label: Names,
    kind: str,
    on: Task,
    *,
    module: Names = (),
    passes: Names = (),
    step: int | None = None,
    source: Source | None = None,
    **options: object,
) -> Callable:
    """Register the decorated rewrite, ``function(model) -> model``, as a case under its own name.

    Args:
        passes: that are right; left out, the forward pass where a place is asked for.
        source: where it comes from, if others made it.
    """

    def register(rewrite: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
        name = rewrite.__name__
        labels = tuple(Verdict(value) for value in _each(label))
        right = _each(passes) or (("forward",) if labels[0] in PLACED else ANY)
        room, _, file = rewrite.__module__.rpartition(".")
        if (room, name) in REGISTERED:
            raise ValueError(f"two cases of {room} are called {name}")
        where = (_each(module), right, step)
        REGISTERED[room, name] = Case(name, kind, labels, on, rewrite, *where, options, file, room, source)
        return rewrite

    return register


def in_place_of(at: Names, label: Names, kind: str, on: Task, name: str = "", **truth: object) -> Callable:
    """Register what is decorated as a case: it makes what takes the place of the module ``at``, or of each.

    A subclass of the module's class keeps the module's weights and settings; any other class or function is
    called with the module.

    Args:
        name: of the case; that of the function where it is left out.
        truth: more keywords for ``case``; the right place is ``at`` unless ``module`` says otherwise.
    """

    def register(make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
        def rewrite(model: nn.Module) -> nn.Module:
            for place in _each(at):
                module = model.get_submodule(place)
                if isinstance(make, type) and issubclass(make, type(module)):
                    recast(model, place, make)
                else:
                    model = replace(model, place, make(module))
            return model

        _register(rewrite, name or make.__name__, make.__module__, at, label, kind, on, truth)
        return make

    return register


def method_of(
    at: Names,
    label: Names,
    kind: str,
    on: Task,
    method: str = "forward",
    base: type[nn.Module] | None = None,
    **truth: object,
) -> Callable:
    """Register the decorated function, ``function(self, ...)``, as a case: a method of the module ``at``.

    Args:
        method: whose place it takes.
        base: the class that the module's other methods come from; its own where it is left out.
        truth: as in ``in_place_of``.
    """

    def register(function: Callable) -> Callable:
        def rewrite(model: nn.Module) -> nn.Module:
            for place in _each(at):
                kept = base or type(model.get_submodule(place))
                recast(model, place, type(kept.__name__, (kept,), {method: function}))
            return model

        _register(rewrite, function.__name__, function.__module__, at, label, kind, on, truth)
        return function

    return register


def _register(
    rewrite: Callable, name: str, file: str, at: Names, label: Names, kind: str, on: Task, truth: dict
) -> None:
    """A case under ``name``; where the label asks for a place, ``at`` is the right one."""
    rewrite.__name__, rewrite.__module__ = name, file
    where = {"module": at} if _each(label)[0] in PLACED else {}
    case(label, kind, on, **where | truth)(rewrite)
