"""Arrays as text, compact enough that a seed's predictions stand in its measurements."""

from __future__ import annotations

import base64

import numpy as np


def packed(array: np.ndarray, dtype: str) -> dict:
    """``array`` in little-endian ``dtype`` ("i2", "f2") as base64 with its shape."""
    little = np.ascontiguousarray(array, dtype=f"<{dtype}")
    return {
        "dtype": dtype,
        "shape": list(little.shape),
        "base64": base64.b64encode(little.tobytes()).decode(),
    }


def unpacked(stored: dict) -> np.ndarray:
    """What ``packed`` was given, in the precision that it was stored in. Raises ValueError where damaged."""
    flat = np.frombuffer(base64.b64decode(stored["base64"], validate=True), dtype=f"<{stored['dtype']}")
    return flat.reshape(stored["shape"])
