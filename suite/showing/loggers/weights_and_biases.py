"""Weights & Biases: one run a seed and one for the verdict over them, in one group.

Run ids follow from digest and seed, so that what is run again goes to the same run. ``wandb`` takes seconds
to import: that is done where a run starts.

Under an agent of W&B's, the run that its sweep planned for this command is the verdict's: a command trains
several seeds and has one verdict.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlparse

from omegaconf import DictConfig

from driftlab.report.sections import Answer, Table
from suite.command.errors import ConfigurationError, one_line
from suite.command.machine import environment_without
from suite.command.written import title
from suite.showing.loggers.contents import figures, searchable, seed_summary, tables, verdict_summary

# What an agent tells the command that it starts: W&B's SDK puts every run of that process in their place.
_OF_A_SWEEP = ("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_RUN_ID")

# Of a finished seed or verdict, into the searchable config: what it was computed on.
_RECORDED = ("dataset", "environment")


class SeedRun:
    """One seed as a W&B run."""

    def __init__(
        self, settings: DictConfig, digest: str, seed: int, home: Path, say: Callable[[str], None] = print
    ):
        self._say, self._alerts = say, _alerts(settings)
        with environment_without(_OF_A_SWEEP):
            self._run = _start(
                settings,
                home,
                say,
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
        _finish(self._run, self._say)

    def crash(self, why: str) -> None:
        if "crash" in self._alerts:
            self._run.alert(title=f"{self._run.name}: crashed", text=why, level="ERROR")
        _finish(self._run, self._say, exit_code=1)


SEEDS = {"wandb": SeedRun}


def tells_of_crashes(settings: DictConfig) -> bool:
    """Whether W&B sends a message of a seed that ends in an error."""
    return _mode() == "online" and "crash" in _alerts(settings)


def log_verdict(
    settings: DictConfig,
    digest: str,
    folder: Path,
    verdict: Mapping,
    answer: Answer | None,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """The verdict as a run of its own: summary, tables, figures; the report as a page and as an artifact.

    Returns where this run and those of the seeds lie, and how to sync them where they are offline.
    """
    import wandb

    if "WANDB_SWEEP_ID" in os.environ:
        wandb.teardown()  # a seed of this process has set W&B up outside of the sweep
    run = _start(
        settings,
        folder / "verdict",
        say,
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
    try:
        run.log_artifact(_report(run, digest, folder, verdict))
    except Exception as error:  # asked of the server on the spot, which may be away by now
        say(f"W&B has no artifact of the report ({one_line(error)}): it lies in {folder}")
    run.summary.update(verdict_summary(verdict, settings.expected))
    if verdict["verdict"] in _alerts(settings):
        level = "ERROR" if verdict["verdict"] == "bug" else "WARN"
        run.alert(title=f"{title(settings)}: {verdict['verdict']}", text=verdict["headline"], level=level)
    _finish(run, say)
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


def _start(settings: DictConfig, home: Path, say: Callable[[str], None], *, resume: str | None, **about):
    """A new run with nothing of this machine in it, no name, no path, no environment variable.

    Offline where the server does not take it, which is said: a training does not wait for it.

    Offline it takes the place of what an earlier process left: W&B does not join the parts of a run, the
    part that is synced last replaces the others.
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # before anybody imports wandb
    if "wandb" not in sys.modules:  # a service that whoever started us left: it writes into its own folder
        os.environ.pop("WANDB_SERVICE", None)
    import wandb

    # W&B's own telemetry complains where a server is away
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    mode = _mode()
    shutil.rmtree(home / "wandb", ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    # rewrites that train together have a run each in this process
    quiet = {"reinit": "create_new", "silent": True, "console": "off", "symlink": False, "host": ""}
    none_of = {"disable_git": True, "disable_code": True, "x_disable_meta": True}
    none_of["x_disable_stats"] = settings.get("device") != "cuda"  # what a GPU is at is worth a chart
    seconds = settings.logger.get("patience", 60)
    patience = {"init_timeout": seconds, "finish_timeout": seconds, "finish_timeout_raises": True}

    def begun(mode: str):
        return wandb.init(
            project=settings.logger.project,
            entity=settings.logger.get("entity"),
            tags=[str(v)[:64] for v in (settings.name, settings.get("data", {}).get("name")) if v],
            resume=resume if mode == "online" else None,
            dir=home,
            mode=mode,
            settings=wandb.Settings(**quiet, **none_of, **patience),
            **about,
        )

    try:
        return begun(mode)
    except (wandb.Error, ValueError, TimeoutError) as error:
        if mode != "online" or not isinstance(error, wandb.errors.CommError | TimeoutError):
            raise ConfigurationError(
                f"logger=wandb cannot start ({one_line(error)}): write logger=none, or set WANDB_MODE=offline"
            ) from None
        say(f"W&B does not take {about['name']} ({one_line(error)}): it is kept offline")
        wandb.teardown()  # the service would hold that this run is still in use
        return begun("offline")


def _finish(run, say: Callable[[str], None], exit_code: int | None = None) -> None:
    try:
        run.finish(exit_code)
    except TimeoutError:
        kept = shlex.quote(str(Path(run.settings.sync_dir)))
        late = f"W&B has not taken all of {run.name} in logger.patience"
        say(f"{late}: to send it later, wandb sync --no-skip-online {kept}")
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


def _alerts(settings: DictConfig) -> list[str]:
    """None of an experiment that was stored before there were any."""
    return settings.logger.get("alerts", [])


def _mode() -> str:
    return os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")


def logged_in() -> bool:
    """Whether W&B has a key here, in its variable or in the netrc file. Asked so that it never prompts."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
