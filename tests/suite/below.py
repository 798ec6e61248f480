"""Files below a folder that others are at work in: what vanishes meanwhile is passed over."""

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path


def below(folder: Path | str, pattern: str) -> Iterator[Path]:
    """Those whose name, of a file or a folder, is like ``pattern``."""
    for at, folders, files in os.walk(folder):
        yield from (Path(at) / name for name in (*folders, *files) if fnmatch(name, pattern))
