"""What this machine gives to a run: its device, its scale, threads, seeds at a time, and memory.

Asked where the job runs. Nothing here imports torch before it is asked for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from omegaconf import DictConfig, OmegaConf

from suite.command.command_line import CONF
from suite.command.errors import ConfigurationError

# One thread a seed: sums then do not depend on how many cores a machine has, nor on how many seeds were
# asked for, and ten seeds take less time side by side than one after the other with all cores each
# (docs/cluster.md has the measurement).
THREADS = 1


def register_resolvers() -> None:
    """What the files in ``conf/`` may ask of the machine."""
    OmegaConf.register_new_resolver("scale_of_this_machine", scale_of_this_machine, replace=True)
    OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, replace=True)


def scale_of_this_machine(device: str) -> DictConfig:
    """``scale=auto``: full on a GPU, small on a CPU."""
    gpu = device != "cpu" and has_gpu()
    chosen = OmegaConf.load(CONF / "scale" / ("full.yaml" if gpu else "small.yaml"))
    chosen["why"] = f"auto: {'a GPU' if gpu else 'the CPU'} runs this job"
    return chosen


def has_gpu() -> bool:
    if (theirs := _on_the_node.get()) is not None:
        return theirs
    import torch

    return torch.cuda.is_available()


_on_the_node: ContextVar[bool | None] = ContextVar("on_the_node", default=None)


@contextmanager
def as_on_the_node(gpu: bool | None) -> Iterator[None]:
    """Inside, whether there is a GPU is what is known of the machine that will run a job; None: this one."""
    token = _on_the_node.set(gpu)
    try:
        yield
    finally:
        _on_the_node.reset(token)


def chosen_device(wanted: str) -> str:
    """``cpu`` or ``cuda``. Raises ConfigurationError."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(f"device={wanted} is unknown: write auto, cpu or cuda")
    if wanted == "cuda" and not has_gpu():
        raise ConfigurationError("device=cuda, but torch finds no CUDA device here: write device=cpu or auto")
    return "cuda" if wanted != "cpu" and has_gpu() else "cpu"


def threads_chosen(threads: int | str | None) -> int | None:
    return THREADS if threads == "auto" else threads


def seeds_at_once(threads: int | str | None, device: str = "cpu") -> int:
    """As many as the cores that this process may use carry without sharing; on GPUs one each."""
    if device == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    from joblib import cpu_count  # knows affinity and the quotas of containers

    return max(1, cpu_count() // (threads_chosen(threads) or cpu_count()))


def jobs_at_once(threads: int | str | None, workers: int | str) -> int:
    """Of a sweep on one machine (``hydra/launcher=joblib``), whose jobs hold ``workers`` seeds each."""
    seeds = seeds_at_once(threads, "cuda" if has_gpu() else "cpu")
    return max(1, seeds // (1 if workers == "auto" else int(workers)))


@contextmanager
def environment_without(names: Iterable[str]) -> Iterator[None]:
    """Inside, none of these variables is set."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def process_settled(settings: DictConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Memory, threads, determinism, TF32 and kernels of this process as seeds of these settings need them.

    A model, a rewrite or whatever else they run that changes them is said, and changes them in vain.
    """
    import torch

    from driftlab.process import settled
    from driftlab.process.float64_convolutions import faster

    _keep_memory()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    def tell(line: str) -> None:
        say(line + ("; tf32=true trains every arm on a GPU with it" if "tf32" in line else ""))

    on_cpu = settings.device == "cpu"
    fast = faster(on_cpu and settings.get("fast_float64", False))
    with settled(tf32=settings.tf32, cuda=not on_cpu, say=tell), fast:
        yield


# <malloc.h>: which of its settings mallopt sets
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes. Kept without such a bound, memory fell to pieces: at width 64 and batch 128 a process that needs 6 GB
# grew beyond 20 (float64 activations of 67 MB); at width 32 (6 arms, 3 steps) 9.7 GB, with the bound 4.9,
# without keeping any 4.1, at the same speed.
_FRESH_FROM = 64 * 2**20


def _keep_memory() -> None:
    """Let this process keep the memory that it gives back, for its next tensor; where this is glibc.

    Else each tensor of some size is fresh pages that the kernel fills with zeros first: 13 to 17 % of a step
    at ``small`` (2 pairs of 25 steps on one thread). What is computed does not depend on it.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _FRESH_FROM)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
