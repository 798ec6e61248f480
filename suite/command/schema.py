"""Every setting of ``conf/config.yaml`` with its type, its range, and what may be written instead.

A kind of experiment adds its own (``Settings`` beside its ``run``) to those of a ``Training``, where it
trains networks of the configuration, or else to the ``Shared`` ones. ``suite.command.checking`` compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError, core_schema

from driftlab.lockstep.arm import ROLES
from driftlab.precision import TRAINED_IN
from driftlab.words import Verdict
from suite.command.command_line import choices
from suite.command.idle_rules import Idle, TakenAs
from suite.command.seeds import LARGEST

# No count is larger: at a millisecond each (a small network on a GPU) so many steps take twelve days.
MOST = 10**9
# As the largest machines have, so that a run of theirs can be repeated anywhere. libgomp ends the process
# where a system refuses it a thread: 4,096 were had here, 16,384 were not.
MOST_THREADS = 1024


@dataclass(frozen=True)
class Must:
    """The end of the line for whatever does not pass what stands before it, as in "steps=0 must be ..."."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable) -> core_schema.CoreSchema:
        return core_schema.custom_error_schema(handler(source), "must", custom_error_message=self.words)


class Group(BaseModel):
    """Settings under one name. None is converted (``no`` is a word, not false), and there are no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def group(**settings: Any) -> type[Group]:
    """A group that needs no name of its own."""
    return create_model("Group", __base__=Group, **{name: (kind, ...) for name, kind in settings.items()})


def whole(least: int, most: int = MOST) -> Any:
    return Annotated[int, Ge(least), Must(f"must be a whole number of at least {least}"), Le(most)]


def auto_or(least: int) -> Any:
    return Annotated[
        whole(least) | Literal["auto"], Must(f"must be auto or a whole number of at least {least}")
    ]


def one_of(*names: str) -> Any:
    return Annotated[Literal[names], Must(f"is unknown: choose from {', '.join(names)}")]


def several(kind: Any) -> Any:
    """One at least."""
    return Annotated[list[kind], Len(1)]


def each_once(kind: Any) -> Any:
    """One at least, and none twice."""
    return Annotated[several(kind), AfterValidator(_refuse_twins)]


def none_twice(kind: Any) -> Any:
    return Annotated[list[kind], AfterValidator(_refuse_twins)]


def _refuse_twins(values: list) -> list:
    if len({*values}) < len(values):
        raise PydanticCustomError("must", "names one of them twice: write each once")
    return values


def text(pattern: str, words: str) -> Any:
    """Of this pattern, from end to end."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise PydanticCustomError("must", words)
        return value

    return Annotated[str, AfterValidator(check)]


Positive = Annotated[float, Gt(0), Must("must be a finite number above 0")]
NotNegative = Annotated[float, Ge(0), Must("must be a finite number of at least 0")]
Share = Annotated[float, Ge(0), Le(1), Must("must be a number from 0 to 1")]
InnerShare = Annotated[float, Gt(0), Lt(1), Must("must be a number above 0 and below 1")]
Seed = Annotated[int, Ge(0), Le(LARGEST), Must(f"must be a whole number from 0 to {LARGEST}")]
Threads = Annotated[
    whole(1, MOST_THREADS) | Literal["auto"] | None,
    Must(f"must be auto, null or a whole number from 1 to {MOST_THREADS}"),
]
Workers = Annotated[
    whole(1, MOST_THREADS) | Literal["auto"], Must(f"must be auto or a whole number from 1 to {MOST_THREADS}")
]
# a folder of this name is made; others beside it begin with a dot, options of commands with a dash
Name = text(r"\w[\w-]{,99}", "must be the name of one folder: letters, digits, _ and -, at most 100 of them")
Label = text(r"[^\W_](?=.{,119}$)[ -~]*", "must be one line of at most 120 plain letters, digits and signs")
Folder = text(r"[^~](?s:.)*", "must be a folder: write its path, and for ~ write $HOME")
Function = text(r"\w+(\.\w+)+", "is no function: write package.module.function")


class Chosen(Group):
    """One of several by its name, with what the others make no use of."""

    uses: ClassVar[Mapping[str, tuple[str, ...]]]

    @model_validator(mode="after")
    def _refuse_unused(self) -> Chosen:
        given = {key for key, value in self if value is not None} - {"name", *self.uses.get(self.name, ())}
        if given:
            key = min(given)
            others = " or ".join(f"{{group}}={name}" for name, used in self.uses.items() if key in used)
            raise PydanticCustomError("unused", f"makes no use of {key}: leave it out, or write {others}")
        return self


