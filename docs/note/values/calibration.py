"""How often the verdict was right on pairs that it met for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from docs.note.values.published import Row, rows, share, short

FIRST = {
    "planted": "calibration/held_out_first.csv",
    "ported": "ported/held_out_first.csv",
    "later": "held_back/held_out_first.csv",
}
NOW = {
    "planted": "calibration/cases.csv",
    "ported": "ported/cases.csv",
    "later": "held_back/cases.csv",
    "real": "real_bugs/cases.csv",
}
REAL = "real_bugs/cases.csv"
GROUPS = {"published": "real bug", "mended": "mended bug", "libraries": "right pair"}
SAME = ("round_off", "bit_identical")


@dataclass(frozen=True)
class Judged:
    """A pair and its first verdict: whether both are the same function, and whether it is a fault."""

    same: bool
    fault: bool
    right: bool
    placed: bool | None
    verdict: str


def numbers() -> dict[str, dict]:
    sets = {name: [_planted(row) for row in rows(table)] for name, table in FIRST.items()}
    groups = {name: [_real(r) for r in rows(REAL) if r["group"] == kind] for name, kind in GROUPS.items()}
    real = [case for cases in groups.values() for case in cases]
    together = real + sets["ported"] + sets["later"]
    return {
        **{name: _rates(cases) for name, cases in (sets | groups).items()},
        "together": _rates(together) | {"now": _now(("real", "ported", "later"))},
        "everything": _rates(together + sets["planted"]),
        "ports": {
            "place": share(c.placed for s in ("ported", "later") for c in sets[s] if c.placed is not None)
        },
        "half": _in_16_bits(),
        "now": {"planted": _now(("planted",))},
        "seconds": _seconds(),
    }


def _planted(row: Row) -> Judged:
    return Judged(
        row["label"] in SAME,
        row["label"] == "bug",
        _true(row["right"]),
        _placed(row["placed"]),
        row["verdict"],
    )


def _real(row: Row) -> Judged:
    fault = row["kind"] == "wrong"
    right, placed = _true(row["right at first sight"]), _placed(row["placed at first sight"])
    return Judged(not fault, fault, right, placed, row["verdict at first sight"])


def _true(cell: str) -> bool:
    return cell == "True"


def _placed(cell: str) -> bool | None:
    return _true(cell) if cell else None


def _rates(cases: Sequence[Judged]) -> dict:
    """False alarms: pairs of one function called a bug. Missed: faults that were not called one."""
    placed = [c.placed for c in cases if c.placed is not None]
    same = [c for c in cases if c.same]
    faults = [c for c in cases if c.fault]
    found = {"right": share(c.right for c in cases)}
    if placed:
        found["place"] = share(placed)
    if same:
        found["alarms"] = share(c.verdict == "bug" for c in same)
    if faults:
        found["missed"] = share(not c.right for c in faults)
        found["passed"] = share(c.verdict in SAME for c in faults)
    return found


def _now(sets: Sequence[str]) -> dict[str, str]:
    return share(_true(row["right"]) for name in sets for row in rows(NOW[name]))


def _in_16_bits() -> dict:
    cases = rows("low_precision/held_out_first.csv")
    same = [c for c in cases if c["label"] == "right"]
    faults = [c for c in cases if c["label"] == "bug"]
    return {
        "right": share(_true(c["right"]) for c in cases),
        "alarms": share(c["said"] == "bug" for c in same),
        "missed": share(c["said"] != "bug" for c in faults),
        "passed": share(c["said"] == "right" for c in faults),
        "tolerance": {
            "right": share(_accused(c) != (c["label"] == "right") for c in cases),
            "alarms": share(_accused(c) for c in same),
            "missed": share(not _accused(c) for c in faults),
        },
    }


def _accused(case: Row) -> bool:
    """Whether ``torch.testing.assert_close`` accuses the pair, with the tolerances that are in use."""
    return _true(case["by_tolerance"])


def _seconds() -> dict[str, str]:
    seconds = [float(row["seconds"]) for table in NOW.values() for row in rows(table)]
    return {"median": short(median(seconds)), "most": short(max(seconds)), "n": f"{len(seconds):,}"}
