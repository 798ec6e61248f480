"""The kind of experiment that asks what groups=2 computes: a network, a convolution, and others."""

from __future__ import annotations

from typing import Annotated, Literal

from omegaconf import DictConfig

from experiments.group_semantics.answer import answer
from experiments.group_semantics.measure import about, measure
from suite.command.idle_rules import Idle
from suite.command.schema import Must, Positive, Shared, group, one_of, several, whole
from suite.running.asking import Question

NET = dict.fromkeys(("tile", "channels", "features"), list[whole(1)])
Groups = Annotated[
    whole(2) | Literal["depthwise"], Must("must be a whole number of at least 2, or depthwise")
]


def _thin(s: DictConfig) -> bool:
    return s.scale.name == "smoke" and s.training.pair != "net"


class Settings(Shared):
    """What is set for this kind."""

    idle = tuple(Idle(f"net.{n}", "scale", _thin, "thin is judged, but for the costs") for n in NET)

    case: group(
        **dict.fromkeys(("in_channels", "out_channels", "kernel_size", "batch"), whole(1)),
        **{"padding": whole(0), "groups": whole(2), "image": list[whole(1)]},
    )
    net: group(groups=whole(2), classes=whole(1), **NET)
    thin: group(**NET)
    sweep: group(groups=several(Groups), channels=several(whole(2)), cases=whole(1) | None)
    training: group(pair=one_of("conv", "net"), updates=whole(1), batch=whole(1), lr=Positive)


QUESTION = Question(measure=measure, answer=answer, about=about)
run = QUESTION.run
