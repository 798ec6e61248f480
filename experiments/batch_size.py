"""The kind of experiment that asks why a network in eval mode answers differently by batch size."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.outcome import Ran
from experiments.questions.asking import ask
from experiments.questions.batch.answer import answer
from experiments.questions.batch.measure import about, measure
from experiments.questions.question import Question

QUESTION = Question(measure=measure, answer=answer, about=about)


def run(config: DictConfig) -> Ran:
    """Measure a row's answer at every batch size and why it moves; returns the verdict on the two."""
    if config.batch_invariant:
        config.expected = "bit_identical"
    return ask(config, QUESTION)
