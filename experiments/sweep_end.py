"""The end of a sweep: one verdict and one report an experiment, over the seeds of all of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments import jobs
from experiments.errors import ConfigurationError, Unfinished
from experiments.experiment_folder import alone
from experiments.judging import show
from experiments.loggers import log_verdict
from experiments.outcome import Ended
from experiments.rejudging import Stored, rejudge
from experiments.rejudging_table import runs_table
from experiments.stored_run import read_settings
from experiments.terminal import Terminal, print_whole


def end_sweep(ended: Iterable[Mapping]) -> None:
    """Judge what the jobs finished, show it, and keep how each ended for the exit status."""
    terminal, ended = Terminal(), list(ended)
    jobs.collect(e for e in ended if "folder" not in e)
    folders = dict.fromkeys(e["folder"] for e in ended if e.get("folder"))
    if len(folders) == 1:
        if run := _judged(Path(*folders), terminal):
            _show(run, terminal)
        return
    runs = [run.summary() for folder in folders if (run := _judged(Path(folder), terminal))]
    if runs:
        print_whole(terminal.console, runs_table(runs))
    for run in runs:
        terminal.file("report", run.folder / "report.html")


def _judged(folder: Path, terminal: Terminal) -> Stored | None:
    try:
        settings = read_settings(folder)
        settings.results = str(folder.parent.parent)
        with alone(settings, folder):
            run = rejudge(folder, terminal)
            if run is None:  # its seeds were taken away meanwhile
                return None
            log_verdict(settings, run.digest, folder, run.answer)
    except ConfigurationError as error:
        jobs.refuse(str(error))
        return None
    except Unfinished as error:
        jobs.collect([Ended(experiment=folder.parent.name, unfinished=str(error))])
        return None
    listed = run.judgement.verdict in list(run.settings.fail_on)
    jobs.collect([Ended(experiment=run.settings.name, folder=str(folder), listed=listed)])
    return run


def _show(run: Stored, terminal: Terminal) -> None:
    files = {"verdict": run.folder / "verdict.json", "report": run.folder / "report.html"}
    files = {name: str(path) for name, path in files.items()}
    if run.answer is None:
        show(terminal, run.settings, run.records, run.judgement, files)
    else:
        terminal.tables(run.answer)
        terminal.verdict(run.judgement, run.settings.expected, None, files)
