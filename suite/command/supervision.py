"""The front door under watch: a command runs in a child, and this process ends as the child told.

Whatever ends a process before its time (``os._exit`` in somebody's rewrite, a fault in compiled code, the
kernel for want of memory) can then not pass for success, and is said in one line. Nothing inside the process
could tell: it is gone. The fork comes before anything heavy is imported, and costs a few milliseconds.

What asks for an end (``STOPS``) raises ``Stopped``, so that owners leave their seeds and the terminal gets
its cursor back; where that takes too long, or somebody's code catches it, the child is killed: that loses
nothing either.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

STOPS = {
    **{signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"},
    **{signal.SIGHUP: "hung up", signal.SIGQUIT: "quit"},
}
GRACE = 8  # seconds to leave in order: docker stop, the least patient, kills all after ten


class Stopped(BaseException):
    """A signal asks this process to end. No ``Exception``, which somebody's code would catch."""


_heard: list[int] = []  # the signal that asked this process to end
_telling: list[int] = []  # in the child: the pipe to who watches


def begin() -> None:
    """Go on in a child, whose signals raise ``Stopped``; this process waits for it and exits as it told."""
    watcher = os.getpid()
    _open_standard_streams()
    reading, writing = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    child = os.fork()
    os.close(writing if child else reading)
    if child:
        sys.exit(_watch(child, reading))
    _telling.append(writing)
    sys.unraisablehook = _unraisable
    sys.excepthook = _uncaught
    _handle(lambda number, frame: _stop(number, watcher))
    threading.Thread(target=end_with, args=(watcher,), daemon=True).start()


def end(main: Callable[[], int]) -> NoReturn:
    """Exit with the status that ``main`` returns, and tell it to who watches."""
    try:
        status = _status(main)
        for number in STOPS:  # what comes now are other people's exit handlers
            signal.signal(number, signal.SIG_IGN)
    except (Stopped, KeyboardInterrupt):
        status = _said(_heard[0] if _heard else signal.SIGINT)
    try:
        sys.stdout.flush()
        if not status and _nobody_reads():  # argparse and logging keep quiet about what they could not write
            status = 128 + signal.SIGPIPE
    except OSError as error:  # nobody reads; Python would say so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            status = status or 128 + signal.SIGPIPE
    for pipe in _telling:
        with suppress(OSError):
            os.write(pipe, bytes([status]))
    sys.exit(status)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # POLLERR is told unasked
    return any(told & select.POLLERR for _, told in poll.poll(0))


def raise_if_stopped() -> None:
    """Whoever caught an error asks whether it is one in the wake of ``Stopped``."""
    if _heard:
        raise Stopped(_heard[0])


def end_with(parent: int) -> None:
    """For a thread: a process that outlives its parent goes on unseen, and owns what others ask for."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _status(main: Callable[[], int]) -> int:
    try:
        return main()
    except SystemExit as asked:
        if isinstance(asked.__context__, BrokenPipeError):  # rich's
            return 128 + signal.SIGPIPE
        return asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BrokenPipeError:  # head(1) has read enough: as other tools, without a word
        return 128 + signal.SIGPIPE
    except Exception:  # ours, which deserves its traceback
        raise_if_stopped()
        traceback.print_exc()
        return 1


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP, and a shell's & SIGINT
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _stop(number: int, watcher: int) -> None:
    """Once: what is left has to come to its end. The watcher may not have heard, and its patience counts."""
    if _heard:
        return
    _heard.append(number)
    with suppress(ProcessLookupError):
        os.kill(watcher, number)
    raise Stopped(number)


def _unraisable(lost) -> None:
    """``Stopped`` in a destructor, where Python prints what is raised: who watches ends this process."""
    if not isinstance(lost.exc_value, Stopped):
        sys.__unraisablehook__(lost)


def _uncaught(kind: type[BaseException], *error) -> None:
    """``Stopped`` before ``end``, among the imports: who watches has the line."""
    if not issubclass(kind, Stopped):
        sys.__excepthook__(kind, *error)


def _watch(child: int, reading: int) -> int:
    """The exit status: what the child told, else what became of it."""

    def kill(number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not _heard:
            signal.alarm(GRACE)
        _heard.append(number)
        kill(number)

    signal.signal(signal.SIGALRM, lambda number, frame: kill(signal.SIGKILL))
    _handle(pass_on)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(reading, False)  # a process that the child left behind may hold the other end
    with suppress(BlockingIOError):
        if told := os.read(reading, 1):
            return told[0]
    stopped = _heard[0] if _heard else -ended
    if stopped in STOPS:
        return _said(stopped)
    print(f"error: {_untold(ended)}", file=sys.stderr)
    return 1


def _said(number: int) -> int:
    with suppress(OSError):  # the terminal that hung up
        print(f"{STOPS[signal.Signals(number)]}: the same command goes on from here", file=sys.stderr)
    return 128 + number


def _open_standard_streams() -> None:
    """Where one is closed (``>&-``) the next file would take its place, and get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def _untold(ended: int) -> str:
    """What became of a process that told nothing; its exit code, negative: the signal."""
    if ended == -signal.SIGKILL:
        return "the process was killed, perhaps because memory ran out: the same command goes on from here"
    if ended < 0:
        name = signal.Signals(-ended).name
        return f"the process crashed in compiled code ({name}), and no verdict was written: try again"
    return (
        f"something that the run called ended the process (os._exit, exit status {ended}), and no verdict "
        "was written: take that call out of the rewrite, model or optimizer"
    )
