"""Where a run takes place: set the determinism that lockstep needs, and write down what was there."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from driftlab.process import float64_convolutions
from driftlab.process.flags import settings

PACKAGES = ("driftlab", "torch", "torchvision", "lightning", "hydra-core", "wandb", "numpy")


DRIVER = Path("/proc/driver/nvidia/version")  # of Linux; its first line holds the number
# What the libraries below torch are told past it.
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
# What changes the numbers that compiled code gives; a torch may lack some.
INDUCTOR = (
    "numerics",
    "emulate_precision_casts",
    "emulate_precision_casts_on_saved_tensors",
    "eager_numerics.division_rounding",
    "eager_numerics.disable_ftz",
    "eager_numerics.use_pytorch_libdevice",
    "fallback_random",
    "force_same_precision",
    "use_fast_math",
    "split_reductions",
    "deterministic",
    "max_autotune",
    "max_autotune_gemm",
    "coordinate_descent_tuning",
    "layout_optimization",
    "cpp.enable_floating_point_contract_flag",
    "cpp.enable_unsafe_math_opt_flag",
    "triton.codegen_upcast_to_fp32",
)


def environment(device: torch.device) -> dict:
    """Versions, device, threads, and the settings that rounding depends on, as they are now; no path, no name
    of a host."""
    now = settings()
    widths, attention = _below("float32.", now), _below("attention.", now)
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in PACKAGES},
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "float64_convolutions": "driftlab's" if float64_convolutions.is_wanted() else "torch's",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": now["cudnn.benchmark"],
        "cudnn_deterministic": now["cudnn.deterministic"],
        "attention": ", ".join(name for name, on in attention.items() if on),
        "tf32": {
            "matmul": widths["cuda.matmul"] == "tf32",
            "cudnn": "tf32" in (widths["cuda.conv"], widths["cuda.rnn"]),
        },
        "fp32_precision": widths,
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "inductor": _inductor(),
    }


def _below(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): v for name, v in named.items() if name.startswith(prefix)}


def _driver() -> str | None:
    """Of the GPU, by its number."""
    try:
        said = DRIVER.read_text().partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\d+\.\d[\d.]*", said)
    return found and found[0]


def _inductor() -> str:
    """What is not torch's default: by a variable, or in its configuration, where somebody has imported it."""
    said = [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith("TORCHINDUCTOR_")]
    if config := sys.modules.get("torch._inductor.config"):
        known = config.get_config_copy()
        off = [n for n in INDUCTOR if n in known and not config._is_default(n)]
        said += [f"{name}={known[name]}" for name in off]
    return ", ".join(text for text in said if os.sep not in text) or "torch's defaults"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({_cpu_model()}, {torch.backends.cpu.get_cpu_capability()})"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# Of the library's parts, those by which nothing is measured.
_NO_INSTRUMENTS = ("report", "record", "verdict", "finite")


@cache
def instruments() -> str:
    """A short hash of the code by which networks are probed: other code may find something else in them."""
    home = Path(__file__).resolve().parent.parent
    files = sorted(p.relative_to(home) for p in home.rglob("*.py"))
    digest = hashlib.sha256()
    for file in (f for f in files if f.parts[0] not in _NO_INSTRUMENTS):
        digest.update(file.as_posix().encode() + b"\0" + (home / file).read_bytes())
    return digest.hexdigest()[:10]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
