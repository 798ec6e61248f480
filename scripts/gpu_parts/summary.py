"""What the check found, for somebody who does not know driftlab: what is not right first, then everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.gpu_parts.part import Part, Record

LAST_LINES = 8


def summary(results: Path, on: str, records: Mapping[Part, Record], minutes: float) -> tuple[bool, str]:
    """Whether all is as it should be, and the text.

    Args:
        on: the machine, in a line.
        minutes: that it took.
    """
    wrong = [
        f"  {p.name}: {i}: {f['reading']}"
        for p, r in records.items()
        for i, f in r.found.items()
        if f["right"] is False
    ]
    failed = [line for part, record in records.items() for line in _failed(results, part, record)]
    not_run = [f"  {p.name}: {i} ({why})" for p, r in records.items() for i, why in r.not_run.items()]
    blocks = (
        ("NOT AS IT SHOULD BE", wrong),
        ("FAILED: the same command runs these again", failed),
        ("NOT RUN for lack of time: the same command goes on with these", not_run),
    )
    lines = ["driftlab on a GPU", on, "", _in_short(records), f"{minutes:.1f} minutes"]
    for heading, block in blocks:
        lines += ["", heading, *block] if block else []
    for part, record in records.items():
        lines += ["", part.title, *_found(record)]
    right = not (wrong or failed or not_run)
    return right, "\n".join([*lines, "", *_to_do(results, right, bool(failed or not_run))]) + "\n"


def _in_short(records: Mapping[Part, Record]) -> str:
    found = [f["right"] for record in records.values() for f in record.found.values()]
    counts = Counter(found)
    failed, not_run = (sum(len(getattr(r, name)) for r in records.values()) for name in ("failed", "not_run"))
    return (
        f"{counts[True]} right, {counts[False]} not right, {counts[None]} measured, {failed} failed, "
        f"{not_run} not run"
    )


def _failed(results: Path, part: Part, record: Record) -> Iterator[str]:
    for item, why in record.failed.items():
        yield f"  {part.name}: {item}: {why}"
    log = results / f"{part.name}.log"
    if record.failed and log.exists():
        yield f"    {log.name} ends with"
        for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]:
            yield f"    | {line[:160]}"


def _found(record: Record) -> Iterator[str]:
    marks = {True: "right", False: "WRONG", None: ""}
    width = max(map(len, record.found), default=0)
    for item, found in record.found.items():
        yield f"  {marks[found['right']]:<5} {item:<{width}}  {found['reading']}  ({found['seconds']:.0f} s)"
        for line in found["beside"]:
            yield f"        {line}"
    for item in (*record.failed, *record.not_run):
        yield f"  {'-':<5} {item:<{width}}  see above"


def _to_do(results: Path, right: bool, again: bool) -> Iterator[str]:
    yield "What to do now"
    if right:
        yield "  Nothing is amiss. The times and errors above are worth having all the same:"
    if again:
        yield "  Run the same command once more: it takes up what failed or found no time, and nothing else."
    yield f"  Pack the folder with   tar czf gpu_check.tgz -C {results.resolve().parent} {results.name}"
    yield "  and attach it to an issue in the tracker of the repository that you have driftlab from, with the"
    yield "  GPU in its title. It is text: numbers, versions, and logs, which hold paths of this machine."
