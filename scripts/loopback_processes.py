"""The processes of one loopback Slurm, found by the folder that they work in (Linux only)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")


def daemons(folder: Path) -> list[tuple[int, list[str]]]:
    """Process id and arguments of each daemon of this folder."""
    ours = {f"{folder}/slurm.conf", f"--key-file={folder}/munge.key"}
    commands = [(pid, text.split("\0")[:-1]) for pid, text in _processes("cmdline")]
    return [(pid, c[1:]) for pid, c in commands if c and Path(c[0]).name in DAEMONS and ours & set(c)]


def job_processes(folder: Path) -> list[int]:
    """What the jobs run, and the slurmstepd processes that watch over them. Never this process."""
    setting = f"SLURM_CONF={folder}/slurm.conf"
    inside = [
        pid
        for pid, text in _processes("environ")
        if setting in text.split("\0") and "\0SLURM_JOB_ID=" in f"\0{text}"
    ]
    watching = [
        pid for pid, name in _processes("comm") if name.strip() == "slurmstepd" and _opens(pid, folder)
    ]
    return sorted({*inside, *watching} - {os.getpid()})


def send(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def _processes(about: str) -> Iterator[tuple[int, str]]:
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            yield int(place.name), (place / about).read_bytes().decode(errors="replace")


def _opens(pid: int, folder: Path) -> bool:
    try:
        return any(folder in Path(os.readlink(f)).parents for f in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
