"""The words that driftlab answers with, and what carries them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum


class Verdict(StrEnum):
    """What came out. The values are a contract: they stand in ``verdict.json`` and in ``fail_on``."""

    BIT_IDENTICAL = "bit_identical"
    ROUND_OFF = "round_off"
    REDUCED_PRECISION = "reduced_precision"
    UNSTABLE = "unstable"
    BUG = "bug"
    NONDETERMINISTIC = "nondeterministic"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Evidence:
    """One question put to the record.

    Attributes:
        probe: which check it is, a fixed name.
        question: what was asked, as a sentence.
        measured: the number that answers it, None where it could not be measured.
        threshold: the number at which the answer turns.
        supports: the verdict that it speaks for, or None where it is silent.
        reading: what it means, as a sentence with its numbers.
    """

    probe: str
    question: str
    measured: float | None
    threshold: float | None
    supports: Verdict | None
    reading: str

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Place:
    """Where a difference arises: a module by its name ("" the network, None unknown), a pass, the first step.

    ``place.pass_`` is ``place["pass"]`` too, as ``verdict.json`` spells it.
    """

    module: str | None
    pass_: str
    step: int

    def as_dict(self) -> dict:
        return {"module": self.module, "pass": self.pass_, "step": self.step}

    def __getitem__(self, key: str) -> str | int | None:
        return self.as_dict()[key]

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else " of the network itself" if self.module == "" else ""
        return f"the {self.pass_}{where}, since step {self.step}"


@dataclass(frozen=True)
class Finding:
    """A piece of evidence, and the place that it points at, where it does."""

    evidence: Evidence
    place: Place | None = None

    def at_step(self, step: int) -> Finding:
        """The same, with the step from which it shows, in its place and in its sentence."""
        if self.place is None:
            return self
        reading = self.evidence.reading.replace(f"since step {self.place.step}", f"since step {step}")
        return Finding(replace(self.evidence, reading=reading), replace(self.place, step=step))

    def as_dict(self) -> dict:
        return self.evidence.as_dict() | {"place": self.place.as_dict() if self.place else None}

    @classmethod
    def from_dict(cls, stored: dict) -> Finding:
        place, supports = stored["place"], stored["supports"]
        values = {k: v for k, v in stored.items() if k != "place"}
        evidence = Evidence(**values | {"supports": Verdict(supports) if supports else None})
        return cls(evidence, Place(place["module"], place["pass"], place["step"]) if place else None)


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reasons."""

    verdict: Verdict
    headline: str
    evidence: list[Evidence]
    where: Place | None = None
    outcomes: dict = field(default_factory=dict)
