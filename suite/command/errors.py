"""The two errors that end a command with a line (exit status 2 and 1), and what becomes one of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from driftlab.blame import is_out_of_memory
from driftlab.record.files import Unreadable


class ConfigurationError(ValueError):
    """Something the user gave cannot be used. The message is one line: what, where, what to write instead."""


class Unfinished(Exception):  # noqa: N818 (nothing was wrong)
    """The run was stopped by its surroundings (a full disk, say); the same command goes on. Exit status 1.

    The message is one line: what, where, how far the seed came, what to do.
    """


def unfinished_by(error: BaseException) -> str | None:
    """A line where the surroundings, not the run, brought about what was raised."""
    if is_out_of_memory(error):
        return f"memory does not hold a seed: {one_line(error)}"
    if type(error).__name__ == "UncompletedJobError":  # submitit's, at the last time limit
        return f"{one_line(error)} Write a larger hydra.launcher.timeout_min, then the same command goes on"
    # rich answers a broken pipe with a SystemExit
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        return "nobody reads what is printed (broken pipe): the same command goes on"
    return None


def exit_called(asked: SystemExit) -> str:
    """A line for code that called ``sys.exit`` in a run: what it asks for would pass for the run's own.

    Raises:
        SystemExit: the same, where submitit asks: it has put this job back into Slurm's queue.
    """
    frames = list(walk_tb(asked.__traceback__))
    if any(frame.f_globals.get("__name__", "").startswith("submitit.") for frame, _ in frames):
        raise asked
    places = [(frame.f_code.co_filename, line) for frame, line in reversed(frames)]
    file, line = next(place for place in places if not place[0].startswith("<"))  # exit() is in Python itself
    return (
        f"{file}:{line} ends the run with sys.exit({asked.code!r}), and no verdict was written: "
        "raise an error there instead"
    )


def one_line(error: BaseException) -> str:
    """The first line that says something, of an error raised by somebody else's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# What a disk, a quota, a mount or a network file system says; any other OSError has another cause.
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files"),
    errno.EISDIR: "move it away",
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
        if _deleted(error, results):
            raise Unfinished(
                f"{error.filename} is gone, deleted while the run was at work: the same command goes on with "
                "what is left"
            ) from None
        if not refused_by_disk(error):
            raise
        then = f"{_REMEDIES[error.errno]}, then the same command goes on"
        raise Unfinished(f"{_refusal(error, results)}; {stands()}: {then}") from None


def _deleted(error: OSError, results: str | Path) -> bool:
    """Whether a file or folder of the results is not where the run had put it."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR) or error.filename is None:
        return False
    return Path(str(error.filename)).absolute().is_relative_to(Path(results).absolute())


def refused_by_disk(error: OSError) -> bool:
    return error.errno in _REMEDIES


def _refusal(error: OSError, results: str | Path) -> str:
    """What was refused and where, as in "results=/x: disk quota exceeded while writing a/seed=3/run.json"."""
    what = (error.strerror or str(error)).lower()
    if error.filename is None:
        return f"results={results}: {what}"
    file, home = Path(str(error.filename)).absolute(), Path(results).absolute()
    if not file.is_relative_to(home):
        return f"{file}: {what}"
    return f"results={results}: {what} while writing {file.relative_to(home)}"
