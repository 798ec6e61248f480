"""Those who contend for a place: which of them live, asked on any machine; and each step they make there.

Why the steps are safe is said in the package.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_WRITTEN = re.compile(r"machine=([0-9a-f]{16})\.pid=(\d+)\.start=(\d+)")
_THREADS, _STARTED = 17, 19  # fields 20 and 22 of /proc/PID/stat (man proc_pid_stat), counted from the third


@dataclass(frozen=True)
class Process:
    """One process, told apart from every other of any machine, earlier ones with its number included.

    Attributes:
        machine: a hash of what makes a process number mean something: this boot of the kernel and the
            namespaces. The host name is in it too, for virtual machines that were cloned while they ran and
            share the rest.
        start: when it started, in the kernel's clock ticks since the boot.
    """

    machine: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"machine={self.machine}.pid={self.pid}.start={self.start}"

    @classmethod
    def written_in(cls, text: str) -> Process | None:
        """The one that ``text`` names; None where it names none."""
        found = _WRITTEN.search(text)
        return cls(found[1], int(found[2]), int(found[3])) if found else None


def this_process() -> Process | None:
    """None where there is no ``/proc`` that shows it. Asked anew each time: a fork changes the answer."""
    pid = os.getpid()
    with suppress(OSError, ValueError, IndexError):
        if int(os.readlink("/proc/self")) == pid:  # else it is the /proc of another namespace
            return Process(_machine(), pid, _stat(pid)[1])
    return None


def is_running(process: Process | None) -> bool | None:
    """None where that cannot be told from here: another machine, another container, nothing known of it.

    A stopped process (SIGSTOP) runs. A zombie does not, once all its threads are gone.
    """
    here = this_process()
    if process is None or here is None or process.machine != here.machine:
        return None
    with suppress(OSError, ValueError, IndexError):
        running, start = _stat(process.pid)
        return running and start == process.start
    with suppress(PermissionError, OverflowError):
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return False
    return None  # it is there, but /proc hides it (hidepid)


class Watcher:
    """Tells which files' processes are dead: at once on this machine, else once they give no sign of life.

    A sign of life is a change of the file's modification time.

    Args:
        heartbeat: seconds from one sign to the next.
        patience: seconds without one, of this watcher's monotonic clock.
    """

    def __init__(self, heartbeat: float, patience: float):
        self._heartbeat, self._patience = heartbeat, patience
        self._seen: dict[Path, tuple[int, float, float]] = {}

    def is_dead(self, file: Path) -> bool:
        """Whether the process that the name of ``file`` tells is dead.

        Raises:
            FileNotFoundError: the file is gone.
        """
        running = is_running(Process.written_in(file.name))
        return self._is_silent(file) if running is None else not running

    def _is_silent(self, file: Path) -> bool:
        asked = time.monotonic()
        now = os.stat(file, follow_symlinks=False).st_mtime_ns
        last, silence, looked = self._seen.get(file, (None, 0.0, asked))
        # while this process stood still, or the file server, the other may have been unable to be heard
        silence = silence + min(asked - looked, self._heartbeat) if now == last else 0.0
        self._seen[file] = now, silence, time.monotonic()
        return silence >= self._patience and now == _asked_of_server(file)


def _asked_of_server(file: Path) -> int:
    """Its modification time, past what an NFS client remembers: it asks whenever a file is opened."""
    opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.fstat(opened).st_mtime_ns
    finally:
        os.close(opened)


def _machine() -> str:
    namespaces = [os.readlink("/proc/self/ns/pid")]
    with suppress(OSError):  # since Linux 5.6
        namespaces.append(os.readlink("/proc/self/ns/time"))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256("\n".join([boot, socket.gethostname(), *namespaces]).encode()).hexdigest()[:16]


def _stat(pid: int) -> tuple[bool, int]:
    """Whether it runs, and when it started. The name of the program may hold blanks and brackets."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    ended = fields[0] in (b"Z", b"X") and int(fields[_THREADS]) <= 1  # the first thread may end before others
    return not ended, int(fields[_STARTED])


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
