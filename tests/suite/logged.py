"""What was logged, read back with the loggers' own readers."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

WANDB = str(Path(sys.executable).with_name("wandb"))


@cache  # the reader takes seconds to start
def records_of(run: Path) -> list[dict]:
    listed = subprocess.run(
        [WANDB, "leet", "inspect", "--json", str(run)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in listed.stdout.splitlines()]


def of_type(entries: list[dict], kind: str) -> list[dict]:
    return [e[kind] for e in entries if e["type"] == kind]


def config(entries: list[dict]) -> dict:
    """The config as it was at the start and as it was updated."""
    updates = [e.get("config", e).get("update", {}) for k in ("run", "config") for e in of_type(entries, k)]
    return {key: value for update in updates for key, value in update.items()}


def summary(entries: list[dict]) -> dict:
    return {k: v for e in of_type(entries, "summary") for k, v in e.get("update", {}).items()}


def rows(entries: list[dict]) -> list[dict]:
    return [e["item"] for e in of_type(entries, "history")]


def text_of(events, tag: str) -> str:
    return events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()


def events_in(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()
