"""The kind of experiment that asks why a network in eval mode answers differently by batch size."""

from __future__ import annotations

from collections.abc import Callable, Collection

from omegaconf import DictConfig, OmegaConf

from experiments.batch_size.answer import answer
from experiments.batch_size.measure import about, measure
from experiments.batch_size.plan import SMOKE_ROWS, Plan, read
from suite.command.idle_rules import Idle, TakenAs
from suite.command.jobs import Ran
from suite.command.schema import Positive, Shared, group, several, whole
from suite.command.written import written
from suite.running.asking import Question


def _planned(setting: str, value: Callable[[Plan], object]) -> TakenAs:
    return TakenAs(setting, lambda s: value(read(s)), "scale=smoke takes no more and no less")


def _tried(setting: str, sizes: Callable[[Plan], Collection[int]]) -> TakenAs:
    """A list, of which the plan may hold less."""

    def those(settings: DictConfig) -> list[int]:
        plan = read(settings)
        return [n for n in dict.fromkeys(OmegaConf.select(settings, setting)) if n in sizes(plan)]

    return TakenAs(setting, those, "the others are there already, or scale=smoke leaves them out")


def _few_is_all(s: DictConfig) -> bool:
    return s.scale.name == "full" and {*s.sweep.few} <= {*range(1, s.sweep.up_to + 1), *s.sweep.above}


IDLE = (
    Idle("chunk", "batch_invariant", lambda s: not s.batch_invariant, "the costs alone have a row of it"),
    Idle("sweep.few", "scale", _few_is_all, "every size is taken"),
    _planned("case.blocks", lambda plan: plan.blocks),
    _planned("case.filters", lambda plan: plan.network["filters"]),
    _planned("statistics.batches", lambda plan: plan.statistics[0]),
    _planned("statistics.rows", lambda plan: plan.statistics[1]),
    _planned("layers.batch", lambda plan: plan.at),
    _planned("cost.repeats", lambda plan: plan.repeats),
    _planned("suite.rows", lambda plan: plan.suite[0]),
    _planned("suite.steps", lambda plan: plan.suite[1]),
    TakenAs(
        "sweep.up_to",
        lambda s: min(s.sweep.up_to, SMOKE_ROWS) if s.scale.name == "smoke" else s.sweep.up_to,
        "scale=smoke tries no more",
    ),
    _tried("sweep.few", lambda plan: plan.few),
    _tried("sweep.above", lambda plan: plan.sizes),
    _tried("cost.batches", lambda plan: plan.cost_batches),
    _tried("cost.chunks", lambda plan: plan.cost_chunks),
)


class Settings(Shared):
    """What is set for this kind."""

    idle = IDLE

    batch_invariant: bool
    chunk: whole(1)
    case: group(blocks=whole(0), filters=whole(1), planes=whole(1), board=list[whole(1)], moves=whole(1))
    statistics: group(batches=whole(1), rows=whole(1))
    sweep: group(up_to=whole(1), above=list[whole(1)], few=several(whole(1)))
    layers: group(batch=whole(2))
    cost: group(batches=several(whole(1)), chunks=several(whole(1)), repeats=whole(1))
    suite: group(rows=whole(2), steps=whole(1), learning_rate=Positive)


QUESTION = Question(measure=measure, answer=answer, about=about)


def run(config: DictConfig) -> Ran:
    """Measure a row's answer at every batch size and why it moves; returns the verdict on the two."""
    if config.get("batch_invariant") is True and "expected" not in written():
        config.expected = "bit_identical"
    return QUESTION.run(config)
