"""What rules of thumb, driftlab's curves and its verdict say of a training after so many updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bench.habits import LOSS_TOLERANCE, PRINTED_DECIMALS, Rule, printed_alike, within
from driftlab.along import all_stay, leaves_its_controls, times_the_controls
from driftlab.inquiry import Examined
from driftlab.probes.local_windows import PROBE as LOCAL_WINDOWS
from driftlab.record.local_windows import growth, windows_of
from driftlab.record.seed_record import Row, SeedRecord
from driftlab.verdict.envelope import window_pair
from driftlab.verdict.outcomes import tail_of
from driftlab.verdict.rules import judge
from driftlab.words import EXCESS, Verdict
from suite.reading.judging import Judged

WORDS = {
    "gradient": "fault: a conv's weight gradient 0.1 % too large",
    "schedule": "fault: a conv's rate one update late",
}
CONTROLS = ("control.float64", "control.float32")
# What looks at the end of a training; had it ended before, that would have been another.
AT_THE_END = ("function_later", "last_step")
_SAYS = {Verdict.ROUND_OFF: True, Verdict.BIT_IDENTICAL: True, Verdict.BUG: False}

Losses = dict[int, float]


@dataclass(frozen=True)
class Network:
    """A candidate in all of its seeds.

    Attributes:
        begins: the step from which on it computes something else; None where it never does.
    """

    words: str
    begins: int | None
    records: Sequence[SeedRecord]

    def same(self, step: int) -> bool:
        """Whether after so many updates it is the reference's training but for rounding."""
        return self.begins is None or self.begins >= step


def network(run: Judged) -> Network:
    """Of a finished run of the experiment ``long_run``."""
    options = run.settings.rewrite.options
    if not run.settings.rewrite.target.endswith("late_fault"):
        return Network("right rewrite: convs split", None, run.records)
    begins = int(options.at)
    return Network(f"{WORDS[options.sort]} from step {begins} on", begins, run.records)


# Numbers along the run, seed by seed: growth and excess in its windows, distances step by step.


def grown(network: Network, arm: str) -> dict[int, list[float]]:
    """Window -> by how much the distance of an arm grows an update, seed by seed."""
    return _by_window(network, lambda rows: growth(rows, f"weight_distance/{arm}"))


def times(network: Network) -> dict[int, list[float]]:
    return _by_window(network, lambda rows: times_the_controls(rows, Examined([])))


def _by_window(network: Network, of: Callable[[list], float | None]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in network.records:
        for begins, rows in windows_of(record.local).items():
            found.setdefault(begins, [])
            if (value := of(rows)) is not None:
                found[begins].append(value)
    return {begins: found[begins] for begins in sorted(found)}


def distances(network: Network, arm: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in network.records:
        for step, value in record.series("weight_distance", arm).items():
            if step and value > 0:
                found.setdefault(step, []).append(value)
    return {step: found[step] for step in sorted(found)}


def until(record: SeedRecord, step: int) -> SeedRecord:
    """The record had the training ended there: less what came later, and less the look at its end."""

    def rows(found: Iterable[Row]) -> list[Row]:
        return [row for row in found if row["step"] <= step]

    ended = [w for w in windows_of(record.local).values() if w[-1]["step"] <= step]
    local = [row for window in ended for row in window]
    found = SeedRecord(record.seed, rows(record.curves), rows(record.evaluations), record.run, local=local)
    kept = [f for f in record.found() if f.evidence.probe not in (*AT_THE_END, LOCAL_WINDOWS.name)]
    if window_pair([found], "candidate")[1] is None:
        kept = [f for f in kept if f.evidence.probe != EXCESS]
    if ended:
        later = next(f for f in record.found() if f.evidence.probe == LOCAL_WINDOWS.name)
        kept.append(later if any(map(is_bad, ended)) else all_stay(local, Examined([])))
    return replace(found, run=record.run | {"probes": [finding.as_dict() for finding in kept]})


def is_bad(window: Sequence[Row]) -> bool:
    return leaves_its_controls(window, Examined([]))


def _losses(take: Callable[[Losses, int], float | None], dtype: str, record: SeedRecord, step: int) -> list:
    roles = ("candidate", "reference")
    found = [take(record.series("loss", f"{role}.{dtype}"), step) for role in roles]
    return [] if None in found else found


def _tail(losses: Losses, step: int) -> float | None:
    found = [loss for s, loss in losses.items() if step - tail_of(step) < s <= step]
    return fmean(found) if len(found) == tail_of(step) else None


def _within_one_percent(take: Callable[[Losses, int], float | None]) -> Callable[..., bool | None]:
    def same(record: SeedRecord, step: int) -> bool | None:
        losses = _losses(take, "float32", record, step)
        return within(losses[0] / losses[1] - 1, LOSS_TOLERANCE) if losses else None

    return same


def _accuracy(record: SeedRecord, step: int) -> bool | None:
    roles = ("candidate", "reference")
    found = [record.series("test_accuracy", f"{r}.float32", table="evaluations").get(step) for r in roles]
    return None if None in found else within(found[0] - found[1], 0.01)


def _rerun(record: SeedRecord, step: int) -> bool | None:
    losses = _losses(dict.get, "float64", record, step)
    return printed_alike(losses) if losses else None


def free_pair_stays(record: SeedRecord, step: int) -> bool:
    """Whether the free-running float64 pair is still within what its controls show."""
    return window_pair([until(record, step)], "candidate")[1] is None


def _windows_stay(record: SeedRecord, step: int) -> bool | None:
    windows = windows_of(until(record, step).local).values()
    return not any(map(is_bad, windows)) if windows else None


def _verdict(record: SeedRecord, step: int) -> bool | None:
    return _SAYS.get(judge([until(record, step)]).verdict)


DRIFTLAB = Rule("driftlab", "driftlab's verdict", _verdict)
RULES = (
    Rule("loss", "training loss within 1 %", _within_one_percent(dict.get)),
    Rule("tail", "mean loss of the last tenth of steps within 1 %", _within_one_percent(_tail)),
    Rule("accuracy", "test accuracy within 1 point", _accuracy),
    Rule("double", f"rerun in float64: loss equal to {PRINTED_DECIMALS} decimals", _rerun),
    Rule("pair", "free-running float64 pair beside its control", free_pair_stays),
    Rule("local", "local windows along the run", _windows_stay),
    DRIFTLAB,
)
