"""What workers say, on the terminal of the process that started them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from experiments.pool import Heard, tell
from experiments.terminal import Terminal

SECONDS_BETWEEN_STEPS = 0.25


class Relay:
    """In a worker, in place of a ``Terminal``: the methods of it that a seed calls."""

    def __init__(self):
        self._last_step = 0.0

    def say(self, text: str) -> None:
        tell("say", text)

    def step(self, seed: int, step: int, row: Mapping[str, float]) -> None:
        if (now := time.monotonic()) - self._last_step >= SECONDS_BETWEEN_STEPS:
            self._last_step = now
            tell("step", seed, step, dict(row))

    def seed_done(self, seed: int, record: Mapping) -> None:
        tell("seed_done", seed, {key: record[key] for key in ("arms", "times")})


def relayed_to(terminal: Terminal) -> Heard:
    return lambda name, said: getattr(terminal, name)(*said)
