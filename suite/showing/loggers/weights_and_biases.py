"""Weights & Biases: one run a seed and one for the verdict over them, in one group.

Run ids follow from digest and seed, so that what is run again goes to the same run. ``wandb`` takes seconds
to import: that is done where a run starts.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlparse

from omegaconf import DictConfig

from driftlab.report.sections import Answer, Table
from suite.command.errors import ConfigurationError, one_line
from suite.command.naming import title
from suite.showing.loggers.contents import figures, searchable, seed_summary, tables, verdict_summary

# Of a finished seed or verdict, into the searchable config: what it was computed on.
_RECORDED = ("dataset", "environment")


class SeedRun:
    """One seed as a W&B run."""

    def __init__(self, settings: DictConfig, digest: str, seed: int, home: Path):
        self._run = _start(
            settings,
            home,
            resume=None if settings.rerun else "allow",
            id=f"{digest}-{seed}",
            name=f"{title(settings)} seed={seed}",
            group=_group(settings, digest),
            job_type="seed",
            config=searchable(settings, digest) | {"seed": seed},
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        # a run that is resumed online holds its first rows already, and warns of each that comes again
        if step >= self._run.step:
            self._run.log({**numbers, "step": step}, step=step, commit=True)

    def finish(self, record: Mapping) -> None:
        self._run.config.update({key: record[key] for key in _RECORDED}, allow_val_change=True)
        self._run.summary.update(seed_summary(record))
        _finish(self._run)


SEEDS = {"wandb": SeedRun}


def log_verdict(
    settings: DictConfig, digest: str, folder: Path, verdict: Mapping, answer: Answer | None
) -> dict[str, str]:
    """The verdict as a run of its own: summary, tables, figures; the report as a page and as an artifact.

    Returns where this run and those of the seeds lie, and how to sync them where they are offline.
    """
    import wandb

    run = _start(
        settings,
        folder / "verdict",
        resume=None,
        id=f"{digest}-verdict",
        name=f"{title(settings)} verdict",
        group=_group(settings, digest),
        job_type="verdict",
        config=searchable(settings, digest) | {key: verdict[key] for key in ("seeds", *_RECORDED)},
    )
    shown = {name: _table(table, run, name) for name, table in tables(verdict, answer).items()}
    for name, (file, caption) in figures(folder, answer).items():
        shown[name] = wandb.Image(str(file), caption=caption)
    shown["report"] = wandb.Html(str(folder / "report.html"), inject=False)
    run.log(shown)
    run.log_artifact(_report(run, digest, folder, verdict))
    run.summary.update(verdict_summary(verdict, settings.expected))
    _finish(run)
    return _where(run, folder)


def _where(run, folder: Path) -> dict[str, str]:
    if run.url:
        return {"W&B": run.url}
    if not run.offline:
        return {}  # WANDB_MODE=disabled
    runs = f"{shlex.quote(str(folder))}/*/wandb/offline-run-*"
    return {"W&B": f"offline, {runs}", "to sync": f"wandb sync {runs}"}


def _group(settings: DictConfig, digest: str) -> str:
    return f"{settings.name}-{digest}"


def _start(settings: DictConfig, home: Path, *, resume: str | None, **about):
    """A new run with nothing of this machine in it, no name, no path, no environment variable.

    Offline it takes the place of what an earlier process left: W&B does not join the parts of a run, the
    part that is synced last replaces the others.
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # before anybody imports wandb
    if "wandb" not in sys.modules:  # a service that whoever started us left: it writes into its own folder
        os.environ.pop("WANDB_SERVICE", None)
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    shutil.rmtree(home / "wandb", ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    quiet = {"silent": True, "console": "off", "symlink": False, "host": ""}
    none_of = {"disable_git": True, "disable_code": True, "x_disable_meta": True, "x_disable_stats": True}
    try:
        return wandb.init(
            project=settings.logger.project,
            entity=settings.logger.get("entity"),
            tags=[str(v)[:64] for v in (settings.name, settings.get("data", {}).get("name")) if v],
            resume=resume if mode == "online" else None,
            dir=home,
            mode=mode,
            settings=wandb.Settings(**quiet, **none_of),
            **about,
        )
    except (wandb.Error, ValueError) as error:
        raise ConfigurationError(
            f"logger=wandb cannot start ({one_line(error)}): write logger=none, or set WANDB_MODE=offline"
        ) from None


def _finish(run) -> None:
    run.finish()
    # W&B's own debug logs are full of this machine's paths
    shutil.rmtree(run.settings.log_dir, ignore_errors=True)


def _table(table: Table, run, name: str):
    """A table that is a file of the run already.

    Of any other, W&B also makes an artifact, by way of a staging folder that its record names from the home
    folder on.
    """
    import wandb

    rows = [[_cell(row.get(key)) for key in table.columns] for row in table.rows]
    made = wandb.Table(columns=list(table.columns.values()), data=rows, allow_mixed_types=True)
    made.bind_to_run(run, name, 0)
    return made


def _cell(value: object) -> object:
    """A number, a bool or text, as JSON can hold it; None where there is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else str(value)


def _report(run, digest: str, folder: Path, verdict: Mapping):
    """``report.html`` and ``verdict.json``, copied beside the run and named from the working folder on.

    An offline run is synced from that folder. W&B's own copies would be named from the home folder on.
    """
    import wandb

    artifact = wandb.Artifact(f"report-{digest}", type="report", description=verdict["headline"])
    for name in ("report.html", "verdict.json"):
        kept = Path(shutil.copy(folder / name, Path(run.dir).parent))
        artifact.add_file(os.path.relpath(kept), name=name, policy="immutable")
    return artifact


def logged_in() -> bool:
    """Whether W&B has a key here, in its variable or in the netrc file. Asked so that it never prompts."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
