"""The kind of experiment that splits one convolution: which pass differs, how far, and why."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from pydantic import create_model

from experiments.split_gradient.answer import answer
from experiments.split_gradient.case import Case
from experiments.split_gradient.measure import about, measure
from experiments.split_gradient.sweep import case_of
from suite.command.idle_rules import TakenAs
from suite.command.schema import Positive, Shared, group, several, whole
from suite.running.asking import Question

SIZES = dict.fromkeys(("in_channels", "out_channels", "kernel_size", "batch", "image_size"), whole(1))
Split = list[whole(-1)]


def _ends(factor: str) -> TakenAs:
    """The values of ``sweep`` that ``cases`` takes of this factor."""

    def taken(s: DictConfig) -> list:
        values = OmegaConf.to_container(s.sweep)[factor]
        cases: dict[Case, object] = {}
        for value in [values[0], values[-1]] if s.scale.name == "smoke" else values:
            cases.setdefault(case_of(s, factor, value), value)
        return list(cases.values())

    return TakenAs(f"sweep.{factor}", taken, "a case is measured once, and scale=smoke takes the ends alone")


class Settings(Shared):
    """What is set for this kind."""

    idle = tuple(_ends(factor) for factor in (*SIZES, "split"))

    case: group(**SIZES, split=Split)
    window: group(steps=whole(1), learning_rate=Positive)
    sweep: create_model(
        "Sweep",
        __base__=group(base=group(**SIZES, split=Split)),
        **{name: (several(kind), None) for name, kind in (SIZES | {"split": Split}).items()},
    )


QUESTION = Question(measure=measure, answer=answer, about=about)
run = QUESTION.run
