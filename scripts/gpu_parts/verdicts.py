"""Verdicts of experiments at full width and a short length, TF32 off and on, beside the expected ones."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial

from driftlab.record.json_files import read_json
from scripts.gpu_parts.part import ROOT, Check, Found, Items, Part

# The network that papers use, and as many steps as a verdict needs: drawn images, which need no network.
FULL = ("scale=full", "steps=20", "float64_steps=6", "eval_images=256", "data=shapes")
SMOKE = ("scale=smoke", "data=shapes", "steps=3", "float64_steps=2", "batch_size=8", "eval_images=20")
QUIET = ("logger=none", "seed=0", "keep_checkpoint=false", "device=cuda", "workers=1")

# A right rewrite and a wrong one first: whoever runs out of time has seen both. What becomes of float32
# against float64 with TF32 on nobody has claimed, so that is left out.
ASKED = (
    *((name, tf32) for tf32 in (False, True) for name in ("split_conv", "planted_bug")),
    *((name, False) for name in ("split_conv_input", "grouped_conv", "precision")),
    *((name, True) for name in ("control", "split_conv_input", "grouped_conv")),
)


def items(check: Check) -> Items:
    asked = (("control", True),) if check.smoke else ASKED
    return {f"{name}, TF32 {'on' if tf32 else 'off'}": partial(_judged, name, tf32) for name, tf32 in asked}


def _judged(name: str, tf32: bool, check: Check) -> Found:
    from omegaconf import OmegaConf

    results = check.results / "runs" / ("tf32" if tf32 else "float32")
    settings = (*(SMOKE if check.smoke else FULL), *QUIET, f"tf32={str(tf32).lower()}")
    shutil.rmtree(results / name, ignore_errors=True)  # of other code or another device
    command = [*check.python, "train.py", f"+experiment={name}", *settings, f"results={results.resolve()}"]
    ended = subprocess.run(command, cwd=ROOT)
    files = list((results / name).glob("*/verdict.json"))
    if ended.returncode or len(files) != 1:
        raise RuntimeError(
            f"train.py +experiment={name} ended with status {ended.returncode}: see verdicts.log"
        )
    verdict = read_json(files[0])
    expected = OmegaConf.load(ROOT / "conf" / "experiment" / f"{name}.yaml").expected
    right = verdict["verdict"] == expected
    seconds = read_json(files[0].parent / "seed=0" / "run.json")["times"]
    reading = (
        verdict["verdict"] if right else f"{verdict['verdict']} instead of {expected}: {verdict['headline']}"
    )
    return Found(reading, right, {"verdict": verdict["verdict"], "expected": expected, "times": seconds})


PART = Part("verdicts", "Verdicts of ResNet18 at full width, 20 steps, 6 in float64", 6, items)
