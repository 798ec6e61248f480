"""How the cost of a run grows, with width, steps, arms, candidates and seeds: time, memory and disk.

    python scripts/growth.py [--repeats 3] [--axes width,steps] [--page-only]

Each repetition runs every point once, as a command of its own, from its start to its exit: processor time and
the largest process of all that it starts, and what it leaves on disk. Ratios are taken within a repetition.
What was measured on the same machine and versions is kept, and the rest measured: the same command goes on.
The page is results/published/growth/; --page-only makes it again of what was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from driftlab.record.seed_record import finished_seeds, read_seed
from scripts import growth_page, scale
from scripts.benchmark import FIVE
from suite.command.command_line import ROOT

REWRITES = FIVE["network"]
PAGE = ROOT / "results" / "published" / "growth"
MEASURED = PAGE / "measured.csv"
SMALL = {"+experiment": "split_conv", "scale": "small", "data": "cifar10", "logger": "none", "workers": 1}
BRIEF = SMALL | {"threads": 1, "eval_images": 100, "batch_size": 16, "steps": 20, "float64_steps": 5}
TINY = BRIEF | {"model": "resnet14", "model.width": 4, "batch_size": 4, "float64_steps": 20}
DTYPES = {3: "[float32]", 6: "[float32,float64]", 9: "[float32,float64,bf16-mixed]"}


@dataclass(frozen=True)
class Axis:
    """What grows.

    Attributes:
        points: how much of it.
        cost: a point, and an empty folder, to one row of what it cost there.
    """

    points: tuple[int, ...]
    cost: Callable[[int, Path], dict]


def trained(settings: Callable[[int], dict]) -> Callable[[int, Path], dict]:
    """What a training costs whose settings hang on the point."""

    def cost(point: int, folder: Path) -> dict:
        _, seconds, memory = _train(settings(point), folder)
        runs = [json.loads(path.read_text()) for path in folder.rglob("run.json")]
        parts = [run["times"]["processor_seconds"] for run in runs]
        of = {part: sum(one.get(part, 0.0) for one in parts) for part in ("steps", "probes")}
        return {"seconds": seconds, **of, "memory": memory, "disk": _disk(folder)}

    return cost


def judged(seeds: int, folder: Path) -> dict:
    """What it costs to judge so many seeds, each such as one that was trained."""
    pattern = folder.parent / "pattern"
    if not pattern.exists():
        _train(SMALL, pattern)
    (run,) = (file.parent for file in pattern.rglob("experiment.yaml"))
    home = folder / run.name
    scale.write_seeds(home, run, [read_seed(run, seed) for seed in finished_seeds(run)], seeds)
    _, seconds, memory = scale.judge(home)
    return {"seconds": seconds, "memory": memory, "disk": _disk(folder)}


AXES = {
    "width": Axis((8, 16, 32, 64), trained(lambda width: BRIEF | {"model.width": width})),
    "steps": Axis((100, 1_000, 10_000), trained(lambda steps: TINY | {"steps": steps})),
    "arms": Axis((3, 6, 9), trained(lambda n: BRIEF | {"float64_steps": 20, "dtypes": DTYPES[n]})),
    "candidates": Axis((1, 2, 3, 5), trained(lambda n: BRIEF | {"rewrites": f"[{', '.join(REWRITES[:n])}]"})),
    "seeds judged": Axis((1, 10, 100, 1_000, 3_000), judged),
}


def _train(settings: dict, folder: Path) -> tuple[float, float, float]:
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *(f"{name}={value}" for name, value in settings.items()),
    ]
    return scale.cost([*command, f"results={folder}"])


def _disk(folder: Path) -> float:
    """MiB of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / scale.MIB


def measured(axes: list[str], repeats: int, done: set[tuple]) -> Iterator[dict]:
    """A row for each axis, point and repetition that is not ``done``."""
    with tempfile.TemporaryDirectory() as root:
        for repeat, axis in product(range(repeats), axes):
            for point in AXES[axis].points:
                if (axis, point, repeat) in done:
                    continue
                folder = Path(root) / f"{repeat}-{axis}-{point}"
                folder.mkdir()
                row = {"axis": axis, "point": point, "repeat": repeat, **AXES[axis].cost(point, folder)}
                print(row, flush=True)
                yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    if not options.page_only:
        here = growth_page.machine()
        axes = options.axes.split(",")
        if unknown := sorted(set(axes) - set(AXES)):
            parser.error(f"there is no axis {', '.join(unknown)}: there are {', '.join(AXES)}")
        rows = [row for row in growth_page.read(MEASURED) if row["machine"] == here]
        done = {(row["axis"], row["point"], row["repeat"]) for row in rows}
        for row in measured(axes, options.repeats, done):
            rows.append(row | {"machine": here})
            growth_page.write(MEASURED, rows)
    growth_page.publish(PAGE, growth_page.read(MEASURED))
    print(f"written to {PAGE.relative_to(ROOT)}/")
    return 0


if __name__ == "__main__":
    supervision.end(main)
