"""From the finished seeds of an experiment to the verdict over them, and the files that say it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from driftlab.record.differing import differences
from driftlab.record.seed_record import SCHEMA, SeedRecord, write_json, write_whole
from driftlab.report import write_report
from driftlab.report.beside import LABELS, write_beside
from driftlab.report.cells import numbers_apart
from driftlab.report.compare_tables import Side
from driftlab.report.sections import Answer, as_csv, as_files, shown
from driftlab.verdict.rules import judge as judge_records
from driftlab.words import Judgement
from suite.command.errors import ConfigurationError
from suite.command.seeds import format_seeds
from suite.command.written import title
from suite.reading.stored import as_yaml, measurements

if TYPE_CHECKING:
    from suite.running.asking import Question


AS_RECORDED = (
    "The command stands here as the records name it. They were judged again, and nothing was run: "
    "read it before you copy it."
)


@dataclass(frozen=True)
class Judged:
    """An experiment's folder and the verdict over the seeds in it.

    Attributes:
        records: of the finished seeds that it rests on.
        answer: what a kind that asks a question has to show beside its verdict; None where it trains.
        ran_here: whether this very command carried it out; else it may be a stranger's.
    """

    folder: Path
    settings: DictConfig
    digest: str
    records: list[SeedRecord]
    judgement: Judgement
    answer: Answer | None
    ran_here: bool = False

    @property
    def seeds(self) -> list[int]:
        return [record.seed for record in self.records]

    @property
    def unfinished(self) -> int:
        """How many seeds were begun and have not finished."""
        homes = [h for h in self.folder.glob("seed=*") if re.fullmatch(r"seed=-?\d+", h.name)]
        return sum(not (home / "run.json").exists() for home in homes)

    def less_measurements(self) -> Judged:
        """The same less what its seeds measured, so that of many experiments one at a time is held whole."""
        return replace(self, records=[SeedRecord(seed, [], []) for seed in self.seeds], answer=None)


def judge(
    folder: Path, settings: DictConfig, digest: str, records: list[SeedRecord], question: Question | None
) -> Judged:
    """All of these seeds together; by their measurements too, where a question was asked."""
    if question is None:
        judgement = judge_records(records, settings.get("subject", "candidate"))
        return Judged(folder, settings, digest, records, judgement, None)
    answer = question.answer(settings, measurements(folder, records))
    return Judged(folder, settings, digest, records, question.judge(records), answer)


def write(judged: Judged) -> dict[str, str]:
    """``verdict.json``, ``report.html`` and the files of the answer; where they lie, by name.

    Raises:
        ConfigurationError: a link stands where a folder has to be.
    """
    folder = judged.folder
    write_json(folder / "verdict.json", _as_contract(judged))
    files = {"verdict": str(folder / "verdict.json"), "report": str(write_page(judged))}
    if judged.answer is None:
        return files | {"curves": f"{folder}/seed=*/curves.csv"}
    _write_answer(folder, judged.answer)
    return files | {"tables": f"{folder}/tables/*.csv", "figures": f"{folder}/figures/*.svg, *.png"}


def write_page(judged: Judged) -> Path:
    """``report.html`` alone."""
    return write_report(judged.folder, judged.records, judged.judgement, _about(judged), judged.answer)


def write_together(runs: Sequence[Judged]) -> Path:
    """``<experiment>.rewrites.html`` beside the experiment's folder: candidates that share a reference."""
    titles = [title(judged.settings).split() for judged in runs]
    named = [" ".join(w for w in words if not all(w in t for t in titles)) for words in titles]
    sides = [
        Side(label, name or title(j.settings), j.digest, j.settings, j.records, j.judgement)
        for label, name, j in zip(LABELS, named, runs, strict=False)
    ]
    kind = runs[0].folder.parent
    reports = [f"{kind.name}/{judged.digest}/report.html" for judged in runs]
    return write_beside(kind.with_name(f"{kind.name}.rewrites.html"), sides, reports)


def _about(judged: Judged) -> dict:
    settings, records = judged.settings, judged.records
    return {
        "experiment": title(settings),
        "digest": judged.digest,
        "hypothesis": settings.hypothesis,
        "expected": settings.expected,
        "command": repeat_command(records),
        "command_note": "" if judged.ran_here else AS_RECORDED,
        "settings": as_yaml(settings),
        "dataset": records[0].run["dataset"] if records else {},
    }


def _as_contract(judged: Judged) -> dict:
    records = judged.records
    return {
        "schema": SCHEMA,
        "experiment": judged.settings.name,
        "digest": judged.digest,
        **judged.judgement.as_dict(),
        "seeds": judged.seeds,
        "environment": _environments(records),
        "dataset": records[0].run["dataset"] if records else None,
    }


def _environments(records: list[SeedRecord]) -> dict:
    """The environment of the seeds; where they differ, those of the others by seed: kernels differ too."""
    if not records:
        return {}
    first = records[0].run["environment"]
    others = {r.seed: r.run["environment"] for r in records if r.run["environment"] != first}
    if not others:
        return first
    found = differences({r.seed: r.run["environment"] for r in records})
    return {**first, "differs_for_seeds": others, "differences": [d.as_dict() for d in found]}


def repeat_command(records: list[SeedRecord]) -> str:
    """The command line that trains the same seeds again; a comment where a record names something else.

    A shell that is given the line starts train.py, and nothing but that.
    """
    if not records:
        return ""
    command = records[0].run["command"]
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation without an end
        words = []
    if words[:2] != ["python", "train.py"] or shlex.join(words) != command or not command.isprintable():
        return "# the records name no command of train.py"
    return f"{command} seed={format_seeds([r.seed for r in records])}"


def _write_answer(folder: Path, answer: Answer) -> None:
    """The tables and figures, and ``answer.json``: the sentences, and where each number stands."""
    write_json(folder / "answer.json", {"schema": SCHEMA, **write_shown(folder, answer)})


def write_shown(folder: Path, answer: Answer) -> dict:
    """Write ``tables/*.csv`` and ``figures/*``; the sentences, and where each number stands.

    Beside a table whose cells hold several numbers lies one in which each has a column, ``*.numbers.csv``.

    Raises:
        ConfigurationError: a link stands where a folder has to be.
    """
    check_no_links(folder / "tables", folder / "figures")
    for table in answer.tables:
        write_whole(folder / "tables" / f"{table.name}.csv", text := as_csv(table))
        if apart := numbers_apart(text):
            write_whole(folder / "tables" / f"{table.name}.numbers.csv", apart)
    for figure in answer.figures:
        for suffix, content in as_files(figure).items():
            write_whole(folder / "figures" / f"{figure.name}.{suffix}", content)
    tables = [vars(shown(table)) for table in answer.tables]
    figures = [{"name": f.name, "title": f.title, "caption": f.caption} for f in answer.figures]
    return {"sentence": answer.sentence, "tables": tables, "figures": figures}


def check_no_links(*folders: Path) -> None:
    """A stranger's link may lead anywhere. Raises ConfigurationError."""
    for folder in folders:
        if folder.is_symlink():
            raise ConfigurationError(f"{folder} is a link: delete it, or put a folder in its place")
