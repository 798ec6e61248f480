"""Bugs that people made and published, each beside its mended form, and right pairs out of real libraries.

A file a kind of code. What is decorated here makes the wrong candidate and the mended one; its docstring says
what was wrong. The code is a small one of our own that has the published fault, not the published code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import Optimizer

from bench.case import Names, Source, _each, case
from bench.cases._rewritten import SAME
from bench.surgery import recast, replace
from bench.tasks import Task

Make = Callable[[nn.Module, bool], nn.Module]


def real_bug(
    name: str,
    link: str,
    versions: str,
    *,
    at: Names,
    on: Task,
    module: Names | None = None,
    passes: Names = (),
    **options: object,
) -> Callable:
    """Register the decorated as two cases: ``name``, which is wrong, and ``name_mended``, which is right.

    A subclass of the class of the module ``at`` keeps the module's weights and is told by its attribute
    ``mended``; anything else is called as ``make(module, mended)``. "" is the whole network.

    Args:
        link: to the thread, which says what was wrong and how it was mended.
        versions: in which it was.
        at: the module, or each of several, whose place it takes.
        module: the right places; those of ``at`` where it is left out.
        passes: as in ``bench.case.case``.
    """

    def register(make: type[nn.Module] | Make) -> type[nn.Module] | Make:
        def rewrite(model: nn.Module, mended: bool) -> nn.Module:
            for place in _each(at):
                model = _changed(model, place, make, mended)
            return model

        truth = {"module": at if module is None else module, "passes": passes}
        _both(name, make, Source(link, versions, _wrong(make)), on, rewrite, truth, lambda mended: options)
        return make

    return register


def real_update(
    name: str,
    link: str,
    versions: str,
    *,
    on: Task,
    module: Names,
    passes: Names = "update",
    **options: object,
) -> Callable:
    """The same of an optimizer: the decorated is called as ``make(model, mended) -> Optimizer``."""

    def register(make: Callable[[nn.Module, bool], Optimizer]) -> Callable[[nn.Module, bool], Optimizer]:
        def with_optimizer(mended: bool) -> dict:
            return options | {"candidate_optimizer": partial(make, mended=mended)}

        truth = {"module": module, "passes": passes}
        same = lambda model, mended: model  # noqa: E731
        _both(name, make, Source(link, versions, _wrong(make)), on, same, truth, with_optimizer)
        return make

    return register


def right_pair(link: str, versions: str, on: Task, **options: object) -> Callable:
    """Register the decorated ``function(model) -> model`` as a right pair made of a library."""

    def register(rewrite: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
        return case(SAME, "right pair", on, source=Source(link, versions), **options)(rewrite)

    return register


def _both(
    name: str, make: Callable, source: Source, on: Task, rewrite: Make, truth: dict, options: Callable
) -> None:
    for mended in (False, True):
        one = partial(rewrite, mended=mended)
        one.__name__, one.__module__ = name + mended * "_mended", make.__module__
        label, kind = (SAME, "mended bug") if mended else ("bug", "real bug")
        case(label, kind, on, source=source, **({} if mended else truth), **options(mended))(one)


def _changed(model: nn.Module, place: str, make: type[nn.Module] | Make, mended: bool) -> nn.Module:
    module = model.get_submodule(place)
    if isinstance(make, type) and issubclass(make, type(module)):
        return recast(model, place, type(make.__name__, (make,), {"mended": mended}))
    return replace(model, place, make(module, mended))


def _wrong(make: Callable) -> str:
    return " ".join((inspect.getdoc(make) or "").split())
