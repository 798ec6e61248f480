"""One pair on one batch: what the probes share of it, and asking them in their order."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

from driftlab.arithmetic.comparison import Comparison, compare
from driftlab.arithmetic.local import Local, local_calls
from driftlab.arithmetic.passes import CannotRunError, Recorded, on_batch, run
from driftlab.arithmetic.quantities import read_both
from driftlab.blame import is_ours
from driftlab.network.compiled import compiling, eager
from driftlab.network.pair import Pair
from driftlab.network.start import Start, start_differences
from driftlab.probes.probe import Probe
from driftlab.tracing.shared_rows import BothRows
from driftlab.words import SAME_START, UPDATE, Finding, Verdict, standing


@dataclass
class Examination:
    """One pair on one batch, and what was found so far.

    Attributes:
        findings: in the order in which they were asked.
        comparable: whether runs of the two can be compared step by step (they draw the same random numbers).
        trains: whether the two are to be trained; if not, a parameter may be gone into another one.
        narrow_constants: whether one of the two stores constants in float32, so that its float64 is none.
        compiled: the roles of the networks in which ``torch.compile`` has a part.
        rows: of the values of each, those that the other has, once they were found to differ in that.
    """

    pair: Pair
    batch: tuple[object, object]
    findings: list[Finding] = field(default_factory=list)
    comparable: bool = True
    narrow_constants: bool = False
    trains: bool = True
    compiled: list[str] = field(default_factory=list)
    rows: BothRows = (None, None)

    @cached_property
    def whole(self) -> Recorded:
        return on_batch(self.pair, self.batch)

    @cached_property
    def network(self) -> Comparison:
        """The two networks on the batch."""
        p = self.pair
        options = {"seed": p.seed, "judged": p.judged, "outputs": p.outputs}
        return compare(p.reference, p.candidate, self.whole, p.comparable, **options)

    @cached_property
    def local(self) -> Local:
        """Every pair of modules on what the reference's was given."""
        return local_calls(self.pair, self.batch)

    @cached_property
    def start(self) -> list[Start]:
        """What differs before any training."""
        return start_differences(self.pair.reference, self.pair.candidate, self.pair.fold)

    def read(self, arithmetic: str, evaluate: bool) -> tuple[dict, dict]:
        """What the two give, by the reference's names."""
        pair = self.pair
        options = {"seed": pair.seed, "evaluate": evaluate, "outputs": pair.outputs}
        return read_both((pair.reference, pair.candidate), self.whole, arithmetic, pair.comparable, **options)

    @property
    def float64(self) -> bool:
        """Whether the candidate's float64 is float64: it runs, and keeps the bits."""
        narrow = self.network.float64_not_honoured or self.narrow_constants or self._narrow_state
        return "float64" not in self.network.failed and not narrow

    @property
    def exact_arithmetic(self) -> str | None:
        """One in which rounding is gone from both networks."""
        return "shadow" if "shadow" in self.network.ran else "float64" if self.float64 else None

    @property
    def _narrow_state(self) -> bool:
        """Whether the candidate keeps weights, or its optimizer's state, in fewer bits."""
        said = (f.evidence for f in self.findings if f.evidence.probe in (SAME_START, UPDATE))
        return any(evidence.supports is Verdict.REDUCED_PRECISION for evidence in said)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those in which the reference runs."""
        if "float64" in self.network.failed:
            forward = replace(self.whole, loss=None)  # one that does not take float64 is the caller's to mend
            try:
                run(self.pair.reference, forward, "float64", self.pair.seed, evaluate=False)
            except CannotRunError:
                return ("float32",)
        return ("float64", "float32")

    @property
    def compared_modules(self) -> bool:
        """Whether modules were compared one by one, so that ``local`` costs nothing more."""
        return "local" in vars(self)

    @property
    def wrong(self) -> bool:
        """Whether the two networks differ by more than rounding."""
        return bool(self.network.wrong())

    def supports(self, verdict: Verdict) -> bool:
        return any(f.evidence.supports is verdict for f in standing(self.findings))


def examine(found: Examination, probes: Iterable[Probe]) -> Iterable[Finding]:
    """Ask ``probes`` in their order and keep what they find; each new finding is yielded as it comes.

    A probe that fails costs its own answer, which is said; the others go on. A network that does not repeat
    itself ends the examination.

    Raises:
        CannotRunError: one of the two does not run on the batch at all.
    """
    with compiling(reset=lambda: bool(found.compiled)):
        for probe in probes:
            with nullcontext() if probe.as_compiled else eager():
                new = [f.naming(found.pair.counterparts) for f in _asked(probe, found)]
            found.findings += new
            yield from new
            if found.supports(Verdict.NONDETERMINISTIC) and not found.supports(Verdict.BUG):
                return


def _asked(probe: Probe, found: Examination) -> list[Finding]:
    try:
        return list(probe.ask(found))
    except CannotRunError:
        raise
    except Exception as error:
        return [probe.failed(error) if is_ours(error) else probe.refused(error)]
