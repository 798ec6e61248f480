"""What belongs to the whole process and not to a network: settings by which sums are made, and random state.

A measurement settles both, notices what the networks under it change, and leaves everything as it was.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from driftlab.process.flags import Change, changes, putting_back, settings, settle

# Who changes settings, where a probe asks for it by name.
REFERENCE, REWRITE, CANDIDATE, TRAINING = "the reference", "the rewrite", "the candidate", "the training"


class _Held:
    """The settings that a measurement needs, and who changed them since."""

    def __init__(self, tf32: bool | None, cuda: bool, say: Callable[[str], None]):
        self.tf32, self.cuda, self.say = tf32, cuda, say
        self.at_work = "a network, its loss or its optimizer"
        self.changes: list[Change] = []
        self.changed_by: dict[str, list[Change]] = {}
        self.said: dict[tuple[Change, ...], str] = {}
        self.settle()

    def settle(self) -> None:
        settle(self.tf32, self.cuda)
        self.settled = settings()

    def put_back(self) -> None:
        if not (found := changes(self.settled, settings())):
            return
        self.settle()
        self.changes += found
        if tuple(found) not in self.said:
            what = ", ".join(map(str, found))
            self.said[tuple(found)] = (
                f"{self.at_work} changes settings of the whole process, put back: {what}"
            )
            self.say(self.said[tuple(found)])


_held: list[_Held] = []
_put_callers_back: Callable[[], None] | None = None
_lock = threading.RLock()


@contextmanager
def settled(
    *, tf32: bool | None = False, cuda: bool | None = None, say: Callable[[str], None] | None = None
) -> Iterator[None]:
    """All bits of float32 and kernels that repeat themselves inside, the caller's settings afterwards.

    Of several, one inside another, the inner one holds until it ends. Several threads may be inside: the last
    to leave puts back what the first had found.

    Args:
        tf32: whether products of float32 on a GPU are to be TF32's, because that is what is asked about; None
            leaves them as they are.
        cuda: whether a GPU computes; whether torch has started one, where None.
        say: gets a line for each change that somebody makes inside; a warning at the end where None.
    """
    global _put_callers_back
    lines: list[str] = []
    with _lock:
        _put_callers_back = _put_callers_back or putting_back()
        held = _Held(tf32, torch.cuda.is_initialized() if cuda is None else cuda, say or lines.append)
        _held.append(held)
    try:
        yield
    finally:
        with _lock:
            held.put_back()
            _held.remove(held)
            if _held:
                _held[-1].settle()
            else:
                _put_callers_back()
                _put_callers_back = None
    for line in lines:
        warnings.warn(line, stacklevel=6)  # past the context managers, the call of whoever called a door


def put_back() -> None:
    """What somebody changed inside ``settled`` is said, and is as it was settled."""
    if _held:
        _held[-1].put_back()


@contextmanager
def on_purpose(choice: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside ``choice``, which changes settings for a measurement of ours: nobody is told of that change."""
    put_back()
    held = _held[-1] if _held else None
    outside = held and held.settled
    try:
        with choice:
            if held:
                held.settled = settings()
            yield
            put_back()
    finally:
        if held:
            held.settled = outside


@contextmanager
def noticed(who: str) -> Iterator[None]:
    """What is changed in here, inside ``settled``, is ``changed_by(who)``."""
    if not _held:
        yield
        return
    held = _held[-1]
    held.put_back()
    outside, held.at_work, began = held.at_work, who, len(held.changes)
    try:
        yield
    finally:
        held.put_back()
        held.at_work, held.changed_by[who] = outside, held.changes[began:]


def changed_by(who: str) -> list[Change]:
    """What ``who`` changed when it was last ``noticed``, each change once."""
    return list(dict.fromkeys(_held[-1].changed_by.get(who, ()))) if _held else []


def said() -> list[str]:
    """Who changed what since the settings were settled, a line each."""
    return list(_held[-1].said.values()) if _held else []


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Random state afterwards as before: torch's, on every device that was started, NumPy's and Python's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def defaults_kept() -> Iterator[None]:
    """What a network may change for the whole process beside ``settings``: afterwards as it was."""
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.autograd.set_detect_anomaly(*anomaly)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)


@contextmanager
def measuring() -> Iterator[None]:
    """``settled``, the caller's random state and defaults kept: what a measurement for somebody runs in."""
    with random_state_kept(), defaults_kept(), settled():
        yield
