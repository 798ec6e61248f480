"""What a kind of experiment has to give so that ``asking.ask`` can carry it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import Answer
from driftlab.verdict.rules import judge
from driftlab.words import Judgement


@dataclass(frozen=True)
class Measured:
    """What one seed gave.

    Attributes:
        record: the pair in question, as ``driftlab.diagnosis.diagnosed`` leaves it: curves and probes.
        values: everything else that the answer needs, as JSON can hold it.
    """

    record: SeedRecord
    values: dict


@dataclass(frozen=True)
class Question:
    """A kind of experiment that trains little or nothing: it measures, seed by seed, and answers.

    Attributes:
        measure: ``measure(settings, seed)``; everything random follows the seed.
        answer: ``answer(settings, values by seed)``, at least one seed.
        about: what is measured, in the plan that is shown before: a few words.
        check: ``check(settings, seed)`` builds what a seed needs; what it refuses leaves no folder.
        judge: how the records of all seeds become the verdict.
        version: of what is measured, part of the digest; to be raised when the same settings come to measure
            something else.

    A kind whose ``Settings`` are those of a ``Training`` is given the images of the data set,
    ``measure(settings, seed, images)`` and ``check(settings, seed, images)``.
    """

    measure: Callable[..., Measured]
    answer: Callable[[DictConfig, Mapping[int, dict]], Answer]
    about: Callable[[DictConfig], str]
    check: Callable[..., object] = lambda *_: None
    judge: Callable[[Sequence[SeedRecord]], Judgement] = judge
    version: int = 1
