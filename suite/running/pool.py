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
from multiprocessing import forkserver, resource_tracker

import cloudpickle

from suite.command.supervision import STOPS

# Slurm and terminals tell every process; what a worker is to do its parent decides, by ending it
HEARD_BY_THE_PARENT = (*STOPS, signal.SIGUSR1, signal.SIGUSR2)

# What a training takes seconds to import. None of it may ask for a GPU before the fork.
IMPORTED_ONCE = ["torch", "torchvision", "torch._dynamo", "lightning", "hydra"]

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
    context = _context()
    messages, started = context.Queue(), context.Value("i", 0)
    listener = threading.Thread(target=_listen, args=(messages, heard), daemon=True)
    listener.start()
    executor = ProcessPoolExecutor(
        at_once, context, _settle_in, (dict(os.environ), messages, started, tuple(gpus))
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


def _context() -> multiprocessing.context.BaseContext:
    """Where a fork after an import is safe, processes are forks of one that has imported what takes long."""
    forked = sys.platform == "linux"
    context = multiprocessing.get_context("forkserver" if forked else "spawn")
    _started_deaf(resource_tracker.ensure_running)  # by itself, since its start lets signals through again
    if forked:
        context.set_forkserver_preload(IMPORTED_ONCE)
        _started_deaf(forkserver.ensure_running)
    return context


def _started_deaf(start: Callable[[], None]) -> None:
    """What is started inherits to be deaf to signals that a whole group of processes gets."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_BY_THE_PARENT)
    try:
        start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(messages: multiprocessing.Queue, heard: Heard) -> None:
    while (message := messages.get()) is not None:
        heard(*message)


_parent: list[multiprocessing.Queue] = []


def tell(name: str, *said: object) -> None:
    """Say something to the process that this one is a worker of."""
    _parent[0].put((name, said))


def _settle_in(
    environment: dict[str, str], messages: multiprocessing.Queue, started: object, gpus: tuple[str, ...]
) -> None:
    """``environment``: the parent's of now; a fork has that of the first that was asked for."""
    os.environ.clear()
    os.environ.update(environment)
    for heard_by_the_parent in HEARD_BY_THE_PARENT:
        signal.signal(heard_by_the_parent, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_BY_THE_PARENT)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _parent.append(messages)
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def _end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _called(job: bytes) -> object:
    return cloudpickle.loads(job)()


def visible_gpus() -> list[str]:
    """What to give ``side_by_side`` on a machine with several."""
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(n) for n in range(torch.cuda.device_count())]
