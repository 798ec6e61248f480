"""What the check runs on: the GPU, its driver and libraries, and this checkout."""

from __future__ import annotations

import hashlib
import subprocess
from typing import Any

from scripts.gpu_parts.part import ROOT, Check, Found, Items, Part

ROOMS = ("bench", "conf", "driftlab", "experiments", "models", "scripts", "suite", "tests")


def items(check: Check) -> Items:
    return {"machine": machine}


def machine(check: Check) -> Found:
    """``right`` is False where there is no GPU."""
    import torch

    from driftlab.record.environment import environment

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs alone"
        return Found(f"torch {torch.__version__} ({built}) finds no CUDA device here", right=False)
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    values = environment(device) | {
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "source": _source(),
        "commit": _commit(),
    }
    libraries = f"CUDA {values['cuda']}, cuDNN {values['cudnn']}, torch {values['versions']['torch']}"
    gpu = f"{values['device']}, {values['memory_gib']:.0f} GiB, driver {values['driver']}"
    reading = f"{gpu}, {libraries}, driftlab at {values['commit']}"
    return Found(reading, values=values)


def same(values: dict[str, Any]) -> dict[str, Any]:
    """Of what ``machine`` found, that on which what was measured before still holds."""
    named = ("device", "memory_gib", "capability", "driver", "cuda", "cudnn", "python", "versions", "source")
    return {name: values[name] for name in named}


def _source() -> str:
    """A short hash of the code and its settings: changed code is measured anew."""
    digest = hashlib.sha256()
    files = (f for room in ROOMS for f in (ROOT / room).rglob("*") if f.suffix in (".py", ".yaml"))
    for file in sorted(files):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:10]


def _commit() -> str:
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"


PART = Part("machine", "The machine", 0.5, items)
