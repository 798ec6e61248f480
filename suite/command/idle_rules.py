"""Which settings change nothing, and beside which others: of all experiments, and how a kind says its own.

A kind lists its own in ``Settings.idle``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from omegaconf import DictConfig

from suite.command.seeds import parse_seeds


class Idle(NamedTuple):
    """``setting`` changes nothing ``beside`` another, of whose values ``when`` tells."""

    setting: str
    beside: str
    when: Callable[[DictConfig], bool]
    why: str


class TakenAs(NamedTuple):
    """In place of ``setting`` a run takes ``value`` of the settings, where the two differ."""

    setting: str
    value: Callable[[DictConfig], object]
    why: str


def _no_float64(s: DictConfig) -> bool:
    return "float64" not in s.dtypes


def _no_warmup(s: DictConfig) -> bool:
    return s.learning_rate_schedule in ("constant", "cosine")


def _own_data(s: DictConfig) -> bool:
    return s.data.get("_target_") is not None


def _one_run(s: DictConfig) -> bool:
    return len(parse_seeds(s.seed)) > 1 and None not in s.seeds.values()


RULES = (
    Idle("seed", "seeds", _one_run, "all of them are set, and each seed would be the same run"),
    Idle("seeds.augmentation", "augment", lambda s: not s.augment, "no image is moved"),
    Idle("augment", "data._target_", _own_data, "a data set of one's own augments by itself"),
    Idle("seeds.nudge", "roles", lambda s: "control" not in s.roles, "the control alone is nudged"),
    Idle("float64_steps", "dtypes", _no_float64, "no arm is in float64"),
    Idle("float64_share", "dtypes", _no_float64, "no arm is in float64"),
    Idle("fast_float64", "dtypes", _no_float64, "no arm is in float64"),
    Idle("fast_float64", "device", lambda s: s.device == "cuda", "it is of CPUs"),
    Idle("scale.least_float64_steps", "float64_steps", lambda s: s.float64_steps != "auto", "none is chosen"),
    Idle("eval_every", "steps", lambda s: s.eval_every >= s.steps, "the end is evaluated in any case"),
    Idle("learning_rate_schedule", "steps", lambda s: s.steps == 1, "the first step has the full rate"),
    Idle("warmup", "learning_rate_schedule", _no_warmup, "its rate does not rise"),
    Idle("log_schedule.per_decade", "steps", lambda s: s.log_schedule.dense > s.steps, "each leaves a row"),
    Idle("optimizer.dampening", "optimizer", lambda s: not s.optimizer.get("momentum"), "it has no momentum"),
    Idle("local.share", "local.windows", lambda s: s.local.windows != "auto", "it chooses none of them"),
    Idle("local.updates", "local.windows", lambda s: s.local.windows == [], "there are none"),
    Idle("local.windows", "roles", lambda s: "candidate" not in s.roles, "no candidate is followed"),
    Idle("stop_on_bug", "roles", lambda s: "candidate" not in s.roles, "no candidate is probed"),
    Idle("reprobe", "rerun", lambda s: s.rerun and s.reprobe, "the probes are asked again in any case"),
)


class Most(NamedTuple):
    """``setting`` does no more above another than at it."""

    setting: str
    other: str
    why: str


CEILINGS = (
    Most("float64_steps", "steps", "float64 arms go no further than the others"),
    Most("probe_images", "batch_size", "the probes take images of one batch"),
    Most("log_schedule.dense", "steps", "each leaves a row"),
)

# Whoever writes one of these means something else.
NOT_TO_BE_SET = {
    "scale.name": "is the name of what scale=NAME chooses: write scale={value}",
    "scale.why": "is what a run says of scale=auto: write the words as hypothesis=...",
}
