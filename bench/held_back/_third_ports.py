"""Registers a port with one of its faults at a time; ports in the shell of two residual layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bench.case import case
from bench.held_back._first_shell import Flat
from bench.tasks import Task

BACK = ("input gradient", "weight gradient")


def faults(on: Task, make: Callable, **truths: tuple) -> None:
    """Register ``make(model, name)`` as a wrong pair for each ``name=(module, passes...)``."""
    for name, (module, *passes) in truths.items():

        def rewrite(model: nn.Module, wrong: str = name) -> nn.Module:
            return make(model, wrong)

        rewrite.__name__, rewrite.__module__ = name, make.__module__
        case("bug", name.replace("_", " "), on, module=module, passes=tuple(passes) or "forward")(rewrite)


def only(at: int, mixer: Callable, time_first: bool = False) -> Callable:
    """A maker of the port whose layer ``at`` alone may be wrong."""

    def make(model: nn.Module, wrong: str) -> Flat:
        mixers = [mixer(each.mixer, wrong if i == at else "") for i, each in enumerate(model.layers)]
        return Flat(model, mixers, time_first)

    make.__module__ = mixer.__module__
    return make
