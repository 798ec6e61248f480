"""The kind of experiment that asks whether final loss and accuracy tell a right rewrite from a wrong one."""

from __future__ import annotations

from experiments.loss_curves_do_not_tell.answer import answer, judged
from experiments.loss_curves_do_not_tell.measure import about, built, measure
from suite.command.schema import WATCHED, Training, whole
from suite.running.asking import Question


class Settings(Training):
    """What is set for this kind, beside a training's."""

    unread = (*WATCHED, "roles", "probe_images")

    diagnosis_steps: whole(1)


QUESTION = Question(measure=measure, answer=answer, about=about, check=built, judge=judged)
run = QUESTION.run
