"""What a float64 step of a ResNet18 costs over a float32 step: by torch's kernels, and as driftlab has it.

    python scripts/float64_convolutions.py [--repeats 9] [--threads 1] [WIDTH,BATCH ...]

Each repetition takes one step of each kind after the other, forward and backward, in this process, which
keeps its memory as a run does; the ratios are taken within it, and their medians and extremes printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

import torch
from omegaconf import OmegaConf

from driftlab.process.float64_convolutions import computing, faster
from models.resnet import ResNet18
from suite.command.machine import process_settled

KINDS = {
    "float32": (torch.float32, False),
    "torch's own": (torch.float64, False),
    "now": (torch.float64, True),
}
CASES = ["8,64", "16,64", "32,64", "64,32"]


def seconds_of_a_step(width: int, batch: int) -> dict[str, float]:
    """By kind, each once; the networks are thrown away."""
    taken = {}
    for kind, (dtype, fast) in KINDS.items():
        torch.manual_seed(0)
        network = ResNet18(width=width).to(dtype)
        inputs, targets = torch.randn(batch, 3, 32, 32, dtype=dtype), torch.randint(10, (batch,))
        with faster(fast), computing():
            for _ in range(2):  # the first warms up
                began = time.perf_counter()
                torch.nn.functional.cross_entropy(network(inputs), targets).backward()
                taken[kind] = time.perf_counter() - began
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="WIDTH,BATCH")
    options = parser.parse_args()
    settings = OmegaConf.create(
        {"threads": options.threads, "device": "cpu", "tf32": False, "fast_float64": False}
    )
    with process_settled(settings, print):
        for case in options.cases:
            width, batch = map(int, case.split(","))
            taken = [seconds_of_a_step(width, batch) for _ in range(options.repeats)]
            for kind in ("torch's own", "now"):
                ratios = [one[kind] / one["float32"] for one in taken]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                print(
                    f"width {width}, batch {batch}, float64 over float32, {kind}: {median(ratios):.2f} "
                    f"({spread}, n = {len(ratios)}; float32 {median(one['float32'] for one in taken):.3f} s)",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    supervision.end(main)
