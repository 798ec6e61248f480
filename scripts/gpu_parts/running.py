"""A part as a process of its own: started, watched, ended with its time, and again for what a crash left."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from scripts.gpu_parts.part import ROOT, Check, Part, Record

START = "the start"  # where a process died before any item


def run(part: Part, of: dict, check: Check) -> Record:
    """What became of a part whose time ends at ``check.until``.

    What was found of the same (``of``) before is kept. Where a process dies, the next one goes on after the
    item that it died of.
    """
    file, log = (check.results / f"{part.name}.{ending}" for ending in ("json", "log"))
    before = Record.read(file)
    kept = before.found if before is not None and before.of == of else {}
    if kept and before.is_done:
        return before
    record = Record(of, kept)
    record.write(file)
    log.unlink(missing_ok=True)
    status: int | None = -1
    while status and START not in record.failed:
        tried = len(record.failed)
        status = _process(part, check, log)
        record = Record.read(file) or Record(of)
        _note_the_end(record, status, tried)
        record.write(file)
    return record


def _note_the_end(record: Record, status: int | None, tried: int) -> None:
    """``status``: None where the time was over; ``tried``: how many items had failed before this process."""
    item, record.at = record.at, None
    if status is None:
        record.not_run[item or START] = "cut off when the time of its part was over"
    elif item is not None:
        record.failed[item] = _death(status)
    elif status and len(record.failed) == tried:
        record.failed[START] = _death(status)


def _death(status: int) -> str:
    """In words; below 0 it is a signal."""
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"its process ended with {name}"


def _process(part: Part, check: Check, log: Path) -> int | None:
    """Its exit status; None where its time was over."""
    size, seconds = "smoke" if check.smoke else "full", max(check.left(), 0.0)
    given = ("--results", check.results, "--minutes", seconds / 60, "--size", size, "--python", check.shell)
    command = [*check.python, "scripts/check_gpu.py", "--part", part.name, *map(str, given)]
    with open(log, "a") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        # a session of its own, so that what it has started ends with it
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
