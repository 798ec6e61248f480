"""Counts how often the diagnosis is right, over the labelled bench: confusion matrix, places, times.

python scripts/calibrate.py                    all cases, written under results/published/calibration/
python scripts/calibrate.py conv lstm --dry    the cases whose name holds one of the words, nothing written
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.run import Outcome, all_cases, confusion, run_case  # noqa: E402
from bench.summary import HEADER, VERDICTS, as_csv, as_markdown, rates, read_csv  # noqa: E402
from driftlab.record.seed_record import write_whole  # noqa: E402

PUBLISHED = ROOT / "results" / "published" / "calibration"


def main() -> int:
    arguments = _arguments()
    names = [c.name for c in all_cases() if not arguments.words or any(w in c.name for w in arguments.words)]
    if not names:
        print(f"no case has {' or '.join(arguments.words)} in its name", file=sys.stderr)
        return 2
    outcomes = _run(names, arguments.jobs)
    _show(outcomes)
    if not arguments.dry:
        command = f"python scripts/calibrate.py {shlex.join(arguments.words)}".strip()
        first = PUBLISHED / "held_out_first.csv"
        seen = read_csv(first.read_text()) if first.exists() else []
        write_whole(PUBLISHED / "README.md", as_markdown(outcomes, command, seen))
        write_whole(PUBLISHED / "cases.csv", as_csv(outcomes))
        print(f"written to {PUBLISHED.relative_to(ROOT)}/")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="run the cases whose name holds one of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time, a process each")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    return parser.parse_args()


def _run(names: list[str], jobs: int) -> list[Outcome]:
    console, outcomes = Console(stderr=True), []
    with get_context("spawn").Pool(jobs) as pool:
        for outcome in pool.imap_unordered(_by_name, names):
            outcomes.append(outcome)
            if not outcome.right or outcome.placed is False:
                what = "wrong" if not outcome.right else "wrong place"
                console.print(f"{what}: {outcome.name} ({outcome.label}): {outcome.headline}", markup=False)
            if console.is_terminal:
                console.print(f"{len(outcomes)} of {len(names)}", end="\r")
    return sorted(outcomes, key=lambda o: o.name)


def _by_name(name: str) -> Outcome:
    return run_case(next(c for c in all_cases() if c.name == name))


def _show(outcomes: list[Outcome]) -> None:
    console, table = Console(), confusion(outcomes)
    columns = [v for v in [*VERDICTS, "raised"] if any(row[v] for row in table.values())]
    matrix = Table("label", *columns, "n", title=f"{len(outcomes)} cases: label against verdict")
    for label, row in table.items():
        matrix.add_row(label, *(str(row[c] or "") for c in columns), str(sum(row.values())))
    shares = Table(*HEADER)
    for row in rates(outcomes):
        shares.add_row(*row)
    console.print(matrix, shares)
    seconds = sorted(o.seconds for o in outcomes)
    console.print(f"{seconds[len(seconds) // 2]:.1f} s a case (median), {seconds[-1]:.1f} s at most")


if __name__ == "__main__":
    raise SystemExit(main())
