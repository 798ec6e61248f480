"""What a probe is: one question, declared once, and the findings that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from driftlab.blame import described
from driftlab.words import Evidence, Finding, Place, Status, Verdict

if TYPE_CHECKING:
    from driftlab.probes.examination import Examination


@dataclass(frozen=True)
class Probe:
    """A question that is put to a pair; ``PROBE`` of a file in this folder is found by itself.

    Attributes:
        name: as it stands in the evidence.
        question: in one sentence; ``{role}`` and the like are filled in by ``finding``.
        threshold: the number at which the answer turns, where there is one number.
        reason: why the threshold stands there.
        unit: of what is measured and of the threshold, in words: "bits", "times the control's".
        sees, misses: what it can and cannot see, for the documentation.
        order: its rank among the probes.
        ask: what it asks of an examination before any update; None for one that is asked elsewhere.
        decides: whether no acquittal rests without its answer.
        off_path: whether it feeds modules, or optimizers, what this training may come to later or never. Of
            the code more than of the weights: an experiment asks it of one seed.
        asserted: whether ``assert_equivalent`` asks it.
        as_compiled: whether compiled code runs compiled in it; each further size would compile anew.
    """

    name: str
    question: str
    threshold: float | None = None
    reason: str = ""
    unit: str = ""
    sees: str = ""
    misses: str = ""
    order: int = 0
    ask: Callable[[Examination], Iterable[Finding]] | None = None
    decides: bool = True
    off_path: bool = False
    asserted: bool = False
    as_compiled: bool = False

    def finding(
        self,
        measured: float | None,
        supports: Verdict | None,
        says: str,
        place: Place | None = None,
        *,
        threshold: float | None = None,
        supersedes: tuple[str, ...] = (),
        status: Status = Status.ANSWERED,
        unit: str | None = None,
        **names: str,
    ) -> Finding:
        """An answer.

        Args:
            measured: in ``unit``, held against ``threshold``; the probe's own where None.
            says: the reading; ``{place}`` in it stands for the place.
            names: what the question leaves open.
        """
        threshold = self.threshold if threshold is None else threshold
        # of another threshold than its own the probe has not said why it stands there
        reason = self.reason if self.threshold in (None, threshold) else ""
        said = {"unit": self.unit if unit is None else unit, "reason": reason}
        reading = says.replace("{place}", str(place)) if place else says
        question = self.question.format(**names) if names else self.question
        evidence = Evidence(self.name, question, measured, threshold, supports, reading, status, **said)
        return Finding(evidence, place, says, self.off_path, self.decides, supersedes)

    def evidence(
        self, measured: float | None, supports: Verdict | None, says: str, **options: object
    ) -> Evidence:
        """An answer that points at no place. ``options`` as of ``finding``."""
        return self.finding(measured, supports, says, **options).evidence

    def not_applicable(self, reason: str, **names: str) -> Finding:
        """The question does not arise for this pair."""
        return self.finding(None, None, reason, status=Status.NOT_APPLICABLE, **names)

    def refused(self, error: BaseException) -> Finding:
        """The pair's own code raised, so that it could not be asked."""
        return self.finding(None, None, f"not asked: {described(error)}", status=Status.REFUSED)

    def failed(self, error: BaseException) -> Finding:
        """driftlab's own code raised: no verdict that needs the answer stands."""
        says = f"failed in driftlab's own code, please report it: {described(error)}"
        return self.finding(None, None, says, status=Status.FAILED)

    def again(self, finding: Finding) -> Finding:
        """A finding of another probe, as this one's: the same question, asked of something else."""
        evidence = replace(finding.evidence, probe=self.name, question=self.question)
        return replace(finding, evidence=evidence, off_path=self.off_path, decides=self.decides)
