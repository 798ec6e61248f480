"""From a question to its answer: measure every seed, judge, show tables and figures, leave the files.

The folder is that of every experiment (``experiment.yaml``, ``seed=<n>/``, ``verdict.json``,
``report.html``) with three things more: ``seed=<n>/measurements.json``, ``tables/*.csv`` and
``figures/*.svg`` and ``.png``; ``answer.json`` holds the sentences and where each number stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from driftlab.record.seed_record import (
    CURVES,
    EVALUATIONS,
    SeedRecord,
    columns,
    write_sealed,
    write_table,
)
from driftlab.report.sections import Answer
from driftlab.verdict.rules import judge
from driftlab.words import Judgement
from suite.command.command_line import in_sweep
from suite.command.configuration import resolve
from suite.command.errors import storage
from suite.command.idle import say_beyond
from suite.command.jobs import Ran
from suite.command.machine import process_settled
from suite.command.seeds import parse_seeds
from suite.command.users_code import told
from suite.command.written import title
from suite.data.images import Images
from suite.reading.stored import MEASUREMENTS
from suite.running.arguments import check_network
from suite.running.building import on_cpu
from suite.running.ending import end
from suite.running.experiment_folder import Experiment, is_done, open_experiment, say_outdated, take_up
from suite.running.importing import own_sources
from suite.running.own_data import load_data, only_images
from suite.running.run_record import Began, seed_record
from suite.running.workers import carry_out
from suite.showing.loggers import MetricsLogger
from suite.showing.plan import question_plan
from suite.showing.terminal import Terminal


@dataclass(frozen=True)
class Measured:
    """What one seed gave.

    Attributes:
        record: the pair in question, as ``driftlab.diagnosis.diagnosed`` leaves it: curves and probes.
        values: everything else that the answer needs, as JSON can hold it.
    """

    record: SeedRecord
    values: dict


@dataclass(frozen=True)
class Question:
    """A kind of experiment that trains little or nothing: it measures, seed by seed, and answers.

    Attributes:
        measure: ``measure(settings, seed)``; everything random follows the seed.
        answer: ``answer(settings, values by seed)``, at least one seed.
        about: what is measured, in the plan that is shown before: a few words.
        check: ``check(settings, seed)`` builds what a seed needs; what it refuses leaves no folder.
        judge: how the records of all seeds become the verdict.
        version: of what is measured, part of the digest; to be raised when the same settings come to measure
            something else.

    A kind whose ``Settings`` are those of a ``Training`` is given the images of the data set,
    ``measure(settings, seed, images)`` and ``check(settings, seed, images)``.
    """

    measure: Callable[..., Measured]
    answer: Callable[[DictConfig, Mapping[int, dict]], Answer]
    about: Callable[[DictConfig], str]
    check: Callable[..., object] = lambda *_: None
    judge: Callable[[Sequence[SeedRecord]], Judgement] = judge
    version: int = 1

    def run(self, config: DictConfig) -> Ran:
        """Measure what is not finished yet, then answer from all finished seeds; a sweep does so at its end.

        Raises:
            ConfigurationError, Unfinished: with one line for the user.
        """
        terminal = Terminal(job=config.get("name") if in_sweep() else "")
        seeds = parse_seeds(config.get("seed"))
        settings = resolve(config, terminal.say)
        with process_settled(settings, terminal.say):
            return _ask(settings, seeds, self, terminal)


def _ask(settings: DictConfig, seeds: list[int], question: Question, terminal: Terminal) -> Ran:
    about = question.about(settings)
    images = _images(settings, terminal)
    question.check(on_cpu(settings), seeds[0], *_given(images))
    settings.measurement = question.version
    experiment = open_experiment(settings, images, terminal)
    todo = [seed for seed in seeds if not is_done(experiment, seed)]
    say_outdated(experiment)
    plan = question_plan(experiment, about, seeds, todo)
    terminal.plan(f"{title(settings)}  {experiment.digest}", plan, in_full=not in_sweep())
    carry_out(experiment, todo, partial(_measure, question))
    return end(experiment, seeds, question)


def _images(settings: DictConfig, terminal: Terminal) -> Images | None:
    """Of a kind that trains on them; the arguments of what it trains are checked by the way."""
    if "data" not in settings:
        return None
    check_network(settings)
    if sources := own_sources(settings):
        settings.sources = sources
    images = only_images(load_data(settings, terminal.say), settings)
    say_beyond(settings, images.test_count, terminal.say)
    return images


def _given(images: Images | None) -> tuple[Images, ...]:
    return () if images is None else (images,)


def _measure(question: Question, experiment: Experiment, seed: int, home: Path) -> None:
    """Raises RecordError where it had finished and is damaged, Unfinished where the disk refuses a file.

    ConfigurationError where the user's code raises something.
    """
    began = Began.now()

    def stands() -> str:
        return f"seed {seed} is measured again"

    with storage(experiment.settings.results, stands), told(stands):
        take_up(experiment, seed, home)
        measured = question.measure(experiment.settings, seed, *_given(experiment.data_set))
        record = seed_record(experiment, seed, began) | _arms_and_probes(measured)
        rows = [{"epoch": 0, **row} for row in measured.record.curves]
        experiment.still_owner()
        record["files"] = _write_measured(home, measured, rows)
        _log(experiment, seed, home, rows, record)
        write_sealed(home / "run.json", record)
    experiment.terminal.say(f"seed {seed}: measured ({record['times']['seconds']:.0f} s)")


def _write_measured(home: Path, measured: Measured, rows: list[dict]) -> dict[str, str]:
    """Name -> SHA-256 of the files that ``run.json`` rests on."""
    arms = measured.record.arms
    evaluations = [{"epoch": 0, **row} for row in measured.record.evaluations]
    return {
        "curves.csv": write_table(home / "curves.csv", columns(CURVES, arms), rows),
        "evaluations.csv": write_table(home / "evaluations.csv", columns(EVALUATIONS, arms), evaluations),
        MEASUREMENTS: write_sealed(home / MEASUREMENTS, measured.values),
    }


def _arms_and_probes(measured: Measured) -> dict:
    run, found = measured.record.run, measured.record.findings
    horizon = int(measured.record.curves[-1]["step"]) if measured.record.curves else 0
    arms = {
        name: {"outcome": "finished" if arm["blown_up_at"] is None else "blew_up", "horizon": horizon} | arm
        for name, arm in run["arms"].items()
    }
    return {
        "arms": arms,
        "fold": None,
        "probes": run.get("probes", []) if found is None else [f.as_dict() for f in found],
    }


def _log(
    experiment: Experiment, seed: int, home: Path, rows: list[Mapping[str, float]], record: Mapping
) -> None:
    logger = MetricsLogger(experiment.settings, experiment.digest, seed, home, experiment.terminal.say)
    for row in rows:
        logger.log(int(row["step"]), {k: v for k, v in row.items() if k != "step"})
    logger.finish(record)
