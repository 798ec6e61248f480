"""Jobs side by side, each in a process of its own that ends with this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker

import cloudpickle

from suite.command.supervision import STOPS, end_with

# Slurm and terminals tell every process; what a worker is to do its parent decides, by ending it
HEARD_BY_THE_PARENT = (*STOPS, signal.SIGUSR1, signal.SIGUSR2)

# Where a signal ends this process, multiprocessing's tracker clears its locks away, and would say so.
_NO_NEWS = "ignore:resource_tracker:UserWarning"  # the tracker is started with it

Heard = Callable[[str, tuple], None]  # the name of a message, and what it says


class WorkerKilled(RuntimeError):  # noqa: N818 (it says what happened)
    """Somebody killed a process of the pool, mostly the kernel for want of memory. All of them have ended."""


def side_by_side(
    jobs: Mapping[int, Callable[[], object]],
    at_once: int,
    heard: Heard = lambda name, said: None,
    gpus: Sequence[str] = (),
) -> Iterator[tuple[int, object]]:
    """Each job's key and what it returned, as they end. What a job raises is raised here, and ends all.

    Args:
        heard: gets what the jobs ``tell``, in a thread of its own.
        gpus: names for ``CUDA_VISIBLE_DEVICES``, one a process, from the first on.

    Raises:
        WorkerKilled: the jobs that have not been yielded did not end.
    """
    if _NO_NEWS not in sys.warnoptions:
        sys.warnoptions.append(_NO_NEWS)
    _start_tracker()
    context = multiprocessing.get_context("spawn")
    messages, started = context.Queue(), context.Value("i", 0)
    listener = threading.Thread(target=_listen, args=(messages, heard), daemon=True)
    listener.start()
    executor = ProcessPoolExecutor(
        at_once, context, _settle_in, (os.getpid(), messages, started, tuple(gpus))
    )
    try:
        futures = {executor.submit(_called, cloudpickle.dumps(job)): key for key, job in jobs.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise WorkerKilled from None
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
        messages.put(None)
        listener.join(timeout=5)  # one that was killed in the middle of a word leaves it waiting


def _start_tracker() -> None:
    """It is deaf to SIGINT and SIGTERM, and inherits to be so to the others that end a whole group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS.keys() - {signal.SIGINT, signal.SIGTERM})
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(messages: multiprocessing.Queue, heard: Heard) -> None:
    while (message := messages.get()) is not None:
        heard(*message)


_parent: list[multiprocessing.Queue] = []


def tell(name: str, *said: object) -> None:
    """Say something to the process that this one is a worker of."""
    _parent[0].put((name, said))


def _settle_in(parent: int, messages: multiprocessing.Queue, started: object, gpus: tuple[str, ...]) -> None:
    for heard_by_the_parent in HEARD_BY_THE_PARENT:
        signal.signal(heard_by_the_parent, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    _parent.append(messages)
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def _called(job: bytes) -> object:
    return cloudpickle.loads(job)()


def visible_gpus() -> list[str]:
    """What to give ``side_by_side`` on a machine with several."""
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(n) for n in range(torch.cuda.device_count())]
