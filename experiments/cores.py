"""How many seeds this machine carries out at a time, and with how many threads each."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from omegaconf import DictConfig, OmegaConf

# One thread a seed: sums then do not depend on how many cores a machine has, nor on how many seeds were
# asked for, and ten seeds take less time side by side than one after the other with all cores each
# (docs/cluster.md has the measurement).
THREADS = 1


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
    import torch

    seeds = seeds_at_once(threads, "cuda" if torch.cuda.is_available() else "cpu")
    return max(1, seeds // (1 if workers == "auto" else int(workers)))


# <malloc.h>: which of its settings mallopt sets
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_memory() -> None:
    """Let this process keep the memory that it gives back, for its next tensor; where this is glibc.

    Else each large tensor is fresh pages that the kernel fills with zeros first, and on a CPU that takes a
    third of a float64 step (docs/cluster.md). What is computed does not depend on it.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def settle_process(settings: DictConfig) -> None:
    """Memory, threads, determinism and TF32 of this process, as a seed of these settings needs them."""
    import torch

    from driftlab.environment import make_deterministic

    keep_memory()
    make_deterministic(torch.device(settings.device), tf32=settings.tf32, threads=settings.threads)


def register_resolver() -> None:
    OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, replace=True)
