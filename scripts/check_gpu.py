"""Checks driftlab on a GPU: ten minutes at most, plain output, one folder to send back.

    python scripts/check_gpu.py [--results gpu_check] [--minutes 10] [--size full|smoke]

Each part runs in a process of its own and leaves a .json and a .log. Started again it goes on: what was
measured on the same GPU with the same versions is kept; what failed or found no time is run. Exit status: 0
all is as it should be, 1 something is not or is missing, 2 there is no GPU, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu_parts import MACHINE, PARTS
from scripts.gpu_parts.machine import same
from scripts.gpu_parts.part import Check, Part, Record, carry_out
from scripts.gpu_parts.running import run
from scripts.gpu_parts.summary import summary
from suite.command import supervision


def main(arguments: list[str]) -> int:
    options = _parsed(arguments)
    until = time.monotonic() + 60 * options.minutes
    check = Check(options.results.resolve(), options.size == "smoke", options.python, until)
    if options.part:
        return carry_out({part.name: part for part in (MACHINE, *PARTS)}[options.part], check)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends with this
    try:
        return _all(check)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130


def _all(check: Check) -> int:
    began = time.monotonic()
    found = run(MACHINE, {"begun": time.time()}, check)
    machine = found.found.get("machine")
    if machine is None or not machine["values"]:
        why = machine["reading"] if machine else next(iter((found.failed | found.not_run).values()))
        print(f"error: {why}: there is nothing to check", file=sys.stderr)
        _leave_nothing(check.results)
        return 2
    print(machine["reading"], flush=True)
    of = same(machine["values"]) | {"size": "smoke" if check.smoke else "full"}
    records = {part: _told(part, rest, of, check) for part, rest in zip(PARTS, _rests(), strict=True)}
    minutes = (time.monotonic() - began) / 60
    right, text = summary(check.results, machine["reading"], records, minutes)
    print(f"\n{text}", end="")
    (check.results / "summary.txt").write_text(text)
    return 0 if right else 1


def _rests() -> list[float]:
    """Each part's share of the time that is left when it begins: what one leaves is the next ones'."""
    return [part.share / sum(p.share for p in PARTS[index:]) for index, part in enumerate(PARTS)]


def _told(part: Part, rest: float, of: dict, check: Check) -> Record:
    began = time.monotonic()
    print(f"{part.title} ...", end=" ", flush=True)
    record = run(part, of, replace(check, until=began + rest * max(check.left(), 0.0)))
    became = f", {len(record.failed)} failed" if record.failed else ""
    print(f"{time.monotonic() - began:.0f} s{became}", flush=True)
    return record


def _leave_nothing(results: Path) -> None:
    """Where there is no GPU, unless the folder holds something else."""
    for name in ("machine.json", "machine.log"):
        (results / name).unlink(missing_ok=True)
    with suppress(OSError):
        results.rmdir()


def _parsed(arguments: list[str]) -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--results", type=Path, default=Path("gpu_check"), help="the folder to send back")
    parser.add_argument("--minutes", type=float, default=10, help="at most so many; default: 10")
    parser.add_argument(
        "--size", choices=("full", "smoke"), default="full", help="smoke: does it run at all?"
    )
    parser.add_argument("--python", default=sys.executable, help="the command that starts Python")
    parser.add_argument("--part", choices=[p.name for p in (MACHINE, *PARTS)], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    supervision.end(partial(main, sys.argv[1:]))
