"""The pretended GPUs of a process: how many there are, which is chosen, and what the host waited for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tests.pretended_cuda.memory import lent

TORCH = os.path.dirname(torch.__file__)
HERE = os.path.dirname(__file__)


class Wait(NamedTuple):
    """The host waited for the device.

    Attributes:
        what: the operation.
        place: ``file:line`` that asked for it, outside torch.
    """

    what: str
    place: str


class Device:
    """The pretended GPUs of this process.

    Attributes:
        waited: what the host waited for, in order.
    """

    def __init__(self, gpus: int, name: str):
        self._gpus, self.name, self._current = gpus, name, 0
        self.waited: list[Wait] = []

    def count(self) -> int:
        """As many as ``CUDA_VISIBLE_DEVICES`` leaves, which is read before the first use."""
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self._gpus if chosen is None else len([c for c in chosen.split(",") if c])

    def current(self) -> int:
        return self._current

    def choose(self, index: int) -> int:
        """The GPU that was chosen before."""
        before = self._current
        if index >= 0:
            self._current = index
        return before

    def lends(self, asked: object) -> object:
        """Where a device that Python asks for is in C++; anything else as it is.

        Raises:
            RuntimeError: there are fewer GPUs.
        """
        if isinstance(asked, str) and asked.startswith("cuda"):
            asked = torch.device(asked)
        if not isinstance(asked, torch.device) or asked.type != "cuda":
            return asked
        torch.cuda._lazy_init()
        index = self._current if asked.index is None else asked.index
        if index >= self.count():
            raise RuntimeError(f"CUDA error: invalid device ordinal ({asked} of {self.count()})")
        return lent(index)

    def waits(self, what: str) -> None:
        self.waited.append(Wait(what, _place()))

    @contextmanager
    def drawing(self, index: int) -> Iterator[None]:
        own, cpu = torch.cuda.default_generators[index], torch.default_generator
        before = cpu.get_state()
        cpu.set_state(own.get_state())
        try:
            yield
            own.set_state(cpu.get_state())
        finally:
            cpu.set_state(before)


def _place() -> str:
    frame = sys._getframe()
    while frame and frame.f_code.co_filename.startswith((TORCH, HERE, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
