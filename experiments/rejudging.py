"""Judging stored runs again: which there are, and from their files to a new verdict and a new report."""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path

from omegaconf import DictConfig

from driftlab.records import RecordError, SeedRecord
from driftlab.report.rendering import in_page
from driftlab.report.sections import Answer
from driftlab.rules import judge as judge_records
from driftlab.verdict import Judgement
from experiments.command_line import check_kind
from experiments.errors import ConfigurationError, one_line
from experiments.judging import readable, write_verdict
from experiments.stored_run import SETTINGS, measurements, read_settings
from experiments.terminal import Terminal

WRITE_INSTEAD = "write a folder such as results/runs/<experiment>/<digest>, or one above"


@dataclass(frozen=True)
class Stored:
    """An experiment's folder as it was read: at least one finished seed.

    Attributes:
        answer: what a kind that asks a question has to show beside its verdict; None where it trains.
    """

    folder: Path
    settings: DictConfig
    digest: str
    records: list[SeedRecord]
    judgement: Judgement
    answer: Answer | None = None

    @property
    def seeds(self) -> list[int]:
        return [record.seed for record in self.records]

    def summary(self) -> Stored:
        """The same less what its seeds measured, so that of many experiments one at a time is held whole."""
        return replace(self, records=[SeedRecord(seed, [], []) for seed in self.seeds], answer=None)

    @property
    def unfinished(self) -> int:
        """How many seeds were begun and have not finished."""
        homes = [h for h in self.folder.glob("seed=*") if re.fullmatch(r"seed=-?\d+", h.name)]
        return sum(not (home / "run.json").exists() for home in homes)


def find_runs(given: Sequence[str]) -> list[Path]:
    """The experiments' folders at or below the given folders, globs expanded, each once, in their order.

    Raises:
        ConfigurationError: there is none at or below one of them.
    """
    found: dict[Path, None] = {}
    for name in given:
        folders = sorted(glob(name, recursive=True)) if has_magic(name) else [name]
        runs = [run for folder in folders for run in _below(Path(folder))]
        if not runs:
            raise ConfigurationError(f"{name} {_why_none(Path(name))}: {WRITE_INSTEAD}")
        found |= dict.fromkeys(runs)
    return list(found)


def _below(folder: Path) -> list[Path]:
    """Those in a folder; an experiment's own folder is not searched any further."""
    runs = []
    for place, folders, files in os.walk(folder):
        folders.sort()
        if SETTINGS in files:
            runs.append(Path(place))
            folders.clear()
    return runs


def _why_none(path: Path) -> str:
    if has_magic(str(path)):
        return "matches no experiment"
    if not path.exists():
        return "does not exist"
    return "is a file" if path.is_file() else "holds no experiment (no experiment.yaml)"


def rejudge(folder: Path, terminal: Terminal) -> Stored | None:
    """``verdict.json`` and ``report.html`` of one experiment again, and the files of its answer.

    Returns:
        None where no seed has finished; nothing is written then.

    Raises:
        ConfigurationError: its settings cannot be read, or none of its finished seeds.
    """
    run = read_run(folder, terminal)
    if run is None:
        return None
    write_verdict(folder, run.digest, run.settings, run.records, run.judgement, run.answer)
    if run.answer is not None:
        from experiments.questions.asking import write_answer

        write_answer(folder, run.answer)
    return run


def read_run(folder: Path, terminal: Terminal) -> Stored | None:
    """An experiment, judged; nothing is written. Raises as ``rejudge`` does."""
    settings = read_settings(folder)
    kind = settings.get("kind", "training")
    try:
        check_kind(str(kind))
    except ConfigurationError as error:
        raise ConfigurationError(f"{folder / SETTINGS}: {error}") from None
    if not any(folder.glob("seed=*/run.json")):
        return None
    records = _of_one_experiment(folder, readable(folder, terminal), terminal)
    if kind == "training":
        judgement, answer = judge_records(records, settings.get("subject", "candidate")), None
    else:
        records, judgement, answer = _answered(folder, kind, settings, records, terminal)
    return Stored(folder, settings, records[0].run["digest"], records, judgement, answer)


def _of_one_experiment(folder: Path, records: list[SeedRecord], terminal: Terminal) -> list[SeedRecord]:
    """Those of one digest: the folder's name where a seed has it, else that of most seeds."""
    if not records:
        raise ConfigurationError(f"{folder} holds no finished seed that can be read: run its command again")
    digests = Counter(r.run["digest"] for r in records)
    digest = folder.name if folder.name in digests else digests.most_common(1)[0][0]
    for record in records:
        if (other := record.run["digest"]) != digest:
            seed = f"{folder}/seed={record.seed}"
            terminal.say(f"left out of the verdict: {seed} is of digest {other}, not of {digest}")
    return [r for r in records if r.run["digest"] == digest]


# What code that trusts its own measurements raises where a stored one is not of the form it wrote.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecordError)


def _answered(
    folder: Path, kind: str, settings: DictConfig, records: list[SeedRecord], terminal: Terminal
) -> tuple[list[SeedRecord], Judgement, Answer]:
    """From all seeds; where that fails, from those that can be answered from alone."""
    question = importlib.import_module(f"experiments.{kind}").QUESTION

    def of(records: list[SeedRecord]) -> tuple[Judgement, Answer]:
        answer = question.answer(settings, measurements(folder, records))
        for figure in answer.figures:
            in_page(figure)  # what cannot be drawn has to be known before anything is written
        return question.judge(records), answer

    try:
        return records, *of(records)
    except _MALFORMED as error:
        reason, sound = one_line(error), []
    for record in records:
        try:
            of([record])
            sound.append(record)
        except _MALFORMED as error:
            terminal.say(f"left out of the verdict: {folder}/seed={record.seed}: {one_line(error)}")
    if not sound or len(sound) == len(records):
        raise ConfigurationError(f"{folder} cannot be answered as {kind}: {reason}")
    return sound, *of(sound)
