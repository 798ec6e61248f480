"""All probes that need no training, in their order, and what each found."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

from driftlab.probes.arithmetic import CannotRunError, Recorded
from driftlab.probes.comparison import Comparison, compare
from driftlab.probes.locating import Local
from driftlab.probes.same_start import Start, start_differences
from driftlab.shadow import eager
from driftlab.subject import Subject
from driftlab.verdict import Evidence, Finding, Place, Verdict


@dataclass
class Examination:
    """One pair on one batch, and what was found so far.

    Attributes:
        findings: in the order in which they were asked.
        comparable: whether runs of the two can be compared step by step (they draw the same random numbers).
        trains: whether the two are to be trained; if not, a parameter may be gone into another one.
        narrow_constants: whether one of the two stores constants in float32, so that its float64 is none.
    """

    subject: Subject
    batch: tuple[object, object]
    findings: list[Finding] = field(default_factory=list)
    comparable: bool = True
    narrow_constants: bool = False
    trains: bool = True

    @cached_property
    def whole(self) -> Recorded:
        return self.subject.on(self.batch)

    @cached_property
    def network(self) -> Comparison:
        """The two networks on the batch."""
        s = self.subject
        return compare(s.reference, s.candidate, self.whole, s.comparable, seed=s.seed)

    @cached_property
    def local(self) -> Local:
        return self.subject.local(self.batch)

    @cached_property
    def start(self) -> list[Start]:
        """What differs before any training."""
        s = self.subject
        return start_differences(s.reference, s.candidate, s.fold)

    @property
    def float64(self) -> bool:
        """Whether the candidate's float64 is float64: it runs, and keeps the bits."""
        narrow = self.network.float64_not_honoured or self.narrow_constants
        narrow = narrow or any(
            f.evidence.probe in ("update", "same_start") and f.evidence.supports is Verdict.REDUCED_PRECISION
            for f in self.findings
        )
        return "float64" not in self.network.failed and not narrow

    @property
    def compared_modules(self) -> bool:
        """Whether modules were compared one by one, so that ``local`` costs nothing more."""
        return "local" in vars(self)

    def add(self, evidence: Evidence, place: Place | None = None) -> None:
        self.findings.append(Finding(evidence, place))

    def supports(self, verdict: Verdict) -> bool:
        return any(f.evidence.supports is verdict for f in self.findings)


def examined(subject: Subject, batch: tuple[object, object]) -> Examination:
    """Every probe on one batch.

    Raises:
        CannotRunError: one of the two does not run on the batch at all.
    """
    from driftlab.findings.bound import ask_bound
    from driftlab.findings.determinism import ask_determinism
    from driftlab.findings.fewer import ask_fewer_samples
    from driftlab.findings.function import ask_function
    from driftlab.findings.precision import ask_precision
    from driftlab.findings.rewritten import ask_rewritten_modules
    from driftlab.findings.start import ask_same_start
    from driftlab.findings.update import ask_update

    found = Examination(subject, batch)
    for ask in (
        ask_determinism,
        ask_function,
        ask_fewer_samples,
        ask_same_start,
        ask_rewritten_modules,
        ask_bound,
        ask_precision,
        ask_update,
    ):
        try:
            # compiled code is run on the first batch, in float32; each further size and dtype would compile
            # anew
            with nullcontext() if ask in (ask_determinism, ask_function) else eager():
                ask(found)
        except CannotRunError:
            raise
        except Exception as error:  # one question less, and said; the others, and the window, go on
            name = ask.__name__.removeprefix("ask_")
            message = " ".join(str(error).split())[:150]
            found.add(Evidence(name, "", None, None, None, f"not asked: {type(error).__name__}: {message}"))
        if found.supports(Verdict.NONDETERMINISTIC) and not found.supports(Verdict.BUG):
            break
    return found