class Logger(Chosen):
    uses = {"wandb": ("project", "entity", "alerts", "patience")}

    name: one_of(*choices("logger"))
    project: str = None
    entity: str | None = None
    alerts: none_twice(one_of(*Verdict, "crash")) = None
    patience: Positive = None

    @model_validator(mode="after")
    def _refuse_none(self) -> Logger:
        if self.name == "wandb" and self.project is None:
            raise PydanticCustomError("must", "names no project: write logger=wandb, or +logger.project=NAME")
        return self


class ScaleName(Group):
    name: one_of(*(c for c in choices("scale") if c != "auto"))
    why: str = None


class Shared(Group):
    """What means something to every kind of experiment.

    ``idle``: which of its settings change nothing, and where (``Idle`` and ``TakenAs``).
    """

    idle: ClassVar[tuple[Idle | TakenAs, ...]] = ()

    scale: ScaleName
    name: Name
    label: Label | None
    kind: str
    hypothesis: str
    question: str
    source: str
    caveat: str
    expected: one_of(*Verdict) | None
    seed: Any  # suite.command.seeds
    device: one_of("cpu", "cuda")
    threads: Threads
    workers: Workers
    tf32: bool
    logger: Logger
    results: Folder
    rerun: bool
    reprobe: bool
    fail_on: none_twice(one_of(*Verdict))


class Scale(ScaleName, extra="allow"):  # sizes of an experiment may name settings of its own
    width: whole(1)
    batch_size: whole(1)
    steps: whole(1)
    float64_steps: auto_or(1)
    least_float64_steps: whole(1) = None
    eval_every: whole(0)
    eval_images: whole(1) | None


class Rewrite(Group):
    target: Function | None
    options: dict[str, Any] | None = None


class Data(Chosen):
    uses = {"folder": ("root",), **dict.fromkeys(("auto", "cifar10"), ("root", "time_limit"))}

    target: None = Field(None, alias="_target_")  # anybody's own is held to WithOwnData
    name: one_of(*choices("data"))
    root: Folder | None = None
    time_limit: Positive | None = None


class Model(Group, extra="allow"):  # the rest is held to the signature of the target, here and below
    target: Function = Field(alias="_target_")


class WithOwnData(Group, extra="ignore"):
    """Of settings with a data set of one's own: what that is named by."""

    data: Model


class Optimizer(Model):
    partial: Literal[True] = Field(alias="_partial_")
    lr: Positive = None
    momentum: Share = None
    dampening: Share = None
    betas: list[Share] = None
    eps: Positive = None
    weight_decay: NotNegative = None


class Scheduler(Group, extra="allow"):
    target: Function | None = Field(alias="_target_")

    @model_validator(mode="after")
    def _refuse_arguments_of_none(self) -> Scheduler:
        if self.target is None and self.model_extra:
            own = min(self.model_extra)
            raise PydanticCustomError("must", f"has {own} and no scheduler: write scheduler._target_=CLASS")
        return self


class LocalWindows(Group):
    windows: Literal["auto"] | list[whole(0)]
    updates: whole(1)
    share: InnerShare

    @model_validator(mode="after")
    def _refuse_overlap(self) -> LocalWindows:
        if self.windows != "auto" and any(b - a <= self.updates for a, b in pairwise(self.windows)):
            raise PydanticCustomError("must", f"must rise by more than local.updates={self.updates}")
        return self


# what a single training has that is watched, stopped and gone on with: the kind "training" alone
WATCHED = ("subject", "local", "eval_every", "checkpoint_every", "keep_checkpoint")
WATCHED += ("float64_share", "stop_on_bug")


class Training(Shared):
    """What a training has beside them. ``unread``: settings of it, or groups, that a kind has no use for."""

    unread: ClassVar[tuple[str, ...]] = ()

    scale: Scale
    seeds: group(**dict.fromkeys(("init", "order", "augmentation", "nudge"), Seed | None))
    model: Model
    data: Data
    optimizer: Optimizer
    rewrite: Rewrite
    roles: each_once(one_of(*ROLES))
    subject: one_of(*ROLES)
    dtypes: each_once(one_of(*TRAINED_IN))
    steps: whole(1)
    float64_steps: auto_or(1)
    float64_share: InnerShare
    fast_float64: bool
    batch_size: whole(1)
    augment: bool
    eval_every: whole(0)
    eval_images: whole(1) | None
    loss: Model
    learning_rate_schedule: one_of("constant", "cosine", "warmup_cosine", "onecycle")
    warmup: Share | None
    scheduler: Scheduler
    clip: Positive | None
    log_schedule: group(dense=whole(1), per_decade=whole(0))
    local: LocalWindows
    probe_images: whole(1)
    checkpoint_every: auto_or(0)
    keep_checkpoint: bool
    stop_on_bug: bool
