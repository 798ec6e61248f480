"""Measures what many seeds cost: to judge and report (seconds, memory, page), and on disk (files, bytes).

    python scripts/scale.py RUN --out /tmp/scale --seeds 10,100,1000

RUN is a stored run, results/runs/<experiment>/<digest>. Its seeds are written many times over, moved a
little at random, in the format in which runs are stored; nothing is trained. Then scripts/judge.py judges
each folder.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from driftlab.record import seed_record as records
from suite.command.command_line import ROOT

MIB = 2**20
COLUMNS = ("seeds", "judged in", "processor", "peak memory", "report.html", "verdict.json")
# Linux counts the memory of the process that starts another into the peak of that one: so one that is small.
IN_BETWEEN = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
# A seed's distances are those of its pattern times exp of a normal number this wide, the same at each step.
SPREAD = 0.3
# What seals a record holds for its pattern alone.
SEALS = ("seal", "files")


def main(arguments: list[str]) -> int:
    options = _parsed(arguments)
    try:
        patterns = [records.read_seed(options.run, s) for s in records.finished_seeds(options.run)]
    except records.RecordError as error:
        return _refuse(str(error))
    if not patterns:
        return _refuse(f"{options.run} holds no finished seed: give results/runs/<experiment>/<digest>")
    _print_files(options.run, patterns[0].seed)
    print("".join(f"{heading:>13}" for heading in COLUMNS))
    for seeds in sorted(map(int, options.seeds.split(","))):
        folder = options.out / f"{seeds}_seeds" / options.run.name
        if not folder.exists():
            write_seeds(folder, options.run, patterns, seeds)
        print(_measured(folder, seeds), flush=True)
    return 0


def write_seeds(folder: Path, run: Path, patterns: list[records.SeedRecord], seeds: int) -> None:
    """Seeds 0 to ``seeds - 1``, each a stored one of ``run`` moved a little at random."""
    for seed in range(seeds):
        write_seed(folder, moved(patterns[seed % len(patterns)], seed))
    records.write_whole(folder / "experiment.yaml", (run / "experiment.yaml").read_bytes())


def moved(pattern: records.SeedRecord, seed: int) -> records.SeedRecord:
    """Another seed such as the pattern: distances wider or narrower, losses a little off, zeros left zero."""
    chance = random.Random(seed)
    factor = {arm: chance.lognormvariate(0, SPREAD) for arm in pattern.arms}

    def row(values: Mapping[str, float]) -> dict[str, float]:
        return {column: _moved(column, value, factor, chance) for column, value in values.items()}

    run = {key: value for key, value in pattern.run.items() if key not in SEALS} | {"seed": seed}
    run["layers"] = [_layer(entry, chance) for entry in pattern.run.get("layers") or []]
    return records.SeedRecord(seed, list(map(row, pattern.curves)), list(map(row, pattern.evaluations)), run)


def _moved(column: str, value: float, factor: Mapping[str, float], chance: random.Random) -> float:
    kind, _, arm = column.partition("/")
    if kind.endswith("_distance") or kind == "sign_flips":
        return value * factor[arm]
    return value * chance.gauss(1, 0.01) if kind == "loss" else value


def _layer(entry: Mapping, chance: random.Random) -> dict:
    wider = chance.lognormvariate(0, SPREAD)
    passes = {
        name: {kind: value * wider if isinstance(value, float) else value for kind, value in kinds.items()}
        for name, kinds in entry["passes"].items()
    }
    return dict(entry) | {"passes": passes}


def write_seed(folder: Path, record: records.SeedRecord) -> None:
    home, arms = records.seed_folder(folder, record.seed), record.arms
    records.write_table(home / "curves.csv", records.columns(records.CURVES, arms), record.curves)
    header = records.columns(records.EVALUATIONS, arms)
    records.write_table(home / "evaluations.csv", header, record.evaluations)
    records.write_json(home / "run.json", record.run)


def judge(folder: Path) -> tuple[float, float, float]:
    """What it ``cost`` to judge a folder."""
    return cost([sys.executable, str(ROOT / "scripts" / "judge.py"), str(folder)])


def cost(command: list[str]) -> tuple[float, float, float]:
    """Of a command with all that it starts: seconds, seconds of processor, largest memory in MiB."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", IN_BETWEEN, *command], stdout=subprocess.PIPE, check=True)
    processor, peak = map(float, done.stdout.split())
    return time.perf_counter() - began, processor, peak * 1024 / MIB


def _measured(folder: Path, seeds: int) -> str:
    try:
        seconds, processor, peak = judge(folder)
    except subprocess.CalledProcessError:
        return f"{seeds:>13,} could not be judged"
    sizes = [(folder / name).stat().st_size / MIB for name in ("report.html", "verdict.json")]
    cells = [f"{seeds:,}", f"{seconds:.1f} s", f"{processor:.1f} s", f"{peak:.0f} MiB"]
    cells += [f"{size:.2f} MiB" for size in sizes]
    return "".join(f"{cell:>13}" for cell in cells)


def _print_files(run: Path, seed: int) -> None:
    """What a seed leaves on disk, by file or folder."""
    home = records.seed_folder(run, seed)
    files = [path for path in home.rglob("*") if path.is_file()]
    print(f"{'a seed leaves':<30} {'files':>6} {'bytes':>14}")
    for name in (*sorted({path.relative_to(home).parts[0] for path in files}), "all"):
        below = [p.stat().st_size for p in files if name in ("all", p.relative_to(home).parts[0])]
        print(f"{name:<30} {len(below):>6} {sum(below):>14,}")
    print()


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="results/runs/<experiment>/<digest>")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the seeds go")
    parser.add_argument("--seeds", default="10,100,1000", metavar="N,N,...")
    return parser.parse_args(arguments)


def _refuse(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    supervision.end(partial(main, sys.argv[1:]))
