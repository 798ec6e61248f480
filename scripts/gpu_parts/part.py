"""A part of the check: named items, each measured once and kept, so that a part that was cut off goes on.

Each part runs in a process of its own, because a fault on a GPU takes all of its process with it. What it
found stands in ``<part>.json``, whatever becomes of the process.
"""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from driftlab.record.files import RecordError
from driftlab.record.json_files import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Found:
    """What an item found.

    Attributes:
        reading: a line for somebody who does not know driftlab.
        right: whether it is as it should be; None where it is a measurement and nothing else.
        values: the numbers behind it.
        beside: lines that stand below the reading.
    """

    reading: str
    right: bool | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    beside: Sequence[str] = ()


@dataclass(frozen=True)
class Check:
    """What every part is given.

    Attributes:
        results: the folder to send back.
        smoke: small sizes: does it run at all?
        shell: the command that starts Python, as a shell takes it.
        until: when the part's share of the time ends, by ``time.monotonic``.
    """

    results: Path
    smoke: bool
    shell: str
    until: float

    @property
    def python(self) -> list[str]:
        return shlex.split(self.shell)

    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()


class TooLong(Exception):  # noqa: N818 (nothing was wrong)
    """An item would take longer than what is left; the message says how long."""


Item = Callable[[Check], Found]
Items = Mapping[str, Item]


@dataclass(frozen=True)
class Part:
    """What is measured, in an order: the most telling items first, since the rest may find no time.

    Attributes:
        share: of the time, relative to the other parts'.
    """

    name: str
    title: str
    share: float
    items: Callable[[Check], Items]


@dataclass
class Record:
    """What became of a part's items, as ``<part>.json`` holds it.

    Attributes:
        of: what it was measured on and with: anything else is measured anew.
        found: by item.
        failed: by item, why.
        at: the item that was begun and has not ended.
        not_run: by item, why.
    """

    of: dict[str, Any]
    found: dict[str, dict] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    at: str | None = None
    not_run: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """None where there is none that could be used."""
        try:
            return cls(**read_json(file))
        except (RecordError, TypeError):
            return None

    def write(self, file: Path) -> None:
        write_json(file, asdict(self))

    @property
    def is_done(self) -> bool:
        return bool(self.found) and not (self.failed or self.not_run or self.at)


def carry_out(part: Part, check: Check) -> int:
    """Every item that has not been tried yet, until one fails: the next process goes on after it.

    Returns:
        An exit status: 0, or 1 where an item failed.
    """
    file = check.results / f"{part.name}.json"
    record, items = Record.read(file), part.items(check)
    todo = [name for name in items if name not in record.found and name not in record.failed]
    record.not_run, longest = dict.fromkeys(todo, "no time was left"), 0.0
    for name in todo:
        if check.left() < longest:  # the others are no shorter, as far as one can tell
            break
        del record.not_run[name]
        record.at = name
        record.write(file)
        began = time.monotonic()
        _try(items[name], name, check, record)
        longest, record.at = max(longest, time.monotonic() - began), None
        record.write(file)
        if name in record.failed:
            return 1
    record.write(file)
    return 0


def _try(item: Item, name: str, check: Check, record: Record) -> None:
    began = time.monotonic()
    try:
        found = asdict(item(check))
        record.found[name] = found | {"seconds": round(time.monotonic() - began, 1)}
    except TooLong as error:
        record.not_run[name] = str(error)
    except Exception as error:
        traceback.print_exc()
        record.failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
