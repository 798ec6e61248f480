"""What a job leaves for whoever started it: plain data, for a job of a sweep may be another process."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode


class Ran(NamedTuple):
    """An experiment whose seeds have finished.

    Attributes:
        folder: ``<results>/<experiment>/<digest>``.
        verdict: None in a sweep, which judges once, when all of its jobs have ended.
    """

    folder: str
    seeds: list[int]
    verdict: str | None


class Ended(TypedDict, total=False):
    """How a job ended: in ``folder`` where its seeds have finished, else in one of the lines.

    Attributes:
        refused: bad configuration, in one line.
        unfinished: what stopped the seeds, in one line; the same command goes on.
        crashed: a traceback.
    """

    experiment: str
    folder: str
    seeds: list[int]
    verdict: str | None
    listed: bool  # the verdict is one of fail_on
    refused: str
    unfinished: str
    crashed: str


def in_sweep() -> bool:
    """Whether this is one job of several (``--multirun``)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
