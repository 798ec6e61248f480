"""From the finished seeds in an experiment's folder to verdict.json, report.html and the table on screen."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from rich.table import Table

from driftlab import environments
from driftlab.evidence import first_flip
from driftlab.records import SCHEMA, RecordError, SeedRecord, finished_seeds, write_json
from driftlab.report import write_report
from driftlab.report.notable import Notable, notable
from driftlab.report.sections import Answer
from driftlab.report.tables import outcomes
from driftlab.rules import judge as judge_records
from driftlab.verdict import Judgement
from experiments.recorded import as_yaml
from experiments.seeds import format_seeds
from experiments.stored_run import read_checked
from experiments.terminal import Terminal, number


def judge(folder: Path, digest: str, settings: DictConfig, terminal: Terminal) -> str:
    """Judge all finished seeds together, write the verdict and the report, show them; returns the verdict."""
    records = readable(folder, terminal)
    judgement = judge_records(records, settings.subject)
    files = write_verdict(folder, digest, settings, records, judgement)
    files["curves"] = f"{folder}/seed=*/curves.csv"
    show(terminal, settings, records, judgement, files)
    return str(judgement.verdict)


def show(
    terminal: Terminal,
    settings: DictConfig,
    records: list[SeedRecord],
    judgement: Judgement,
    files: dict[str, str],
) -> None:
    """The seeds, or of many those worth a look; the verdict; where they did not run alike."""
    few = notable(outcomes(records, judgement))
    shown = {row["seed"] for row in few.rows} if few else {record.seed for record in records}
    terminal.verdict(
        judgement, settings.expected, seeds_table([r for r in records if r.seed in shown], few), files
    )
    for line in environments.lines({record.seed: record.run for record in records}):
        terminal.say(line)


def write_verdict(
    folder: Path,
    digest: str,
    settings: DictConfig,
    records: list[SeedRecord],
    judgement: Judgement,
    answer: Answer | None = None,
) -> dict[str, str]:
    """``verdict.json`` and ``report.html``; where they lie, by name."""
    write_json(folder / "verdict.json", _as_contract(settings.name, digest, records, judgement))
    meta = {
        "experiment": settings.name,
        "digest": digest,
        "hypothesis": settings.hypothesis,
        "expected": settings.expected,
        "command": repeat_command(records),
        "settings": as_yaml(settings),
        "dataset": records[0].run["dataset"] if records else {},
    }
    report = write_report(folder, records, judgement, meta, answer)
    return {"verdict": str(folder / "verdict.json"), "report": str(report)}


def readable(folder: Path, terminal: Terminal) -> list[SeedRecord]:
    records = []
    for seed in finished_seeds(folder):
        try:
            records.append(read_checked(folder, seed))
        except RecordError as error:
            terminal.say(f"left out of the verdict: {error}")
    return [r for r in records if r is not None]


def _as_contract(name: str, digest: str, records: list[SeedRecord], judgement: Judgement) -> dict:
    return {
        "schema": SCHEMA,
        "experiment": name,
        "digest": digest,
        "verdict": judgement.verdict,
        "headline": judgement.headline,
        "where": judgement.where.as_dict() if judgement.where else None,
        "seeds": [r.seed for r in records],
        "evidence": [e.as_dict() for e in judgement.evidence],
        "outcomes": judgement.outcomes,
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
    found = environments.differences({r.seed: r.run["environment"] for r in records})
    return {**first, "differs_for_seeds": others, "differences": [d.as_dict() for d in found]}


def repeat_command(records: list[SeedRecord]) -> str:
    """The command line that trains the same seeds again."""
    return f"{records[0].run['command']} seed={format_seeds([r.seed for r in records])}" if records else ""


def seeds_table(records: list[SeedRecord], few: Notable | None = None) -> Table:
    """A row a seed: losses at the end, drift at the end, and where the first pre-activation flipped."""
    title = "seeds" if few is None else f"seeds: {few.sentence}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="dim")
    arms = {arm: record["against"] for arm, record in records[0].run["arms"].items()} if records else {}
    narrow = [a for a in arms if a.endswith("float32")]
    drifting = [a for a, against in arms.items() if against]
    table.add_column("seed", justify="right")
    for kind, names in (("loss", narrow), ("drift", drifting)):
        for arm in names:
            role, dtype = arm.split(".")
            table.add_column(
                f"{kind}\n{SHORT[role]}{dtype.removeprefix('float')}", justify="right", no_wrap=True
            )
    table.add_column("first\nflip", justify="right")
    for record in records:
        losses = [_final_loss(record, a) for a in narrow]
        drifts = [_small(_final(record.series("weight_distance", a))) for a in drifting]
        table.add_row(str(record.seed), *losses, *drifts, _flip(record))
    return table


SHORT = {"reference": "ref", "candidate": "cand", "control": "ctrl"}


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}" if value else "0"


def _final(series: dict[int, float]) -> float | None:
    return series[max(series)] if series else None


def _final_loss(record: SeedRecord, arm: str) -> str:
    blown = record.run["arms"][arm]["blown_up_at"]
    return f"nan@{blown}" if blown is not None else number(_final(record.series("loss", arm)))


def _flip(record: SeedRecord) -> str:
    arm = "candidate.float32" if "candidate.float32" in record.arms else "control.float32"
    step = first_flip(record, arm)
    return "none" if step is None else str(step)
