"""The kind of experiment that trains one network again and again, with one thing varied at a time."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.one_bit.answer import answer
from experiments.one_bit.judging import judged
from experiments.one_bit.measure import about, check, measure
from experiments.one_bit.training import look_steps
from suite.command.idle_rules import Idle, TakenAs
from suite.command.schema import WATCHED, Positive, Training, group, whole
from suite.running.asking import Question

MOST_LOOKS = 1000


def _enough(s: DictConfig) -> int:
    """The fewest points that look at the same updates."""
    looks = look_steps(s.steps, s.progress.points)
    return next(n for n in range(1, s.progress.points + 1) if look_steps(s.steps, n) == looks)


class Settings(Training):
    """What is set for this kind, beside a training's."""

    idle = (
        TakenAs("progress.points", _enough, "there are no more updates to look at"),
        Idle(
            "learning_rate_schedule", "warmup_steps", lambda s: s.warmup_steps >= s.steps, "none follows it"
        ),
    )
    unread = (*WATCHED, "rewrite", "roles", "dtypes", "float64_steps", "log_schedule", "probe_images")
    unread += ("loss", "warmup", "scheduler", "clip", "fast_float64")

    nudged: str
    norm_rate: Positive
    warmup_steps: whole(0)
    shrink: whole(1)
    channels_last: bool
    progress: group(points=whole(1, MOST_LOOKS), images=whole(1))
    window: group(steps=whole(1), learning_rate=Positive)


QUESTION = Question(measure=measure, answer=answer, about=about, check=check, judge=judged)
run = QUESTION.run
