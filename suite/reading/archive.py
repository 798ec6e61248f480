"""Stored experiments: which lie below a folder, and each judged again from its files, without training."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.progress import track

from driftlab.record.seed_record import RecordError, SeedRecord
from driftlab.report.sections import in_page
from suite.command import command_line
from suite.command.errors import ConfigurationError, one_line
from suite.reading.judging import Judged, judge, write
from suite.reading.stored import SETTINGS, finished, read_settings
from suite.showing.tables import print_whole, runs_table
from suite.showing.terminal import Terminal

if TYPE_CHECKING:
    from suite.running.asking import Question

WRITE_INSTEAD = "write a folder such as results/runs/<experiment>/<digest>, or one above"

# What stands beside the folder of an experiment: the list of its runs, the page of its rewrites.
BESIDE = (".txt", ".rewrites.html")


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
    for ending in BESIDE:
        if folder.is_file():
            folder = folder.with_name(folder.name.removesuffix(ending))
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


def judge_again(folder: Path, say: Callable[[str], None], *, ran_here: bool = False) -> Judged | None:
    """``verdict.json`` and ``report.html`` of one experiment again, and the files of its answer.

    Args:
        ran_here: whether this command's own jobs carried it out.

    Returns:
        None where no seed has finished; nothing is written then.

    Raises:
        ConfigurationError: its settings cannot be read, or none of its finished seeds.
    """
    judged = read_judged(folder, say, ran_here=ran_here)
    if judged is None:
        return None
    judged = replace(judged, ran_here=ran_here)
    write(judged)
    return judged


def read_judged(folder: Path, say: Callable[[str], None], *, ran_here: bool = False) -> Judged | None:
    """An experiment, judged; nothing is written. Arguments and errors as of ``judge_again``."""
    settings = read_settings(folder)
    question = _question(folder, str(settings.get("kind", "training")))
    if not any(folder.glob("seed=*/run.json")):
        return None
    digest, records = _of_one_experiment(folder, _finished(folder, say, ran_here), say)
    if question is None:
        return judge(folder, settings, digest, records, None)
    return _answered(folder, settings, digest, records, question, say)


def _question(folder: Path, kind: str) -> Question | None:
    """What a kind asks; one that trains asks nothing more than all do, and need not be imported."""
    try:
        return None if kind == "training" else command_line.kind(kind).QUESTION
    except ConfigurationError as error:
        raise ConfigurationError(f"{folder / SETTINGS}: {error}") from None


def _finished(folder: Path, say: Callable[[str], None], ran_here: bool) -> list[SeedRecord]:
    """Those that can be read, and a line of each other; where none can, the first of these is the reason."""
    left_out: list[str] = []
    records = finished(folder, left_out.append, ran_here=ran_here)
    if not records:
        why = left_out[0].partition(": ")[2] if left_out else "run its command again"
        raise ConfigurationError(f"{folder} holds no finished seed that can be read: {why}")
    for line in left_out:
        say(line)
    return records


def _of_one_experiment(
    folder: Path, records: list[SeedRecord], say: Callable[[str], None]
) -> tuple[str, list[SeedRecord]]:
    """Those of one digest: the folder's name where a seed has it, else that of most seeds."""
    digests = Counter(r.run["digest"] for r in records)
    digest = folder.name if folder.name in digests else digests.most_common(1)[0][0]
    for record in records:
        if (other := record.run["digest"]) != digest:
            seed = f"{folder}/seed={record.seed}"
            say(f"left out of the verdict: {seed} is of digest {other}, not of {digest}")
    return digest, [r for r in records if r.run["digest"] == digest]


# What code that trusts its own measurements raises where a stored one is not of the form it wrote.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecordError)


def _answered(
    folder: Path,
    settings: DictConfig,
    digest: str,
    records: list[SeedRecord],
    question: Question,
    say: Callable[[str], None],
) -> Judged:
    """From all seeds; where that fails, from those that can be answered from alone."""

    def of(records: list[SeedRecord]) -> Judged:
        judged = judge(folder, settings, digest, records, question)
        for figure in judged.answer.figures:
            in_page(figure)  # what cannot be drawn has to be known before anything is written
        return judged

    try:
        return of(records)
    except _MALFORMED as error:
        reason, sound = one_line(error), []
    for record in records:
        try:
            of([record])
            sound.append(record)
        except _MALFORMED as error:
            say(f"left out of the verdict: {folder}/seed={record.seed}: {one_line(error)}")
    if not sound or len(sound) == len(records):
        raise ConfigurationError(f"{folder} cannot be answered as {settings.kind}: {reason}")
    return of(sound)


def judge_all(given: Sequence[str], fail_on: Sequence[str]) -> int:
    """Judge every experiment at or below ``given`` and print a line each; returns the exit status.

    What cannot be judged is said on stderr, and the others are judged all the same.

    Raises:
        ConfigurationError: there is no experiment at or below one of them.
    """
    terminal, folders = Terminal(), find_runs(given)
    judged, unfinished, refused = [], [], []
    in_a_log = not terminal.console.is_terminal
    for folder in track(folders, "judging", console=terminal.console, transient=True, disable=in_a_log):
        try:
            run = judge_again(folder, terminal.say)
        except ConfigurationError as error:
            refused.append(str(error))
        except Exception as error:  # one run of a sweep, maybe a stranger's, must not stop the others
            refused.append(f"{folder} cannot be judged: {one_line(error)}")
        else:
            judged += [run.less_measurements()] if run else []
            unfinished += [] if run else [folder]
    if judged or unfinished:
        print_whole(terminal.console, runs_table(judged, unfinished))
    if not judged and not refused:
        refused.append("no seed has finished in any of them: nothing was judged")
    for line in refused:
        print(f"error: {line}", file=sys.stderr)
    return 2 if refused else 3 if any(run.judgement.verdict in fail_on for run in judged) else 0
