"""The kind of experiment that asks whether final loss and accuracy tell a right rewrite from a wrong one."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.outcome import Ran
from experiments.questions.asking import ask
from experiments.questions.loss_curves.answer import answer, judged
from experiments.questions.loss_curves.measure import about, measure
from experiments.questions.question import Question

QUESTION = Question(measure=measure, answer=answer, about=about, judge=judged, trains=True)


def run(config: DictConfig) -> Ran:
    """Train right and wrong networks in one lockstep a seed; the verdict is about the right rewrite."""
    return ask(config, QUESTION)
