"""What lockstep costs over the same arms trained alone by bare loops, and how long the commands take.

    python scripts/benchmark.py [--repeats 5] [--data cifar10] [--scale small] [SETTING=VALUE ...]

Each repetition has both sides: the ratio is taken within it, and the median over the repetitions is printed.
The bare loop does forward, backward and the optimizer's step on its batches, and nothing else. Costs are
processor time (of loops on a GPU, wall time). A command counts from its start to its exit, with all that it
starts; its bare loops run as many at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

import torch
from omegaconf import DictConfig

from driftlab.lockstep.arm import Arm
from driftlab.lockstep.loop import Lockstep
from driftlab.network.calling import cast
from driftlab.process.float64_convolutions import computing, faster
from suite.command.command_line import ROOT
from suite.command.configuration import composed, resolve
from suite.command.machine import process_settled
from suite.data import load_images
from suite.data.images import Images
from suite.running.building import build
from suite.running.pool import side_by_side
from suite.running.recorder import Recorder
from suite.running.seed_run import fit
from suite.showing.loggers import MetricsLogger
from suite.showing.terminal import Terminal

PR_SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>

CASES = {
    "default arms, every step logged": ["log_schedule.dense=1000000"],
    "float32 arms alone, default thinning": ["dtypes=[float32]"],
    "float32 arms alone, every step logged": ["dtypes=[float32]", "log_schedule.dense=1000000"],
    "bf16-mixed arms added": ["dtypes=[float32,float64,bf16-mixed]"],
}


def settings_of(overrides: list[str]) -> DictConfig:
    return resolve(composed("+experiment=split_conv", *overrides))


class BareLoops:
    """The arms by themselves, one after the other, each fetching its own batches as it would alone."""

    def __init__(self, settings: DictConfig, images: Images, seed: int):
        self.lockstep, self.batches, _ = build(settings, images, seed)

    def run(self) -> None:
        for arm in self.lockstep.arms:
            self.train(arm)

    def train(self, arm: Arm) -> None:
        for step in range(arm.horizon + 1):
            self.step(arm, step)

    def step(self, arm: Arm, step: int) -> None:
        if step > arm.horizon:
            return
        with computing():  # the kernels that the lockstep has
            inputs, targets = self.batches.batch(step)
            arm.optimizer.zero_grad()
            with arm.precision.forward(arm.module):
                loss = self.lockstep.loss(arm.module(cast(inputs, arm.precision.dtype)), targets)
            arm.backward(loss)
            if step < arm.horizon:
                arm.update()


def bare_seconds(settings: DictConfig, images: Images) -> float:
    bare = BareLoops(settings, images, 0)
    began = time.perf_counter()
    bare.run()
    _wait(bare.lockstep)
    return time.perf_counter() - began


def lockstep_seconds(
    settings: DictConfig,
    images: Images,
    home: Path,
    clock: Callable[[], float] = time.perf_counter,
    after_step: Callable[[int], None] = lambda step: None,
) -> float:
    """The steps of one seed with everything that a run does between them: logger, recorder, checkpoints."""
    lockstep, batches, _ = build(settings, images, 0)
    logger = MetricsLogger(settings, "benchmark", 0, home)
    logger.log(0, {})  # starting W&B is no cost of a step
    recorder = Recorder(
        lockstep,
        batches,
        logger,
        home,
        eval_every=0,
        eval_images=1,
        checkpoint_every=settings.checkpoint_every,
        progress=lambda done, row: after_step(done - 1),
    )
    began = clock()
    fit(lockstep, batches, recorder, 0)
    after_step(lockstep.steps)
    _wait(lockstep)
    seconds = clock() - began
    logger.finish(
        {"outcome": "finished", "times": {"seconds": 0.0}, "arms": {}, "dataset": {}, "environment": {}}
    )
    return seconds


def _wait(lockstep: Lockstep) -> None:
    if next(lockstep.arms[0].module.parameters()).is_cuda:
        torch.cuda.synchronize()


def step_by_step(settings: DictConfig, images: Images, home: Path) -> tuple[float, float]:
    """Processor seconds of the lockstep and of the bare loops, which take each step right after it.

    What else the machine does slows both. One after the other, ratios of the same code were 0.8 to 1.3.
    """
    bare, seconds = BareLoops(settings, images, 0), 0.0

    def step_bare(step: int) -> None:
        nonlocal seconds
        began = time.process_time()
        for arm in bare.lockstep.arms:
            bare.step(arm, step)
        seconds += time.process_time() - began

    both = lockstep_seconds(settings, images, home, time.process_time, step_bare)
    return both - seconds, seconds


def compare(settings: DictConfig, images: Images, repeats: int) -> tuple[list[float], float]:
    """The ratios of ``repeats`` runs, behind one that warms up, and the median of their bare seconds.

    A GPU has to run ahead of the host: there the bare loops come after the whole lockstep, by wall time.
    """
    found = []
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder, process_settled(settings, Terminal().say):
            if settings.device == "cpu":
                found.append(step_by_step(settings, images, Path(folder)))
            else:
                lockstep = lockstep_seconds(settings, images, Path(folder))
                found.append((lockstep, bare_seconds(settings, images)))
    return [lockstep / bare for lockstep, bare in found[1:]], median(bare for _, bare in found[1:])


@dataclass(frozen=True)
class Cost:
    """Processor seconds of a whole command, and of the bare loops of the arms that it trained.

    Attributes:
        parts: of the command: what its seeds say that they went for; "command" is the rest: imports, the
            plan, starting workers, judging, the page.
    """

    command: float
    bare: float
    parts: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.command / self.bare


def whole_command(overrides: list[str], seeds: int, repeats: int) -> list[Cost]:
    """``train.py +experiment=split_conv seed=0..`` from start to exit over bare loops, in turns."""
    costs = []
    for repeat in range(repeats):
        sides = [lambda: _command(overrides, seeds), lambda: _bare(overrides, seeds)]
        found = {side: sides[side]() for side in ((0, 1) if repeat % 2 else (1, 0))}
        spent, parts = found[0]
        costs.append(Cost(spent, found[1], parts))
    return costs


def _command(overrides: list[str], seeds: int) -> tuple[float, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "+experiment=split_conv", f"seed=0..{seeds - 1}"]
        began, others = _children(), _own_children()
        subprocess.run([*command, *overrides, f"results={folder}"], check=True, capture_output=True)
        for orphan in _own_children() - others:  # the process of its workers ends a moment later, and counts
            os.waitpid(orphan, 0)
        spent, parts = _children() - began, Counter()
        for run in Path(folder).rglob("run.json"):
            parts.update(json.loads(run.read_text())["times"]["processor_seconds"])
    return spent, {**parts, "command": spent - sum(parts.values())}


def _own_children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _adopt_orphans() -> None:
    """What a child leaves behind becomes a child of this process (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> float:
    """Processor seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _bare(overrides: list[str], seeds: int) -> float:
    """Of as many processes at a time as the command has, settled as its own; only the loops are counted."""
    jobs = {seed: partial(_bare_seed, overrides, seed) for seed in range(seeds)}
    return sum(dict(side_by_side(jobs, min(seeds, settings_of(overrides).workers))).values())


def _bare_seed(overrides: list[str], seed: int) -> float:
    settings = settings_of(overrides)
    with process_settled(settings, Terminal().say):
        bare = BareLoops(settings, load_images(settings, Terminal().say), seed)
        began = time.process_time()
        bare.run()
        return time.process_time() - began


def _split(**options: object) -> str:
    given = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f"{{target: models.rewrites.split_conv.split_conv, options: {{{given}}}}}"


# Five of the whole network (width 8 or more), which cost up to five times the reference, or of a layer each.
FIVE = {
    "network": [
        _split(dim=d, parts=n) for d, n in (("out", 2), ("out", 4), ("out", 8), ("in", 2), ("in", 4))
    ],
    "layer": [_split(dim="out", parts=2, match=f"layer{n}.0.conv1") for n in (1, 2, 3, 4)]
    + [_split(dim="in", parts=2, match="layer1.0.conv1")],
}


def together(rewrites: list[str], overrides: list[str], seeds: int, repeats: int) -> list[float]:
    """Processor time of five rewrites in one command over that of five commands, in turns."""
    ratios, one, five = [], [rewrites], [[rewrite] for rewrite in rewrites]
    for repeat in range(repeats):
        sides = [lambda: _of_rewrites(overrides, seeds, one), lambda: _of_rewrites(overrides, seeds, five)]
        found = {side: sides[side]() for side in ((0, 1) if repeat % 2 else (1, 0))}
        ratios.append(found[0] / found[1])
    return ratios


def floor(rewrites: list[str], overrides: list[str], images: Images) -> float:
    """The same ratio of the arms' bare loops alone, which no sharing can come below."""
    torch.set_num_threads(1)
    shared, candidates = [], []
    for rewrite in rewrites:
        bare, spent = BareLoops(settings_of([f"++rewrite={rewrite}", *overrides]), images, 0), Counter()
        for arm in bare.lockstep.arms:
            began = time.process_time()
            bare.train(arm)
            spent[arm.role == "candidate"] += time.process_time() - began
        shared.append(spent[False])
        candidates.append(spent[True])
    return (median(shared) + sum(candidates)) / (sum(shared) + sum(candidates))


def _of_rewrites(overrides: list[str], seeds: int, commands: list[list[str]]) -> float:
    return sum(_command([f"rewrites=[{', '.join(own)}]", *overrides], seeds)[0] for own in commands)


def command_seconds(arguments: list[str], repeats: int) -> float:
    """Median wall time of a command from start to exit."""
    times = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            results = [] if "--help" in arguments else [f"results={folder}"]
            command = [sys.executable, str(ROOT / "train.py"), *arguments, *results]
            subprocess.run(command, check=True, capture_output=True)
            times.append(time.perf_counter() - began)
    return median(times)


def say_whole(overrides: list[str], seeds: int, repeats: int) -> None:
    costs = whole_command(overrides, seeds, repeats)
    ratios = [cost.ratio for cost in costs]
    spread = f"n = {len(ratios)}, {min(ratios):.2f}..{max(ratios):.2f}"
    bare = median(cost.bare for cost in costs)
    print(f"whole command, {seeds} seeds, over bare loops: {median(ratios):.2f} ({spread}; {bare:.0f} s)")
    for part in costs[0].parts:
        share = median(cost.parts.get(part, 0.0) / cost.bare for cost in costs)
        print(f"  {part}: {share:.2f} of the bare loops", flush=True)


def say_rewrites(rewrites: list[str], overrides: list[str], seeds: int, repeats: int) -> None:
    ratios = together(rewrites, overrides, seeds, repeats)
    spread = f"n = {len(ratios)}, {min(ratios):.3f}..{max(ratios):.3f}"
    print(f"five rewrites in one command over five commands: {median(ratios):.3f} ({spread})", flush=True)
    least = floor(rewrites, overrides, load_images(settings_of(overrides), Terminal().say))
    print(f"  of the bare loops of their arms alone: {least:.3f}", flush=True)


def say_loops(overrides: list[str], repeats: int) -> None:
    for name, case in CASES.items():
        settings = settings_of([*overrides, *case])
        ratios, bare = compare(settings, load_images(settings, Terminal().say), repeats)
        spread = f"n = {len(ratios)}, {min(ratios):.3f}..{max(ratios):.3f}"
        print(f"{name}: {median(ratios):.3f} ({spread}; bare loops {bare:.1f} s)", flush=True)


def say_commands(logger: str) -> None:
    smoke = ["+experiment=split_conv", "scale=smoke", "data=shapes", f"logger={logger}"]
    for arguments in (["--help"], smoke):
        print(f"python train.py {' '.join(arguments)}: {command_seconds(arguments, 3):.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", default="small")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--logger", default="wandb")
    parser.add_argument("overrides", nargs="*", help="settings as for train.py, for example steps=40")
    parser.add_argument("--seeds", type=int, default=4, help="of the whole command, and of rewrites")
    parser.add_argument("--whole", action="store_true", help="the whole command alone")
    parser.add_argument("--loop", action="store_true", help="the stepping loop alone")
    parser.add_argument("--rewrites", choices=FIVE, help="five rewrites in one command alone, of what")
    options = parser.parse_args()
    own = [f"scale={options.scale}", f"data={options.data}", f"logger={options.logger}", *options.overrides]
    with faster(settings_of(own).fast_float64):
        measure(options, own)
    return 0


def measure(options: argparse.Namespace, overrides: list[str]) -> None:
    """All but rewrites, or what is asked for."""
    _adopt_orphans()
    everything = not (options.whole or options.loop or options.rewrites)
    if options.rewrites:
        say_rewrites(FIVE[options.rewrites], overrides, options.seeds, options.repeats)
    if options.whole or everything:
        say_whole(overrides, options.seeds, options.repeats)
    if options.loop or everything:
        say_loops(overrides, options.repeats)
    if everything:
        say_commands(options.logger)


if __name__ == "__main__":
    supervision.end(main)
