"""The end of an experiment, and of a sweep of them: judged, shown, and left with the logger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from driftlab.record import differing
from driftlab.report.tables import notable, outcomes
from suite.command import jobs
from suite.command.command_line import in_sweep
from suite.command.errors import ConfigurationError, Unfinished
from suite.command.seeds import format_seeds
from suite.reading.archive import judge_again
from suite.reading.judging import Judged, judge, write, write_together
from suite.reading.stored import finished, read_settings
from suite.running.experiment_folder import Experiment, alone
from suite.showing.loggers import log_verdict
from suite.showing.tables import print_whole, runs_table, seeds_table, table_in_16_bits
from suite.showing.terminal import Terminal

if TYPE_CHECKING:
    from suite.running.asking import Question


def end(experiment: Experiment, seeds: Sequence[int], question: Question | None = None) -> jobs.Ran:
    """Judge all finished seeds together, show and log the verdict; a sweep does so when its jobs have ended.

    Args:
        seeds: that were asked for, and that had all finished.

    Raises:
        Unfinished: the disk refused a file, or one of the seeds is no longer there.
    """
    folder, settings, terminal = experiment.folder, experiment.settings, experiment.terminal
    if in_sweep():
        return jobs.Ran(str(folder), None)
    with alone(settings, folder):
        records = finished(folder, terminal.say, ran_here=True)
        _check_none_gone(folder, seeds, (record.seed for record in records))
        judged = replace(judge(folder, settings, experiment.digest, records, question), ran_here=True)
        _show(judged, write(judged), terminal)
        _log(judged, settings, terminal)
    return jobs.Ran(str(folder), str(judged.judgement.verdict))


def end_together(experiments: Sequence[Experiment], seeds: Sequence[int]) -> jobs.Ran:
    """As ``end``, of rewrites that were trained together: a verdict and a report each, and one table."""
    folders = [experiment.folder for experiment in experiments]
    if not in_sweep():
        _end_several(folders, experiments[0].terminal, seeds, beside=True)
    return jobs.Ran(str(folders[0]), None, tuple(map(str, folders[1:])))


def end_sweep(ended: Iterable[Mapping]) -> None:
    """One verdict and one report an experiment, over the seeds of all of its jobs; how each job ended."""
    terminal, ended = Terminal(), list(ended)
    jobs.collect(e for e in ended if "folder" not in e)
    # of each job the experiments that it trained beside each other
    trained = dict.fromkeys((e["folder"], *e.get("others", ())) for e in ended if e.get("folder"))
    folders = [Path(folder) for folder in dict.fromkeys(folder for own in trained for folder in own)]
    if len(folders) == 1:
        if judged := _judged(*folders, terminal):
            _show(judged, _pages(judged), terminal)
        return
    _end_several(folders, terminal, beside=len(trained) == 1)


def _end_several(
    folders: Iterable[Path], terminal: Terminal, seeds: Sequence[int] = (), *, beside: bool
) -> None:
    """A verdict and a report each, and one table; of candidates ``beside`` one reference a page, too."""
    found = (judged for folder in folders if (judged := _judged(folder, terminal, seeds)))
    runs = [judged if beside else judged.less_measurements() for judged in found]
    if runs:
        print_whole(terminal.console, runs_table(runs))
    for judged in runs:
        terminal.file("report", _pages(judged)["report"])
    if beside and len(runs) > 1:
        terminal.file("together", write_together(runs))


def _check_none_gone(folder: Path, seeds: Sequence[int], found: Iterable[int]) -> None:
    """Raises Unfinished where a seed that had finished is no longer there."""
    if gone := sorted({*seeds} - {*found}):
        which = f"seed{'s' * (len(gone) > 1)} {format_seeds(gone)}"
        raise Unfinished(f"{folder} no longer holds {which}, finished before: the same command goes on")


def _judged(folder: Path, terminal: Terminal, seeds: Sequence[int] = ()) -> Judged | None:
    """None where it has to be said why it was not. ``seeds``: that had all finished."""
    try:
        settings = read_settings(folder)
        settings.results = str(folder.parent.parent)
        with alone(settings, folder):
            judged = judge_again(folder, terminal.say, ran_here=True)
            if judged is None:
                raise Unfinished(f"{folder} no longer holds a finished seed: the same command goes on")
            _check_none_gone(folder, seeds, judged.seeds)
            _log(judged, settings, terminal)
    except ConfigurationError as error:
        jobs.refuse(str(error))
        return None
    except Unfinished as error:
        jobs.collect([jobs.Ended(unfinished=str(error))])
        return None
    listed = judged.judgement.verdict in list(judged.settings.fail_on)
    jobs.collect([jobs.Ended(folder=str(folder), listed=listed)])
    return judged


def _log(judged: Judged, settings: DictConfig, terminal: Terminal) -> None:
    """The verdict with the chosen logger, and where its runs lie."""
    for name, where in log_verdict(
        settings, judged.digest, judged.folder, judged.answer, terminal.say
    ).items():
        terminal.file(name, where)


def _pages(judged: Judged) -> dict[str, str]:
    return {"verdict": f"{judged.folder}/verdict.json", "report": f"{judged.folder}/report.html"}


def _show(judged: Judged, files: Mapping[str, str], terminal: Terminal) -> None:
    """The answer; or the seeds, of many those worth a look, and where they did not run alike. The verdict."""
    expected = judged.settings.expected
    if judged.answer is not None:
        terminal.tables(judged.answer)
        terminal.verdict(judged.judgement, expected, (), files)
        return
    few = notable(outcomes(judged.records, judged.judgement))
    worth = {row["seed"] for row in few.rows} if few else set(judged.seeds)
    shown = [r for r in judged.records if r.seed in worth]
    tables = [seeds_table(shown, few), table_in_16_bits(shown)]
    terminal.verdict(judged.judgement, expected, [t for t in tables if t], files)
    for line in differing.lines({record.seed: record.run for record in judged.records}):
        terminal.say(line)
