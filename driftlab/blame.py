"""Whose code raised: that of the pair under examination, or driftlab's own.

The one is told to the user, who can mend it. The other is a mistake in the instrument: it must never pass for
a network that merely could not be asked.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

_OURS = str(Path(__file__).resolve().parent)
_TORCH = str(Path(find_spec("torch").origin).parent) if find_spec("torch") else "\0"
_STANDARD = sysconfig.get_path("stdlib")
# Arithmetic that stands under somebody's forward: what it cannot follow says nothing about our own code.
_UNDER_THE_PAIR = tuple(
    str(Path(_OURS, "arithmetic", f"{part}.py")) for part in ("shadow", "shadow_tensor", "draws", "bounds")
)
# Where torch hands over to a module's forward and to its backward.
_HANDED_OVER = {"_call_impl", "_engine_run_backward"}
_OPTIMIZERS = str(Path(_TORCH, "optim"))
_MISTAKES = (NameError, AttributeError, TypeError, LookupError, ImportError, AssertionError, ArithmeticError)


class AboutThePair:
    """Mixed into the errors that driftlab raises about the networks it was given."""


def theirs(function: Callable, *args: object, **kwargs: object) -> Any:
    """Call what the user handed over (a loss, an optimizer's maker): what it raises is of the user's code."""
    return function(*args, **kwargs)


# What CUDA, cuDNN, cuBLAS and their like say, and torch's allocator for the CPU: plain RuntimeErrors all.
_NO_MEMORY = re.compile(r"out of memory|_ALLOC(ATION)?_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """By name and message, since who asks may not want to wait for torch, whose error it mostly is."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def is_ours(error: BaseException, rooms: tuple[str, ...] = ()) -> bool:
    """Whether ``error`` arose in driftlab's own code, seen from the innermost frame of its traceback.

    It is the pair's where a module, a backward pass, an optimizer or ``theirs`` was at work, or a method that
    a stranger's network or optimizer has of its own. Everything else that driftlab calls is a tool of its
    own: in doubt the instrument is at fault, and no verdict rests on it.

    Args:
        rooms: folders of who calls driftlab that count as its own.
    """
    rooms = (_OURS, *rooms)
    if isinstance(error, AboutThePair) or is_out_of_memory(error):
        return False
    frames = [f for f, _ in walk_tb(error.__traceback__)]
    if frames and isinstance(error, NameError) and frames[-1].f_code.co_filename.startswith(rooms):
        return True
    for frame in reversed(frames):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_TORCH) and (function in _HANDED_OVER or file.startswith(_OPTIMIZERS)):
            return False
        if file == __file__ and function == theirs.__name__:
            return False
        if file.startswith(rooms):
            return file not in _UNDER_THE_PAIR
        if not file.startswith(_TORCH) and _is_method(frame):
            return False
    return False


def caller() -> tuple[str, int, int]:
    """File, line and place in it of the innermost code at work that is neither driftlab's nor torch's."""
    frame = _theirs(sys._getframe(1))
    return (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti) if frame else ("", 0, 0)


def callers() -> tuple[tuple[str, int, int], ...]:
    """File, first line and place of all such code at work that driftlab called, innermost first.

    The same again where it comes by there once more, as in a loop.
    """
    frame, found = _theirs(sys._getframe(1)), []
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if not frame.f_code.co_filename.startswith(_TORCH):
            found.append((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _theirs(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        frame = frame.f_back
    return frame


def module_at_work(names: Mapping[int, str]) -> str | None:
    """That whose method, whichever, is the innermost at work; ``names``: by their ``id``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and not code.co_filename.startswith(_OURS):
            own = frame.f_locals.get(code.co_varnames[0])
            if id(own) in names:
                return names[id(own)]
        frame = frame.f_back
    return None


def _is_method(frame: FrameType) -> bool:
    """Whether it runs with a network or an optimizer for its ``self``."""
    torch, code = sys.modules.get("torch"), frame.f_code
    if torch is None or not code.co_argcount:
        return False
    own = frame.f_locals.get(code.co_varnames[0])
    return issubclass(type(own), (torch.nn.Module, torch.optim.Optimizer))


def not_ours(error: BaseException) -> None:
    """For whoever takes any error of a stranger's code for an answer: raises a mistake of our own again."""
    if isinstance(error, _MISTAKES) and is_ours(error):
        raise error


@contextmanager
def unless_ours() -> Iterator[None]:
    """What a stranger's code raises inside ends that and no more; a mistake of our own is raised again."""
    try:
        yield
    except Exception as error:
        not_ours(error)


def described(error: BaseException, length: int = 150) -> str:
    """Type, message and place in one line: ``ValueError: no such axis (probes/function.py:33)``.

    The place is the innermost line of whoever is at fault; none where torch alone was at work.
    """
    message = " ".join(_message(error).split())[:length]
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = _place(error)
    return f"{said} ({'/'.join(Path(place[0]).parts[-2:])}:{place[1]})" if place else said


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an error of somebody's own, which cannot be told
        return ""


def _place(error: BaseException) -> tuple[str, int] | None:
    """File and line, as far in as the code goes that is at fault: torch and the standard library are not."""
    ours, frames = is_ours(error), list(walk_tb(error.__traceback__))
    for frame, line in reversed(frames if ours else frames[1:]):  # the first is who caught it
        file = frame.f_code.co_filename
        if not _hands_over(file) and file.startswith(_OURS) <= ours:
            return file, line
    return None


def _hands_over(file: str) -> bool:
    """Whether it is of torch, the standard library or Hydra, which call somebody's code and raise for it."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return standard or file.startswith((_TORCH, "<")) or "/hydra/_internal/" in file
