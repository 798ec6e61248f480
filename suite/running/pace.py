"""When a seed leaves a checkpoint: by what one costs, and when Slurm warns that the job is about to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What checkpoints may cost: an hour of training takes 36 s longer.
SHARE = 0.01
# Seconds. A seed that begins again takes about as long to start (docs/cluster.md) as it then has to repeat.
SHORTEST = 30.0
# Minutes are what a job that is killed without a warning may lose, however slow the disk.
LONGEST = 300.0

# Slurm at preemption and at the time limit; submitit asks for the last one, a job script for any of them.
WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Pace:
    """Tells when the next checkpoint is due.

    Args:
        every: seconds from one to the next; ``auto``: as often as they take ``SHARE`` of the time, but no
            more seldom than ``LONGEST``.
    """

    def __init__(self, every: float | str):
        self._every, self._last, self._cost = every, time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        """From one checkpoint to the next, by what the last one took."""
        if self._every == "auto":
            return min(max(self._cost / SHARE, SHORTEST), LONGEST)
        return float(self._every)

    def is_due(self) -> bool:
        return time.monotonic() - self._last >= self.seconds

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what a checkpoint costs."""
        began = time.monotonic()
        yield
        self._last = time.monotonic()
        self._cost = self._last - began


class Warned:
    """Lets a warning wait for the end of the step under way, stores that, and then passes the warning on.

    Whoever handled it before does then what it does: submitit puts the job back into the queue, a worker
    goes on, and where nobody did, the process ends. It watches a training (``before_step``, ``after_step``).

    Args:
        store: ``store(next_step)``.
    """

    def __init__(self, store: Callable[[int], None]):
        self._store, self._heard = store, []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Warned:
        if threading.current_thread() is threading.main_thread():  # no other one may handle signals
            ours = [n for n in WARNINGS if signal.getsignal(n) is not None]  # else it is not Python's
            self._before = {number: signal.signal(number, self._hear) for number in ours}
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._pass_on()

    def _hear(self, number: int, frame: object) -> None:
        if number not in self._heard:
            self._heard.append(number)

    def before_step(self, step: int) -> None:
        pass

    def after_step(self, step: int) -> None:
        if self._heard:
            self._store(step + 1)
            self._pass_on()

    def _pass_on(self) -> None:
        while self._heard:
            number = self._heard.pop(0)
            mine = signal.signal(number, self._before[number])
            signal.raise_signal(number)  # Python's own handlers have run when this returns
            signal.signal(number, mine)
