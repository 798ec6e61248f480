"""From a finished run to the page that is committed: the answer, its tables and figures, how it was made."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from driftlab.records import RecordError, SeedRecord, finished_seeds, read_json, read_seed, write_whole
from experiments.judging import repeat_command
from experiments.publishing_curves import published_curves

# Beyond so many rows a table stands in its CSV file alone.
MOST_ROWS = 40


def publish(run: Path, to: Path) -> Path:
    """Write ``to/<experiment>/README.md`` with the tables and figures of ``run`` beside it; returns the page.

    Raises:
        RecordError: the run has no finished seed, no answer, or is damaged.
    """
    verdict = read_json(run / "verdict.json")
    records = [r for seed in finished_seeds(run) if (r := read_seed(run, seed)) is not None]
    if not records:
        raise RecordError(f"{run} holds no finished seed: run its command first")
    page = to / verdict["experiment"]
    for kind in ("tables", "figures"):
        shutil.rmtree(page / kind, ignore_errors=True)
        if (run / kind).is_dir():
            shutil.copytree(run / kind, page / kind)
    settings = yaml.safe_load((run / "experiment.yaml").read_text())
    if settings.get("kind", "training") == "training":
        answer = published_curves(page, records)
    else:
        answer = read_json(run / "answer.json")
    write_whole(page / "README.md", "\n".join(_page(verdict, answer, records, settings)))
    return page / "README.md"


def _page(verdict: dict, answer: dict, records: list[SeedRecord], settings: dict) -> Iterable[str]:
    yield f"# {verdict['experiment']}\n"
    asked = settings.get("question")
    yield f"{asked}\n" if asked else f"Hypothesis: {settings['hypothesis']}.\n"
    yield f"**`{verdict['verdict']}`**: {verdict['headline']}.\n"
    yield f"{answer['sentence']}\n"
    for figure in answer["figures"]:
        yield f"## {figure['title']}\n"
        yield f"![{figure['title']}](figures/{figure['name']}.png)\n"
        yield f"{figure['caption']}\n"
    for table in answer["tables"]:
        yield f"## {table['title']}\n"
        yield f"{table['conclusion']}\n"
        yield from _table(table)
    yield "## How it was made\n"
    yield from _made(records)
    yield from _data_and_size(records[0].run, settings)


def _data_and_size(run: Mapping, settings: Mapping) -> Iterable[str]:
    """Of a kind that trains on a data set: which one, and whether this is the size that a GPU is for."""
    data, size = run["dataset"], settings["scale"]["name"]
    if not data["sha256"]:
        return
    stand_in = ", a STAND-IN of drawn shapes" if data["stand_in"] else ""
    counts = f"{data['train_images']:,} training and {data['test_images']:,} test images"
    yield f"Data: {data['name']}{stand_in}, {counts}, SHA-256 `{data['sha256']}`.\n"
    if size != "full":
        yield (
            f"Size: `{size}`, which is for a CPU. The full size is for a GPU and was not run here: on a "
            "machine that has one the same command takes it (`scale=auto`).\n"
        )


def _table(table: Mapping) -> Iterable[str]:
    file = f"[tables/{table['name']}.csv](tables/{table['name']}.csv)"
    if len(table["rows"]) > MOST_ROWS:
        yield f"{len(table['rows'])} rows: {file}\n"
        return
    yield _row(table["headings"])
    yield _row(["---:" if numeric else "---" for numeric in table["numeric"]])
    yield from map(_row, table["rows"])
    yield f"\nAs a file: {file}\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |"


def _made(records: list[SeedRecord]) -> Iterable[str]:
    environment = records[0].run["environment"]
    seconds = [r.run["times"]["seconds"] for r in records]
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v)
    yield f"```\n{repeat_command(records)}\n```\n"
    yield (
        f"n = {len(records)} seed{'s' if len(records) > 1 else ''}, {sum(seconds):.0f} s in all; "
        f"{environment['device']}, {environment['threads']} thread{'s' * (environment['threads'] > 1)}, "
        f"Python {environment['python']}, {versions}. "
        f"TF32: {'on' if any(environment['tf32'].values()) else 'off'}. "
        f"Digest of the settings: `{records[0].run['digest']}`.\n"
    )
    if any(r.run["environment"] != environment for r in records):
        yield "Not all seeds ran in that environment; the others' stands in the run's `verdict.json`.\n"
