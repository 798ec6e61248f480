"""JSON of a run: strict, and sealed where damage that still parses, a flipped digit say, must be noticed.

``write_sealed`` adds the SHA-256 of a file's content to it. A file without one is taken as it is: others
write records too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from driftlab.record.files import RecordError, read_text, write_whole

DEEPEST = 60  # levels: what walks the value later must not run out of stack
SEAL = "seal"


def write_json(path: Path, value: object) -> str:
    """Strict JSON: NaN and inf, which JSON has no word for, become null and the strings "inf", "-inf".

    Returns:
        The SHA-256 of the file.
    """
    return write_whole(path, json.dumps(_strict(value), indent=1, allow_nan=False) + "\n")


def write_sealed(path: Path, value: Mapping) -> str:
    """As ``write_json``, with a key ``seal`` more: of the rest, as ``seal`` makes it."""
    rest = json.loads(json.dumps(_strict(value), allow_nan=False))
    return write_json(path, {**rest, SEAL: seal(rest)})


def seal(value: Mapping) -> str:
    """SHA-256 of a JSON object: keys sorted, no spaces, ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _strict(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def read_json(path: Path) -> dict:
    """Raises RecordError where the file is missing, cut off, no JSON object, or not what its seal says."""
    return unsealed(path, *parse_json(path))


def unsealed(path: Path, value: dict, exact: bool) -> dict:
    """An object without its seal, from ``parse_json``. Raises RecordError where the seal is not its own."""
    rest = {k: v for k, v in value.items() if k != SEAL}
    if SEAL in value and not (exact and value[SEAL] == seal(rest)):
        raise RecordError(f"{path} is damaged: its content is not what its {SEAL} says")
    return rest


def parse_json(path: Path) -> tuple[dict, bool]:
    """The object with its seal, and whether its numbers stand there as ``write_json`` writes them.

    A float64 has several names of seventeen digits: a changed digit may give another name of the same number.

    Raises:
        RecordError: the file is missing, cut off or no JSON object.
    """
    other_names: list[str] = []

    def number(kind: type, text: str) -> float:
        if not math.isfinite(float(text)):  # whole numbers too: what computes with one makes it a float
            raise ValueError("it holds a number beyond float64")
        value = kind(text)
        if repr(value) != text:
            other_names.append(text)
        return value

    try:
        kinds = {"parse_constant": float, "parse_float": float, "parse_int": int}
        hooks = {name: partial(number, kind) for name, kind in kinds.items()}
        value = json.loads(read_text(path), **hooks)
    except RecordError:
        raise
    except RecursionError:
        raise RecordError(f"{path} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path} is damaged: it holds no JSON object")
    if _is_deep(value):
        raise RecordError(f"{path} is damaged: it is nested too deeply")
    return value, not other_names


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [v for node in level for v in _nodes_in(node)]
        if not level:
            return False
    return True


def _nodes_in(node: dict | list) -> list:
    values = node.values() if isinstance(node, dict) else node
    return [v for v in values if isinstance(v, dict | list)]
