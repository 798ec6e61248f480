"""Counts how often the diagnosis is right, over the labelled bench: confusion matrix, places, times.

python scripts/calibrate.py                    all planted cases, written under results/published/calibration/
python scripts/calibrate.py conv lstm --dry    the cases whose name holds one of the words, nothing written

uv run --group bench scripts/calibrate.py --of real_bugs
    published bugs and right pairs out of libraries, written under results/published/real_bugs/
uv run --group bench scripts/calibrate.py --of ported
    pairs of which one was ported, written under results/published/ported/
uv run --group bench scripts/calibrate.py --of held_back
    pairs written after the verdict was last changed, written under results/published/held_back/;
    with --new those that were not judged yet, beside what stands there of the others
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from rich.console import Console
from rich.table import Table

from bench import cases, held_back, ported, real_bugs, real_summary
from bench.rates import FIRST, rates_csv
from bench.real_habits import Seen, seen_of
from bench.real_rates import real_rates
from bench.run import Outcome, all_cases, confusion, run_case
from bench.summary import HEADER, VERDICTS, as_csv, as_markdown, rates, read_csv, table_rows
from driftlab.record.seed_record import write_whole
from suite.command.command_line import ROOT

PUBLISHED = ROOT / "results" / "published"
ROOMS = {"planted": cases, "real_bugs": real_bugs, "ported": ported, "held_back": held_back}
Answer = tuple[Outcome, Seen | None]


def main() -> int:
    arguments = _arguments()
    try:
        found = {c.name: c for c in all_cases(ROOMS[arguments.of])}
    except ModuleNotFoundError as error:
        print(f"{error}: uv run --group bench scripts/calibrate.py --of {arguments.of}", file=sys.stderr)
        return 2
    names = [name for name in found if not arguments.words or any(w in name for w in arguments.words)]
    judged = _judged(arguments.of) if arguments.new else []
    names = [name for name in names if name not in {o.name for o in judged}]
    if not names:
        which = f"has {' or '.join(arguments.words)} in its name" if arguments.words else "is new"
        print(f"no case {which}", file=sys.stderr)
        return 2
    answers = _run(arguments.of, names, arguments.jobs)
    _show([outcome for outcome, _ in answers])
    if not arguments.dry:
        publish = _publish_real if arguments.of == "real_bugs" else partial(_publish, arguments.of)
        folder = publish(found, [*((outcome, None) for outcome in judged), *answers], _command(arguments))
        print(f"written to {folder.relative_to(ROOT)}/")
    return 0


def _command(arguments: argparse.Namespace) -> str:
    planted = arguments.of == "planted"
    by, of = ("python", []) if planted else ("uv run --group bench", ["--of", arguments.of])
    new = ["--new"] * arguments.new
    return shlex.join([*by.split(), "scripts/calibrate.py", *of, *new, *arguments.words])


def _judged(of: str) -> list[Outcome]:
    """What stands on the page already."""
    file = _folder(of) / "cases.csv"
    return read_csv(file.read_text()) if file.exists() else []


def _folder(of: str) -> Path:
    return PUBLISHED / ("calibration" if of == "planted" else of)


def _publish(of: str, found: dict, answers: list[Answer], command: str) -> Path:
    """What the held-out cases gave when they were judged for the first time stays as it was."""
    folder, outcomes = _folder(of), [outcome for outcome, _ in answers]
    first = folder / "held_out_first.csv"
    seen = read_csv(first.read_text()) if first.exists() else []
    known = {outcome.name for outcome in seen}
    seen += [outcome for outcome in outcomes if outcome.held_out and outcome.name not in known]
    write_whole(first, as_csv(seen))
    write_whole(folder / "README.md", as_markdown(outcomes, command, ROOMS[of].__name__, seen))
    write_whole(folder / "cases.csv", as_csv(outcomes))
    write_whole(folder / "rates.csv", rates_csv([*rates(outcomes), *rates(seen, FIRST)]))
    return folder


def _publish_real(found: dict, answers: list[Answer], command: str) -> Path:
    """What each case gave when it was judged for the first time stays as it was."""
    folder = PUBLISHED / "real_bugs"
    earlier = folder / "cases.csv"
    first = real_summary.first_sights(earlier.read_text()) if earlier.exists() else {}
    judged = [
        real_summary.Judged(found[outcome.name], outcome, seen, first.get(outcome.name, {}))
        for outcome, seen in sorted(answers, key=lambda a: (a[0].kind != "real bug", a[0].kind, a[0].name))
    ]
    write_whole(folder / "README.md", real_summary.as_markdown(judged, command))
    write_whole(folder / "cases.csv", real_summary.as_csv(judged))
    write_whole(folder / "habits.csv", real_summary.habits_csv(judged))
    rates = real_rates(real_summary.as_csv(judged), real_summary.habits_csv(judged))
    write_whole(folder / "rates.csv", rates_csv(rates))
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="run the cases whose name holds one of them")
    parser.add_argument("--of", choices=ROOMS, default="planted", help="which cases")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time, a process each")
    parser.add_argument("--new", action="store_true", help="those alone that the page does not have yet")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if arguments.new and arguments.of == "real_bugs":
        parser.error("--new: what others' habits say of published bugs is measured of all of them together")
    return arguments


def _run(room: str, names: list[str], jobs: int) -> list[Answer]:
    console, answers = Console(stderr=True), []
    with get_context("spawn").Pool(jobs) as pool:
        for outcome, seen in pool.imap_unordered(partial(_by_name, room), names):
            answers.append((outcome, seen))
            if not outcome.right or outcome.placed is False:
                what = "wrong" if not outcome.right else "wrong place"
                console.print(f"{what}: {outcome.name} ({outcome.label}): {outcome.headline}", markup=False)
            if console.is_terminal:
                console.print(f"{len(answers)} of {len(names)}", end="\r")
    return sorted(answers, key=lambda answer: answer[0].name)


def _by_name(room: str, name: str) -> Answer:
    case = next(c for c in all_cases(ROOMS[room]) if c.name == name)
    return run_case(case), seen_of(case) if case.source else None


def _show(outcomes: list[Outcome]) -> None:
    console, table = Console(), confusion(outcomes)
    columns = [v for v in [*VERDICTS, "raised"] if any(row[v] for row in table.values())]
    matrix = Table("label", *columns, "n", title=f"{len(outcomes)} cases: label against verdict")
    for label, row in table.items():
        matrix.add_row(label, *(str(row[c] or "") for c in columns), str(sum(row.values())))
    shares = Table(*HEADER)
    for row in table_rows(rates(outcomes)):
        shares.add_row(*row)
    console.print(matrix, shares)
    seconds = sorted(o.seconds for o in outcomes)
    console.print(f"{seconds[len(seconds) // 2]:.1f} s a case (median), {seconds[-1]:.1f} s at most")


if __name__ == "__main__":
    supervision.end(main)
