"""The kind of experiment that asks why a network in eval mode answers differently by batch size."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.batch_size.answer import answer
from experiments.batch_size.measure import about, measure
from suite.command.command_line import overrides
from suite.command.jobs import Ran
from suite.command.schema import Positive, Shared, group, several, whole
from suite.running.asking import ask
from suite.running.question import Question


class Settings(Shared):
    """What is set for this kind."""

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
    if config.get("batch_invariant") is True and not any("expected=" in o for o in overrides(config)):
        config.expected = "bit_identical"
    return ask(config, QUESTION)
