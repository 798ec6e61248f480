"""The ``seed`` setting: ``3``, ``0..9`` (both ends included) or ``[0,2,5]``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from suite.command.errors import ConfigurationError

_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")
LARGEST = 2**32 - 1  # what torch, NumPy and Lightning all take
MOST = 10_000  # seeds of one command: a day and more of the shortest trainings
_HINT = "write seed=3, seed=0..9 or seed=[0,2,5]"


def parse_seeds(value: object) -> list[int]:
    """The seeds in the order given. Raises ConfigurationError for anything else than the three forms."""
    if isinstance(value, bool) or value is None:
        raise ConfigurationError(f"seed={value} is not a seed: {_HINT}")
    if isinstance(value, int):
        return [_natural(value)]
    if isinstance(value, str):
        return _from_text(value.strip())
    if isinstance(value, Iterable):
        seeds = [seed for item in value for seed in _of_list(value, item)]
        if not seeds:
            raise ConfigurationError(f"seed=[] names no seed: {_HINT}")
        if len(set(seeds)) < len(seeds):
            raise ConfigurationError(f"seed={seeds} names a seed twice")
        return seeds
    raise ConfigurationError(f"seed={value} is not a seed: {_HINT}")


def _of_list(whole: object, item: object) -> list[int]:
    if isinstance(item, Iterable) and not isinstance(item, str):
        raise ConfigurationError(f"seed={whole} holds a list in a list: {_HINT}")
    return parse_seeds(item)


def _from_text(text: str) -> list[int]:
    if re.fullmatch("[0-9]+", text):
        return [_seed(text)]
    match = _RANGE.fullmatch(text)
    if not match:
        raise ConfigurationError(f"seed={text} is not a seed: {_HINT}")
    first, last = _seed(match[1]), _seed(match[2])
    if last < first:
        raise ConfigurationError(f"seed={text} runs backwards: write seed={last}..{first}")
    if last - first >= MOST:
        raise ConfigurationError(f"seed={text} names more than {MOST} seeds: write fewer")
    return list(range(first, last + 1))


def _seed(digits: str) -> int:
    # Python reads no number of thousands of digits
    return _natural(int(digits) if len(digits.lstrip("0")) < 20 else LARGEST + 1, digits)


def _natural(value: int, text: str | None = None) -> int:
    if value < 0:
        raise ConfigurationError(f"seed={value} is negative: {_HINT}")
    if value > LARGEST:
        raise ConfigurationError(f"seed={text or value} is above {LARGEST}, the largest there is: {_HINT}")
    return value


def format_seeds(seeds: list[int]) -> str:
    """The shortest text that ``parse_seeds`` reads back (Hydra turns the list form into a list)."""
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}..{seeds[-1]}"
    return str(seeds[0]) if len(seeds) == 1 else f"[{','.join(map(str, seeds))}]"


def fan_out(arguments: list[str]) -> list[str]:
    """The command line with ``seed=0..9`` as Hydra's own sweep, for ``--multirun``: a job a seed.

    Hydra reads ``0..9`` as the string "0..9" and would start one job. With ``workers=4`` a job holds four
    seeds, side by side.
    """
    flags = [a for a in arguments if a in ("-m", "--multirun")]
    if not flags:
        return arguments
    arguments = flags + [a for a in arguments if a not in flags]  # behind settings Hydra does not know it
    workers = [a.removeprefix("workers=") for a in arguments if a.startswith("workers=")]
    together = int(workers[-1]) if workers and workers[-1].isdigit() else 1
    return [_swept(a, max(1, together)) if a.startswith("seed=") else a for a in arguments]


def _swept(argument: str, together: int) -> str:
    text = argument.removeprefix("seed=").strip("'\"")
    if text.startswith("["):
        items: list[object] = [item.strip() for item in text.strip("[]").split(",")]
    elif "," in text:
        items = [item.strip() for item in text.split(",")]
    else:
        items = [text]
    seeds = parse_seeds(items)
    jobs = [seeds[i : i + together] for i in range(0, len(seeds), together)]
    return "seed=" + ",".join(
        str(job[0]) if len(job) == 1 else f"[{','.join(map(str, job))}]" for job in jobs
    )
