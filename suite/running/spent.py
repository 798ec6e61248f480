"""Where the processor time of a seed goes: ``times.processor_seconds`` of its ``run.json``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Spent:
    """Seconds of this process, all threads of it, by what they went for. What lies inside counts once."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._open, self._last = ["else"], time.process_time()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        self._charge()
        self._open.append(what)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def skip(self, instead: float = 0.0) -> None:
        """What has passed since the last time was somebody else's; so many seconds count ``instead``."""
        self._seconds[self._open[-1]] += instead
        self._last = time.process_time()

    def seconds(self) -> dict[str, float]:
        """So far, the most first."""
        self._charge()
        return {what: round(seconds, 3) for what, seconds in self._seconds.most_common()}

    def _charge(self) -> None:
        now = time.process_time()
        self._seconds[self._open[-1]] += now - self._last
        self._last = now
