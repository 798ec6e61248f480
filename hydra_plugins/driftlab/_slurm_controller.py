"""What the Slurm controller says of jobs. Needs no accounting (sacct), which many small clusters lack."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

# Every other state may still become one of these.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
DEFAULT_MAX_ARRAY = 1001
PATIENCE = 60  # seconds for one answer of a controller that is busy


class ControllerError(RuntimeError):
    """Slurm did not answer. The message is its own, in one line."""


class State(NamedTuple):
    """A job in the queue.

    Attributes:
        name: ``PENDING``, ``RUNNING``, ... as squeue writes it.
        reason: why it waits.
    """

    name: str
    reason: str


def states(arrays: Iterable[str]) -> dict[str, State]:
    """The state of every job of these arrays that Slurm still knows, in one call.

    Slurm forgets a job MinJobAge seconds after its end (300 by default). Raises ControllerError.
    """
    try:
        text = _ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(arrays)}",
                    "--format=%i|%T|%r")  # fmt: skip
    except ControllerError as error:
        if "Invalid job id" in str(error):  # it has forgotten all of them
            return {}
        raise
    rows = (line.split("|", 2) for line in text.splitlines())
    return {name: State(state, reason) for name, state, reason in rows}


def how_it_ended(job_id: str, listed: State | None) -> str:
    """``FAILED, exit code 1`` and the like, as far as Slurm still knows."""
    try:
        text = _ask("scontrol", "--oneliner", "show", "job", job_id)
    except ControllerError:
        return listed.name if listed else "Slurm no longer knows how"
    fields = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S*)", text))
    code, _, by_signal = fields.get("ExitCode", "0:0").partition(":")
    parts = [fields.get("JobState", "in an unknown state")]
    if fields.get("Reason", "None") not in ("None", parts[0]):
        parts.append(f"reason {fields['Reason']}")
    if code != "0":
        parts.append(f"exit code {code}")
    if by_signal not in ("", "0"):
        parts.append(f"signal {by_signal}")
    return ", ".join(parts)


def max_array_size() -> int:
    """How many jobs one array may have (MaxArraySize). Raises ControllerError."""
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"))
    return int(found[1]) if found else DEFAULT_MAX_ARRAY


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ControllerError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise ControllerError(" ".join(done.stderr.split()) or f"{command[0]} ended with {done.returncode}")
    return done.stdout
