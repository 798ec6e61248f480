"""The kind of experiment that raises the learning rate until training diverges, and counts who does."""

from __future__ import annotations

from experiments.edge_of_stability.answer import answer
from experiments.edge_of_stability.judged import judged
from experiments.edge_of_stability.measure import about, measure, pairs_of
from suite.command.schema import WATCHED, Function, Positive, Rewrite, Training, each_once
from suite.running.asking import Question


class Wrong(Rewrite):
    """A rewrite that is wrong on purpose."""

    target: Function


class Settings(Training):
    """What is set for this kind, beside a training's."""

    unread = (*WATCHED, "roles", "dtypes", "float64_steps", "log_schedule", "optimizer.lr")

    bug: Wrong
    learning_rates: each_once(Positive)


QUESTION = Question(measure=measure, answer=answer, about=about, check=pairs_of, judge=judged)
run = QUESTION.run
