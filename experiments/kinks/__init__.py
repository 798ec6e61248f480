"""The kind of experiment that trains networks with and without kinks, and predicts their sign flips."""

from __future__ import annotations

from experiments.kinks.answer import answer
from experiments.kinks.judged import judged
from experiments.kinks.measure import about, check, measure
from models.resnet import ACTIVATIONS, POOLS
from suite.command.schema import WATCHED, Training, group, one_of, several
from suite.running.asking import Question


class Settings(Training):
    """What is set for this kind, beside a training's."""

    unread = (*WATCHED, "rewrite", "eval_images", "probe_images")

    networks: several(group(activation=one_of(*ACTIVATIONS), pool=one_of(*POOLS)))


QUESTION = Question(measure=measure, answer=answer, about=about, check=check, judge=judged)
run = QUESTION.run
