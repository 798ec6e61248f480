"""Fetches CIFAR-10 once, verified, into the folder that every run reads it from."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from suite.data import DataError, cifar10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--root", type=Path, help="where to keep it (default: DRIFTLAB_DATA, or the user's cache)"
    )
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="default: 300")
    arguments = parser.parse_args()
    try:
        root = arguments.root or cifar10.default_root()
        images = cifar10.load(root, arguments.time_limit, lambda line: print(line, file=sys.stderr))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{root}: {images.source}, SHA-256 {images.sha256}")
    return 0


if __name__ == "__main__":
    supervision.end(main)
