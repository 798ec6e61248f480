"""What the disk refuses while a seed runs, in one line: what, where, how far the seed came, what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from driftlab.files import Unreadable
from experiments.errors import Unfinished

# What a disk, a quota, a mount or a network file system says; any other OSError has another cause.
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO), "bring it back"),
    **dict.fromkeys((errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN), "bring it back"),
}


@contextmanager
def storage(results: str | Path, stands: Callable[[], str]) -> Iterator[None]:
    """Turns what the disk refuses inside into ``Unfinished``.

    Args:
        results: the setting of that name.
        stands: what is safe all the same, as in "seed 3 begins again".
    """
    try:
        yield
    except Unreadable as error:
        raise Unfinished(f"{error}; {stands()}: bring it back, then the same command goes on") from None
    except OSError as error:
        if not refused_by_disk(error):
            raise
        then = f"{_REMEDIES[error.errno]}, then the same command goes on"
        raise Unfinished(f"{refusal(error, results)}; {stands()}: {then}") from None


def refused_by_disk(error: OSError) -> bool:
    return error.errno in _REMEDIES


def refusal(error: OSError, results: str | Path) -> str:
    """What was refused and where, as in "results=/x: disk quota exceeded while writing a/seed=3/run.json"."""
    what = (error.strerror or str(error)).lower()
    if error.filename is None:
        return f"results={results}: {what}"
    file, home = Path(str(error.filename)).absolute(), Path(results).absolute()
    if not file.is_relative_to(home):
        return f"{file}: {what}"
    return f"results={results}: {what} while writing {file.relative_to(home)}"
