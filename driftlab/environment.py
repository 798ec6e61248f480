"""Where a run takes place: set the determinism that lockstep needs, and write down what was there."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

PACKAGES = ("driftlab", "torch", "torchvision", "lightning", "hydra-core", "wandb", "numpy")


def make_deterministic(device: torch.device, *, tf32: bool = False, threads: int | None = None) -> None:
    """Fix what changes the order or the width of sums from run to run.

    TF32 is off unless it is what is being asked about: cuDNN convolutions use it by default, and its
    11 bits would drown every difference that round-off makes.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # as use_deterministic_algorithms(True, warn_only=True), which would import torch's compiler: 2.5 s
    torch.set_deterministic_debug_mode("warn")
    # filling fresh memory with NaN shows reads of it, at the price of another pass over every tensor
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def environment(device: torch.device) -> dict:
    """Versions, device, threads, determinism flags and TF32 as they are now; no path, no name of a host."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in PACKAGES},
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
    }


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


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
