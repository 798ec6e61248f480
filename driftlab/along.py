"""What local windows along a training say: which leaves its controls, and what a look on the spot finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from driftlab.diagnosis import Diagnosis, diagnosed
from driftlab.inquiry import Examined
from driftlab.lockstep.local import local_rows
from driftlab.lockstep.window import Batch
from driftlab.network.pair import Pair
from driftlab.probes.local_windows import PROBE
from driftlab.record.local_windows import as_record, windows_of
from driftlab.record.seed_record import Row, SeedRecord
from driftlab.verdict.envelope import first_excess, honoured, pair_with_controls, window_pair
from driftlab.verdict.evidence import same_bits
from driftlab.verdict.in_16_bits import asked_in_16_bits
from driftlab.verdict.outcomes import part_of_a_training
from driftlab.verdict.rules import judge
from driftlab.words import DiagnoseError, Finding, Verdict, counted

# What the look may find that is more than rounding carried on: it stands as it is.
_SETTLED = (Verdict.BUG, Verdict.NONDETERMINISTIC, Verdict.REDUCED_PRECISION)
_SAME_FUNCTION = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL, Verdict.UNSTABLE)


def times_the_controls(rows: Sequence[Row], found: Examined) -> float | None:
    """The most by which a window's pair is further apart than its controls; None where there is none."""
    return window_pair([_record(rows, found)], "candidate")[0].measured


def leaves_its_controls(rows: Sequence[Row], found: Examined) -> bool:
    """Whether a window shows more than rounding, in training, in eval mode or in its buffers.

    In float32, and in 16 bits where the pair trains in them, too: of a fault that float64 does not have (a
    sum in few bits, an overflow) nothing else tells.
    """
    window = [_record(rows, found)]
    if first_excess(window, found.narrow) is not None:
        return True
    if found.narrow:
        return False
    in_16_bits = any(where for _, where in asked_in_16_bits(window, "candidate"))
    return in_16_bits or pair_with_controls(window, "candidate", "float32")[1] is not None


def _record(rows: Sequence[Row], found: Examined) -> SeedRecord:
    return honoured(as_record(rows, 0, {"float64": found.float64}))


def look_on_the_spot(
    pair: Pair, batches: Sequence[Batch], begins: int, rows: Sequence[Row], found: Examined
) -> Finding:
    """All of ``diagnose`` about a pair as ``local.pair_at`` makes it, whose window left its controls.

    Args:
        batches: of the steps from ``begins`` on, one more than updates.
    """
    times = times_the_controls(rows, found)
    try:
        found_there = part_of_a_training(diagnosed(pair.as_held(), batches, len(batches) - 1))
        judgement = judge([found_there]).begun_at(begins)
    except DiagnoseError as error:
        return PROBE.finding(
            times, None, f"the window from step {begins} leaves them, and cannot be looked at: {error}"
        )
    said = judgement.headline.removesuffix(" (1 seed)")
    if judgement.verdict in _SETTLED:
        where = judgement.where
        says = where.taken_out_of(said.removeprefix("not the same function: ")) if where else said
        return PROBE.finding(times, judgement.verdict, says, where)
    if judgement.verdict in _SAME_FUNCTION:
        says = f"the window from step {begins} leaves them; looked at on the spot: {said}"
        return PROBE.finding(0.0, Verdict.ROUND_OFF, says)
    return PROBE.finding(times, None, f"the window from step {begins} leaves them, and why is open: {said}")


def look_briefly(pair: Pair, batches: Sequence[Batch], begins: int) -> Diagnosis | None:
    """A window alone, of a pair whose code was examined before; None where it leaves its controls."""
    rows, found = local_rows(pair, batches, begins), Examined([])
    if leaves_its_controls(rows, found):
        return None
    stays = all_stay(rows, found)
    if stays.evidence.supports is None:
        return None
    record = _record(rows, found)
    verdict = same_bits([record], "candidate").supports or Verdict.ROUND_OFF
    said = f"the same function: {stays.evidence.reading}"
    return Diagnosis(verdict, said, None, [stays.evidence], torch.get_num_threads(), record.curves, record)


def all_stay(rows: Sequence[Row], found: Examined) -> Finding:
    """Of a training none of whose windows leaves its controls."""
    windows = windows_of(rows)
    times = [t for window in windows.values() if (t := times_the_controls(window, found)) is not None]
    if not times:
        return PROBE.not_applicable("there is no such pair with a control")
    where = f"{counted(len(windows), 'window')}, from step {min(windows)} to {max(windows)}"
    return PROBE.finding(
        max(times), Verdict.ROUND_OFF, f"at most {max(times):.2g} times the controls ({where}): rounding"
    )
