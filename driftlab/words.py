"""The words that driftlab answers with, and what carries them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from driftlab.blame import AboutThePair


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number} {noun}{'s' * (number != 1)}"


class DiagnoseError(AboutThePair, ValueError):
    """What was asked cannot be diagnosed; the message is one line: what, where, what to write instead."""


class Verdict(StrEnum):
    """What came out. The values are a contract: they stand in ``verdict.json`` and in ``fail_on``."""

    BIT_IDENTICAL = "bit_identical"
    ROUND_OFF = "round_off"
    REDUCED_PRECISION = "reduced_precision"
    UNSTABLE = "unstable"
    BUG = "bug"
    NONDETERMINISTIC = "nondeterministic"
    INCONCLUSIVE = "inconclusive"


class Status(StrEnum):
    """What became of a question; the values stand in ``verdict.json``."""

    ANSWERED = "answered"
    NOT_APPLICABLE = "not_applicable"  # it does not arise for this pair
    REFUSED = "refused"  # the pair's own code raised: it could not be asked of this pair
    FAILED = "failed"  # driftlab's own code raised: whatever needed the answer is open


# Probes that others than themselves know by name.
FUNCTION, PRECISION, FEWER_SAMPLES, EXCESS = "function", "precision", "fewer_samples", "excess"
PROCESS_SETTINGS, AS_COMPILED, SAME_START, UPDATE = "process_settings", "as_compiled", "same_start", "update"


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
        status: whether it was answered at all.
        details: what somebody who looks for the fault wants to know besides, a line each: how many elements
            are wrong and which most, what the difference looks like.
        unit: of ``measured`` and ``threshold``, in words; "" where nobody said.
        reason: why the threshold stands where it does.
    """

    probe: str
    question: str
    measured: float | None
    threshold: float | None
    supports: Verdict | None
    reading: str
    status: Status = Status.ANSWERED
    details: str = ""
    unit: str = ""
    reason: str = ""

    @property
    def text(self) -> str:
        """The reading, and the details on lines of their own."""
        return f"{self.reading}\n{self.details}" if self.details else self.reading

    def as_dict(self) -> dict[str, Any]:
        said = ("details", "unit", "reason")
        return {name: value for name, value in asdict(self).items() if value or name not in said}


class ToldBy(StrEnum):
    """What tells a place, from the surest on.

    ``results/published/held_back`` counts how often each is right.
    """

    CHANGE = "one change"
    VALUE = "one value"
    CALLS = "its calls"
    FLOW = "the flow of values"

    @property
    def says(self) -> str:
        return _TOLD_BY[self]


_TOLD_BY = {
    ToldBy.CHANGE: "told by one change: made there in the reference, it gives the candidate's results",
    ToldBy.VALUE: "told by one value: the candidate's, put in the reference's place there, gives its results",
    ToldBy.CALLS: "told by its calls: given the same, the two modules differ by themselves",
    ToldBy.FLOW: "told by the flow of values alone, which part there first: look around it as well",
}


@dataclass(frozen=True)
class Place:
    """Where a difference arises: a module by its name ("" the network, None unknown), a pass, the first step.

    ``module`` is the reference's, ``candidate_module`` that of the candidate which stands for it, None where
    none is known. ``told_by`` is None where none of its kinds told it. ``place.pass_`` is ``place["pass"]``
    too, as ``verdict.json`` spells it.
    """

    module: str | None
    pass_: str
    step: int
    candidate_module: str | None = None
    told_by: ToldBy | None = None

    def as_dict(self) -> dict[str, str | int | None]:
        found = {"module": self.module, "pass": self.pass_, "step": self.step}
        found["candidate_module"] = self.candidate_module
        return found | ({"told_by": str(self.told_by)} if self.told_by else {})

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Place:
        """Raises KeyError where it is not what ``as_dict`` wrote, now or before it named the candidate's."""
        told_by = stored.get("told_by")
        known = stored["module"], stored["pass"], stored["step"], stored.get("candidate_module")
        return cls(*known, told_by and ToldBy(told_by))

    @property
    def named(self) -> str:
        """The module, with the candidate's name for it where that is another; "" the network, or unknown."""
        other = self.candidate_module
        if other is None or other == self.module:
            return self.module or ""
        return f"{self.module or 'the network itself'} (the candidate's {other or 'network itself'})"

    def __getitem__(self, key: str) -> str | int | None:
        return self.as_dict()[key]

    def __str__(self) -> str:
        where = self.named or ("the network itself" if self.module == "" else "")
        return f"the {self.pass_}{where and f' of {where}'}, since step {self.step}"

    def taken_out_of(self, text: str) -> str:
        """With ``{place}`` where a text names it: what is "since step 1" is not "since step 12"."""
        return re.sub(rf"{re.escape(str(self))}\b", "{place}", text)


