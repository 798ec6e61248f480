"""One owner at a time of a piece of work, among processes on many machines, by atomic renames alone.

``place`` is a directory that is owned while a **token** lies in it: an empty file whose name says who the
owner is, so that nothing has to be written or read, and nothing can be half there.

- **Take**: make a private directory with the token in it and rename it onto ``place``. That succeeds only
  where ``place`` is missing or empty (POSIX): a test and a set in one, decided by the file server.
- **Leave**, and **put out a dead owner**: unlink the token, by its name. A name is never used again, so this
  hits only the owner that was meant, however late it comes; a request that the network repeats finds nothing.
  Putting out gives nobody the place; whoever then takes it first has it.
- **Is it free?** ``rmdir(place)``: it succeeds only on an empty directory, which means the same as none, and
  the server answers it, never a cache.
- **Do I still own it?** Set the times of the token: the server refuses that for a file that is gone. (Were a
  place passed on by renaming its token, the file would live on, and a client that remembers its handle would
  be told yes.)

A listing may be old or torn: it only proposes whom to look at, and each step that counts is one of these.

Who is dead? A process of this machine: at once, by its number and start time; while it is stopped (SIGSTOP)
it is alive. All others (``Watcher``): each owner sets the times of its token every ``HEARTBEAT`` seconds,
and is dead to a watcher that saw them stand still for ``PATIENCE`` seconds of its own monotonic clock. The
times are compared with nothing but themselves, so no two clocks need agree, and a jump is only a change. A
requeued Slurm job waits in this way for its earlier self: after a node failure that may still run.

Not filelock's lease (4.2.11), which fails these tests: it replaces a dead owner by exchanging two names, and
NFS and SMB refuse that; one killed between making its file and writing it bars the place for good (it came
up in 100 kills); and one that is stopped on this machine loses it after a single lease.

What no lock by renames can do is stop a hand already raised: an owner that was paused for ``PATIENCE`` may
finish the write that it was in before ``check`` tells it. Waiting is not fair, and a thread that waits for
what it owns itself waits for ever.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from suite.running.ownership.contenders import (
    Process,
    Watcher,
    is_free,
    put_out,
    remove,
    rename_onto,
    sweep,
    this_process,
)

HEARTBEAT = 20.0  # seconds
PATIENCE = 180.0  # seconds: nine heartbeats, and three times what NFS clients remember of a file
_SLOWEST = 10  # polls: who waits long asks less and less often, down to this

_OUTRUN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_held: set[tuple[int, str]] = set()  # process number (a fork inherits the set) and token


class OwnershipLost(RuntimeError):  # noqa: N818 (it says what happened)
    """Another process works here now, or this one is a fork of the owner. The message is one line."""


class Owner:
    """The right to work at ``place``, of the process that took it, until it leaves or is put out."""

    def __init__(self, place: Path):
        self.place = place
        self._pid = os.getpid()
        job = re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", ""))  # for the person who looks
        named = [str(this_process() or "unknown"), f"slurm={job}" if job else "", secrets.token_hex(8)]
        self._token = ".".join(filter(None, named))
        self._stopped = threading.Event()

    def check(self) -> None:
        """Ask the file server whether this process owns the place: before each step that nobody may double.

        Raises:
            OwnershipLost: it does not.
            OSError: the folder is gone, or cannot be reached or written. Nobody can say then, nor store work.
        """
        if os.getpid() != self._pid:
            raise OwnershipLost(f"{self.place} is owned by the process that this one was forked from")
        if self._is_there():
            return
        if not self.place.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.place.parent))
        raise OwnershipLost(
            f"{self.place} was taken over by another process, since this one was paused or cut off from the "
            "folder for minutes and seemed dead: this one stops, the other goes on"
        )

    def _is_there(self) -> bool:
        try:
            os.utime(self.place / self._token)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _take(self) -> bool:
        """False where somebody else was first. A reply may be lost: what counts is where the token lies."""
        private = self.place.with_name(f"{self.place.name}.{self._token}")
        _held.add((self._pid, self._token))
        taken = False
        try:
            os.mkdir(private)
            with open(private / self._token, "w"):
                pass
            rename_onto(private, self.place)
            taken = True
        except OSError as error:
            if error.errno not in _OUTRUN or not self.place.parent.is_dir():
                raise
            taken = self._is_there()
        finally:
            if not taken:  # else, to a client that missed the reply, private is still there: it is the place
                self._remove_all(private)
        return taken

    def _keep_alive(self, heartbeat: float) -> None:
        while not self._stopped.wait(heartbeat):
            with suppress(OSError):  # the next beat may reach the folder again; whoever has to know asks
                self._is_there()

    def _leave(self) -> None:
        if os.getpid() == self._pid:
            self._stopped.set()
            self._remove_all(self.place)

    def _remove_all(self, directory: Path) -> None:
        """What cannot be removed now is a dead owner's: here at once, elsewhere when this process ends."""
        remove(directory, self._token)
        _held.discard((self._pid, self._token))


@contextmanager
def owned_by_me(
    place: Path,
    *,
    wait: bool = True,
    waiting: Callable[[], None] | None = None,
    heartbeat: float = HEARTBEAT,
    patience: float = PATIENCE,
    poll: float = 0.5,
) -> Iterator[Owner | None]:
    """Own ``place`` inside the ``with``: no other process and no other thread does.

    Args:
        place: a name in a folder that exists. While it is owned a directory lies there, and at times, beside
            it, what contenders make, under names that begin with its own; afterwards nothing.
        wait: until it is free. Else None comes at once where it has an owner that is alive, or on another
            machine, where that cannot be told at once.
        waiting: called once, when the waiting begins.
        heartbeat: seconds from one sign of life to the next.
        patience: seconds without one after which an owner elsewhere is dead. The same two for all contenders.
        poll: seconds from one look to the next, at first.

    Raises:
        OSError: the folder is missing, or cannot be written.
    """
    owner = Owner(Path(place))
    try:
        if not _acquire(owner, Watcher(heartbeat, patience), wait, waiting, (poll, heartbeat)):
            yield None
            return
        threading.Thread(target=owner._keep_alive, args=[heartbeat], daemon=True).start()
        sweep(owner.place)
        yield owner
    finally:
        owner._leave()


def _acquire(
    owner: Owner,
    watcher: Watcher,
    wait: bool,
    waiting: Callable[[], None] | None,
    pauses: tuple[float, float],
) -> bool:
    pause, longest = pauses[0], min(pauses[0] * _SLOWEST, pauses[1])
    while not (is_free(owner.place) and owner._take()):
        if put_out(owner.place, lambda token: _is_dead(token, watcher)):
            continue
        if not wait:
            return False
        if waiting is not None:
            waiting()
            waiting = None
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    return True


def _is_dead(token: Path, watcher: Watcher) -> bool:
    if (os.getpid(), token.name) in _held:
        return False
    process = Process.written_in(token.name)
    left_behind = process is not None and process == this_process()  # by a thread that could not remove it
    return left_behind or watcher.is_dead(token)
