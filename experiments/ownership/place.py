"""The steps on the place itself and on what lies beside it; why they are safe is said in the package."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from experiments.ownership.processes import Process, is_running


def is_free(place: Path) -> bool:
    try:
        os.rmdir(place)
    except FileNotFoundError:
        return True
    except NotADirectoryError:  # the lock file of an earlier version; unlink spares what is a place by now
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def rename_onto(private: Path, place: Path) -> None:
    """Some servers (SFTP, SMB) do not say that the place is owned, only that they refuse.

    Where the same directory may be given another name, it was the place that they meant.

    Raises:
        OSError: ENOTEMPTY where the place is owned, mostly.
    """
    try:
        os.rename(private, place)
    except PermissionError:
        other_name = private.with_name(f"{private.name}.renamed")
        os.rename(private, other_name)
        os.rename(other_name, private)
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(place)) from None


def put_out(place: Path, is_dead: Callable[[Path], bool]) -> bool:
    """True where somebody was, so that it is worth trying again at once."""
    changed = False
    try:
        for name in os.listdir(place):
            if is_dead(place / name):
                os.unlink(place / name)
                changed = True
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):  # left, or passed on, meanwhile
            raise
    return changed


def sweep(place: Path) -> None:
    """Remove what contenders that died on their way here left beside it.

    A contender on another machine may lose its private directory by this. It is renamed away first, so that
    it cannot become the place while it is emptied; its maker finds it missing and makes another.
    """
    with suppress(OSError):
        for name in os.listdir(place.parent):
            if name.startswith(f"{place.name}.") and not is_running(Process.written_in(name)):
                gone = place.with_name(f"{place.name}.{secrets.token_hex(8)}")
                with suppress(OSError):
                    os.rename(place.with_name(name), gone)
                    remove(gone, *os.listdir(gone))


def remove(directory: Path, *names: str) -> None:
    for name in names:
        with suppress(OSError):
            os.unlink(directory / name)
    with suppress(OSError):
        os.rmdir(directory)
