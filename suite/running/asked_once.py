"""Probes off the training's path: an experiment asks them of one seed, and its other seeds take the answer.

They feed modules and optimizers what no seed's training may come to, so what another seed's weights would add
to them is little. Whichever seed comes to one first asks it; who comes meanwhile waits, no longer than asking
would take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.record.environment import environment, instruments
from driftlab.record.seed_record import RecordError, read_json, write_sealed
from driftlab.words import Finding, Status
from suite.reading.stored import wrong_probe
from suite.running.ownership import owned_by_me

POLL = 0.2  # seconds: a probe takes some tenths of one to a few
# Seconds; then it is asked all the same: who holds the place may be stopped, or have died on another machine.
LONGEST_WAIT = 60.0


def made_today(device: torch.device) -> dict:
    """What an answer of the probes hangs on besides the settings: where it was given, and by which code."""
    return {"environment": environment(device), "instruments": instruments()}


def is_of(record: Mapping, made_by: Mapping) -> bool:
    """Whether the stored answers were given there, by that code."""
    return {key: record.get(key) for key in made_by} == made_by


def checked(stored: Path) -> dict:
    """The stored answers of probes. Raises RecordError where they cannot be what was written."""
    record = read_json(stored)
    if wrong := wrong_probe(record.get("probes")):
        raise RecordError(f"{stored} is damaged: {wrong} cannot be read")
    return record


def asked_once(probe: Probe, folder: Path, seed: str, made_by: Mapping) -> Probe:
    """The same probe, which takes the answer that another seed of ``folder`` has, and else leaves its own.

    Args:
        seed: that asks, as its folder is called.
        made_by: as of ``made_today``; an answer of another environment, or of other code, is not taken.
    """

    def ask(found: Examination) -> list[Finding]:
        stored, until = folder / "probes" / f"{probe.name}.json", time.monotonic() + LONGEST_WAIT
        while True:
            with _alone(folder / f".probe={probe.name}.owner") as alone:
                if (taken := _taken(stored, made_by)) is not None:
                    return taken
                if alone or time.monotonic() > until:
                    return _leaving(list(probe.ask(found)), stored, {"asked_of": seed} | made_by)
            time.sleep(POLL)

    return replace(probe, ask=ask)


@contextmanager
def _alone(place: Path) -> Iterator[bool]:
    """Whether nobody else is at it. A folder that cannot be written is for the seed's own files to tell."""
    with ExitStack() as held:
        try:
            alone = held.enter_context(owned_by_me(place, wait=False)) is not None
        except OSError:
            alone = True
        yield alone


def _leaving(found: list[Finding], stored: Path, about: Mapping) -> list[Finding]:
    """The findings, left for the other seeds where they answer; what else was found is of this seed alone."""
    if any(f.evidence.status is not Status.ANSWERED for f in found):
        return found
    told = [f.adding(f"; asked once, of {about['asked_of'].replace('=', ' ')}") for f in found]
    with suppress(OSError):
        write_sealed(stored, {"probes": [f.as_dict() for f in told]} | about)
    return told


def _taken(stored: Path, made_by: Mapping) -> list[Finding] | None:
    """None where there is no answer to be taken: where none lies there, or a damaged one."""
    try:
        record = checked(stored)
    except RecordError:
        return None
    return [Finding.from_dict(f) for f in record["probes"]] if is_of(record, made_by) else None
