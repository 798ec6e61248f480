"""What every logger is told of a seed and of a verdict, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from driftlab.report.sections import Answer, Table
from suite.command.written import title

EVIDENCE = {
    "probe": "probe",
    "question": "question",
    "measured": "measured (in the unit of its reading)",
    "threshold": "threshold (in the same unit)",
    "supports": "supports",
    "reading": "reading",
}
OUTCOMES = {
    "arm": "arm",
    "fell_over": "diverged (seeds)",
    "seeds": "of (seeds)",
    "discordant": "unlike the reference (seeds)",
    "p": "McNemar's exact p against the reference",
}


def searchable(settings: DictConfig, digest: str) -> dict:
    """The settings less what says where and by whom they were run."""
    config = OmegaConf.to_container(settings)
    for key in ("results", "logger", "rerun"):
        config.pop(key)
    config.get("data", {}).pop("root", None)
    return _without_home(config) | {"digest": digest, "run": f"{title(settings)} ({digest})"}


def _without_home(value: object) -> object:
    """Paths below the home folder, which holds a person's name, from ``~`` on."""
    if isinstance(value, dict):
        return {k: _without_home(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_home(v) for v in value]
    home = str(Path.home())
    return value.replace(home, "~") if isinstance(value, str) and len(home) > 1 else value


def seed_summary(record: Mapping) -> dict[str, object]:
    """What became of a seed, from its ``run.json``: outcome by arm, and the step at which an arm blew up."""
    summary = {"outcome": record["outcome"], "seconds": record["times"]["seconds"]}
    for arm, became in record["arms"].items():
        summary[f"outcome/{arm}"] = became["outcome"]
        if became["blown_up_at"] is not None:
            summary[f"blown_up_at/{arm}"] = became["blown_up_at"]
    return summary


def verdict_summary(verdict: Mapping, expected: str | None) -> dict[str, object]:
    """The verdict, its sentence and its place, from ``verdict.json``."""
    summary = {key: verdict[key] for key in ("verdict", "headline")} | {"seeds": len(verdict["seeds"])}
    if expected:
        summary |= {"expected": expected, "as_expected": verdict["verdict"] == expected}
    if verdict["where"]:
        summary["where"] = verdict["where"]
    return summary


def tables(verdict: Mapping, answer: Answer | None) -> dict[str, Table]:
    """Name -> table: evidence, outcomes over seeds, and those of the answer."""
    found = {"evidence": Table("evidence", "evidence", EVIDENCE, verdict["evidence"], "")}
    if arms := _outcomes(verdict["outcomes"]):
        found["outcomes"] = Table("outcomes", "outcomes over seeds", OUTCOMES, arms, "")
    return found | {f"tables/{table.name}": table for table in (answer.tables if answer else ())}


def _outcomes(outcomes: Mapping) -> list[dict[str, object]]:
    return [
        {
            "arm": arm,
            "fell_over": sum(seeds.values()),
            "seeds": len(seeds),
            "discordant": outcomes.get("discordant", {}).get(arm),
            "p": outcomes.get("mcnemar_p", {}).get(arm),
        }
        for arm, seeds in outcomes.get("fell_over", {}).items()
    ]


def figures(folder: Path, answer: Answer | None) -> dict[str, tuple[Path, str]]:
    """Name -> PNG and caption of the figures that lie beside a verdict."""
    captions = {figure.name: figure.caption for figure in (answer.figures if answer else ())}
    files = sorted(folder.glob("figures/*.png"))
    return {f"figures/{file.stem}": (file, captions.get(file.stem, "")) for file in files}
