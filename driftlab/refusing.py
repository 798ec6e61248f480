"""What cannot be asked ends in one line: errors of the user's own code, and arguments that are none."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from driftlab.blame import described, is_out_of_memory, not_ours
from driftlab.words import DiagnoseError

if TYPE_CHECKING:  # who asks may not want to wait for torch
    from torch import Tensor

LARGEST = 10**15  # of a count: computed with as a float it stays exact, and no memory holds so many


@contextmanager
def told(doing: str, outermost: bool = False) -> Iterator[None]:
    """What is raised inside becomes a line: ``doing``, the error, file and line of the user's code.

    ``sys.exit`` too, which would end the user's program as if nothing had happened. Ctrl-C goes through.

    Args:
        outermost: of the call that the user made, whether a lack of memory is told too, which further in is
            for who can do with less, and a BaseException of anybody's, which may be a signal's to who trains.

    Raises:
        DiagnoseError: in place of any error but a mistake of driftlab's own.
    """
    try:
        yield
    except DiagnoseError:
        raise
    except SystemExit as error:
        raise DiagnoseError(f"{doing}: {described(error)}, a call of sys.exit") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        not_ours(error)
        if not outermost and (is_out_of_memory(error) or not isinstance(error, Exception)):
            raise
        raise DiagnoseError(f"{doing}: {described(error, 200)}") from error


def whole_number(name: str, value: object, least: int, most: int | None = None) -> int:
    """``value`` as an int from ``least`` to ``most``. Raises DiagnoseError where it is none."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except Exception:  # whatever a stranger's number raises
        number = None
    if number is None or not least <= number <= (most or LARGEST):
        bounded = most is not None or (number is not None and number > LARGEST)
        to = f"from {least} to {most or LARGEST}" if bounded else f"{least} or more"
        raise DiagnoseError(f"{name}={shown(value)}: give a whole number, {to}")
    return number


def shown(value: object) -> str:
    """In a line, whatever it is."""
    return " ".join(reprlib.repr(value).split())


@contextmanager
def flattening(name: str, give: str) -> Iterator[None]:
    """Inside, ``name`` is taken apart. Raises DiagnoseError where that comes to no end."""
    try:
        yield
    except RecursionError:
        raise DiagnoseError(f"{name} is nested too deep, or holds itself: give {give}") from None


def is_dense(tensor: Tensor) -> bool:
    return not tensor.is_nested and str(tensor.layout) == "torch.strided"


def check_dense(name: str, tensors: Iterable[Tensor]) -> None:
    """Raises DiagnoseError where one of them is not."""
    for tensor in tensors:
        if not is_dense(tensor):
            kind = "nested" if tensor.is_nested else tensor.layout
            raise DiagnoseError(f"{name} holds a tensor that is {kind}: give it dense")


def check_values(name: str, tensors: Collection[Tensor]) -> None:
    """Raises DiagnoseError where one of them is not dense, or has no values."""
    check_dense(name, tensors)
    if any(t.is_meta for t in tensors):
        raise DiagnoseError(f"{name} holds a tensor on the meta device, without values: give it values")