# What a stored finding of before findings said so themselves stands for.
_OFF_THE_PATH = (FEWER_SAMPLES, "rewritten_modules", UPDATE)


@dataclass(frozen=True)
class Finding:
    """A piece of evidence, the place that it points at, where it does, and what it means for the verdict.

    Attributes:
        says: the evidence's reading with ``{place}`` where the place stands in it.
        off_path: the probe fed modules, or optimizers, what this training may come to later or never.
        decides: no acquittal rests without an answer to this question.
        supersedes: the probes whose earlier findings this one takes the place of.
    """

    evidence: Evidence
    place: Place | None = None
    says: str = ""
    off_path: bool = False
    decides: bool = False
    supersedes: tuple[str, ...] = ()

    def at_step(self, step: int) -> Finding:
        """The same, with the step from which it shows, in its place and in its sentence."""
        return self if self.place is None else self._at(replace(self.place, step=step))

    def adding(self, text: str) -> Finding:
        """The same, with more to its sentence."""
        reading = replace(self.evidence, reading=self.evidence.reading + text)
        return replace(self, evidence=reading, says=self.says and self.says + text)

    def naming(self, counterparts: Mapping[str, str]) -> Finding:
        """The same, with the candidate's name of its place, where it has none yet and one is known."""
        place = self.place
        if place is None or place.candidate_module is not None or place.module is None:
            return self
        other = counterparts.get(place.module)
        return self if other is None else self._at(replace(place, candidate_module=other))

    def _at(self, place: Place) -> Finding:
        reading = self.says.replace("{place}", str(place)) if self.says else self.evidence.reading
        return replace(self, evidence=replace(self.evidence, reading=reading), place=place)

    def as_dict(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("evidence", "place")}
        place = self.place.as_dict() if self.place else None
        return self.evidence.as_dict() | {"place": place} | own | {"supersedes": list(self.supersedes)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Finding:
        """Raises KeyError, TypeError or ValueError where it is not what ``as_dict`` wrote."""
        values = dict(stored)
        place, supports = values.pop("place"), values["supports"]
        own = {f.name: values.pop(f.name) for f in fields(cls) if f.name in values}
        values["supports"] = Verdict(supports) if supports else None
        values["status"] = Status(values.get("status", Status.ANSWERED))
        found = cls(Evidence(**values), Place.from_dict(place) if place else None)
        said, at = found.evidence.reading, found.place
        own.setdefault("says", at.taken_out_of(said) if at else said)
        own.setdefault("off_path", found.evidence.probe in _OFF_THE_PATH)
        return replace(found, **own | {"supersedes": tuple(own.get("supersedes", ()))})


def standing(findings: Iterable[Finding]) -> list[Finding]:
    """The findings less those that a later one took the place of."""
    found: list[Finding] = []
    for finding in findings:
        found = [*(f for f in found if f.evidence.probe not in finding.supersedes), finding]
    return found


def settled_by(findings: Iterable[Finding]) -> tuple[Verdict, Finding] | None:
    """What probes alone decide: another function, then a network that does not repeat itself."""
    left, decide = standing(findings), (Verdict.BUG, Verdict.NONDETERMINISTIC)
    return next(((verdict, f) for verdict in decide for f in left if f.evidence.supports is verdict), None)


@dataclass(frozen=True)
class Excess:
    """The first row at which a pair leaves its controls by more than ``HALFWAY``.

    Attributes:
        moved: whether the weights left theirs at that row in one leap: the update before it is at fault.
        carried: whether something that training carries on was further apart than in any control by then, so
            that rounding may have come to that row from there.
    """

    seed: int
    step: int
    kind: str
    measured: float
    allowed: float
    moved: bool = False
    carried: bool = True

    def since(self, pass_: str) -> int:
        """The step at fault: weights that differ at a row were parted by the update before it."""
        return max(0, self.step - 1) if pass_ == "update" else self.step


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reasons."""

    verdict: Verdict
    headline: str
    evidence: list[Evidence]
    where: Place | None = None
    outcomes: dict[str, Any] = field(default_factory=dict)

    def begun_at(self, step: int) -> Judgement:
        """The same of steps that are counted from ``step`` on, in its place and its sentences."""

        def later(text: str) -> str:
            return re.sub(r"\b(step|update) (\d+)\b", lambda m: f"{m[1]} {int(m[2]) + step}", text)

        where = self.where and replace(self.where, step=self.where.step + step)
        evidence = [replace(e, reading=later(e.reading)) for e in self.evidence]
        return replace(self, headline=later(self.headline), evidence=evidence, where=where)

    def as_dict(self) -> dict[str, Any]:
        """As ``verdict.json`` has it."""
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "where": self.where.as_dict() if self.where else None,
            "evidence": [e.as_dict() for e in self.evidence],
            "outcomes": self.outcomes,
        }
