"""Files written whole or not at all, and read back with care: they may be damaged, or a stranger's.

What is read is a regular file of a sane size, never a pipe or a device. Links are followed: people keep large
runs elsewhere; who reads a stranger's run looks for them first (``suite.reading``). What is written replaces
a link, and never goes through it.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

LARGEST = 2**30  # bytes: no table and no JSON of a run comes near
PART = ".part"
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class RecordError(ValueError):
    """A stored file that cannot be what driftlab wrote; the message is one line and names the file."""


class MissingFile(RecordError):  # noqa: N818 (it is no error where a seed has not finished)
    """There is no such file."""


class Unreadable(RecordError):  # noqa: N818
    """The disk or its rights do not let the file be read: it may be sound, and must not be replaced."""


class OtherVersion(RecordError):  # noqa: N818
    """Another version of driftlab wrote the file; ``version`` is its number, where it is known."""

    def __init__(self, message: str, version: str | None):
        super().__init__(message)
        self.version = version


def version() -> str:
    """The number of this driftlab."""
    try:
        return metadata.version("driftlab")
    except metadata.PackageNotFoundError:
        return "unknown"


def as_version(value: object) -> str | None:
    """A version's number as a file tells it, where it is one: it becomes part of messages and of names."""
    return value if isinstance(value, str) and re.fullmatch(r"\w[\w.+!-]{0,39}", value, re.ASCII) else None


def write_whole(path: Path, text: str | bytes) -> str:
    """Write a file so that a reader, or a crash, finds the old content or the new, never a part.

    Returns:
        The SHA-256 of the content.

    Raises:
        OSError: the disk is full, say; ``filename`` is ``path``.
    """
    data = text.encode() if isinstance(text, str) else text
    write_pieces(path, [data])
    return hashlib.sha256(data).hexdigest()


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """As ``write_whole``, one piece after the other, of a content that nobody wants to hold twice."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # not the temporary name, if any
        raise


def remove_parts(folder: Path) -> None:
    """What writers left that were killed while they wrote into ``folder``; for its only writer to call."""
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def check_regular(path: Path, largest: float = math.inf) -> None:
    """That there is a file to be read, no pipe and no device.

    Raises:
        MissingFile: there is none.
        Unreadable: the disk or its rights do not let it be read.
        RecordError: it is no file, or larger than ``largest`` bytes.
    """
    with readable(path):
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise RecordError(f"{path} is damaged: it is no file")
        if about.st_size > largest:
            raise RecordError(f"{path} is damaged: {about.st_size:,} bytes are more than a run writes")
        open(path, "rb").close()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Names what keeps a file from being read: MissingFile or Unreadable instead of OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in _MISSING:
            raise MissingFile(f"{path} is missing") from None
        raise Unreadable(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def read_whole(path: Path, largest: int = LARGEST) -> bytes:
    """A file's content. Raises as ``check_regular`` does."""
    check_regular(path, largest)
    with readable(path), open(path, "rb") as file:
        return file.read(largest + 1)


def read_text(path: Path, largest: int = LARGEST) -> str:
    """As ``read_whole``, of UTF-8."""
    try:
        return read_whole(path, largest).decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is damaged: byte {error.start:,} is no UTF-8") from None
