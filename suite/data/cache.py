"""Where data that was fetched is kept: the folder, and how several processes share it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from suite.data.images import DataError, UnobtainableError


def default_root() -> Path:
    """The folder for data: ``DRIFTLAB_DATA``, else ``XDG_CACHE_HOME/driftlab``, else ``~/.cache/driftlab``.

    Raises ``DataError`` where there is no home folder to put it in.
    """
    if chosen := os.environ.get("DRIFTLAB_DATA"):
        return expanded(chosen)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "driftlab"


def expanded(path: str | Path) -> Path:
    """With ``~`` as a path. Raises ``DataError`` where there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: there is no such home folder; name one by DRIFTLAB_DATA=…") from error


def locked(what: str, file: Path, time_limit_s: float, say: Callable[[str], None]) -> AbstractContextManager:
    """The lock on this file, held, after waiting for whoever fetches under it."""
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is fetching {what} into {file.parent}: waiting for it")
    try:
        # The other may need its whole time limit, and then some time to write.
        return lock.acquire(timeout=time_limit_s + 60)
    except Timeout as error:
        reason = f"another process has been fetching it for over {time_limit_s:g} s"
        raise UnobtainableError(f"{what} in {file.parent}: {reason}; end that process", reason) from error


def written_whole(file: Path, content: bytes) -> None:
    """Written whole or not at all; only under the lock, for all writers use one temporary name."""
    part = file.with_name(f".{file.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
