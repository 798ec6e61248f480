"""Judges the pairs in 16 bits: ``python -m bench.low_precision [words] [--held-out | --first] [--dry]``.

Without ``--dry`` the table and every case are written under ``results/published/low_precision/``.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from bench.low_precision.case import cases
from bench.low_precision.judged import judged, summary
from driftlab.record.seed_record import write_whole

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published" / "low_precision"


def main() -> int:
    arguments = _arguments()
    found = []
    for case in cases():
        if arguments.half is not None and case.held_out != arguments.half:
            continue
        if arguments.words and not any(word in case.name for word in arguments.words):
            continue
        found.append(judged(case))
        one = found[-1]
        mark, habit = "" if one.right else "WRONG", "accused" if one.by_tolerance else "passed"
        said = f"{one.label}, said {one.said} {one.measured} in {one.seconds} s, by tolerance {habit}"
        print(f"{mark:6}{one.name} ({one.precision}): {said}", flush=True)
    print(summary(found))
    if not arguments.dry and found:
        table = io.StringIO()
        writer = csv.DictWriter(table, list(found[0].as_dict()))
        writer.writeheader()
        writer.writerows(one.as_dict() for one in found)
        PUBLISHED.mkdir(parents=True, exist_ok=True)
        write_whole(PUBLISHED / "cases.csv", table.getvalue())
        write_whole(PUBLISHED / "README.md", f"# Pairs in 16 bits\n\n{summary(found)}\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of the names of cases")
    parser.add_argument("--first", dest="half", action="store_const", const=False)
    parser.add_argument("--held-out", dest="half", action="store_const", const=True)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
