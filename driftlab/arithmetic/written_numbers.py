"""Numbers that stand in code beside tensors, such as an epsilon: as written, and as float32 stores them."""

from __future__ import annotations

import struct
from functools import lru_cache

# Of a number that people write: 1e-6, 1.702, 0.0447. Of so many digits one float32 in 10,000 has as few.
DIGITS = 4


def in_float32(number: object) -> object:
    """As float32 stores it; but not one that would be gone in 0 or 1, which nobody writes down."""
    if not isinstance(number, float) or (stored := _stored(number)) is None:
        return number
    return number if stored in (0.0, 1.0, -1.0) else stored


def as_written(number: object) -> object:
    """The decimal that float32 made this of, where it is one of few digits.

    Operations that torch makes of others, as ``rms_norm``, round their epsilon to float32 first: to the exact
    arithmetic they would be another function than the same written out, by up to 6e-8 of the epsilon.
    """
    return _decimal(number) if type(number) is float else number


@lru_cache(maxsize=1024)
def _decimal(number: float) -> float:
    written = float(f"{number:.{DIGITS}g}")
    rounded = _stored(number) == number != written
    return written if rounded and _stored(written) == number else number


def _stored(number: float) -> float | None:
    """None of one beyond float32's largest."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return None
