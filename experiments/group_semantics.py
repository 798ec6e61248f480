"""The kind of experiment that asks what groups=2 computes: a network, a convolution, and others."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.outcome import Ran
from experiments.questions.asking import ask
from experiments.questions.group.answer import answer
from experiments.questions.group.measure import about, measure
from experiments.questions.question import Question

QUESTION = Question(measure=measure, answer=answer, about=about)


def run(config: DictConfig) -> Ran:
    """Measure what groups=2 connects, costs and equals; returns the verdict on it and convs side by side."""
    return ask(config, QUESTION)
