"""The kind of experiment that splits one convolution: which pass differs, how far, and why."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.outcome import Ran
from experiments.questions.asking import ask
from experiments.questions.question import Question
from experiments.questions.split.answer import answer
from experiments.questions.split.measure import about, measure

QUESTION = Question(measure=measure, answer=answer, about=about)


def run(config: DictConfig) -> Ran:
    """Measure the split that was asked about and a sweep around it; the verdict is about the former."""
    return ask(config, QUESTION)
