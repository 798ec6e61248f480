"""The kind of experiment that trains one network again and again, with one thing varied at a time."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.one_bit.answer import answer
from experiments.one_bit.judging import judged
from experiments.one_bit.measure import about, check, measure
from suite.command.jobs import Ran
from suite.command.schema import WATCHED, Positive, Training, group, whole
from suite.running.asking import ask
from suite.running.question import Question


class Settings(Training):
    """What is set for this kind, beside a training's."""

    unread = (*WATCHED, "rewrite", "roles", "dtypes", "float64_steps", "log_schedule", "probe_images")
    unread += ("loss", "warmup", "scheduler", "clip")

    nudged: str
    norm_rate: Positive
    warmup_steps: whole(0)
    shrink: whole(1)
    channels_last: bool
    progress: group(points=whole(1), images=whole(1))
    window: group(steps=whole(1), learning_rate=Positive)


QUESTION = Question(measure=measure, answer=answer, about=about, check=check, judge=judged)


def run(config: DictConfig) -> Ran:
    """Train every row of every seed; the verdict is about the split, beside one moved weight."""
    return ask(config, QUESTION)
