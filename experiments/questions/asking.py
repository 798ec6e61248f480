"""From a question to its answer: measure every seed, judge, show tables and figures, leave the files.

The folder is that of every experiment (``experiment.yaml``, ``seed=<n>/``, ``verdict.json``,
``report.html``) with three things more: ``seed=<n>/measurements.json``, ``tables/*.csv`` and
``figures/*.svg`` and ``.png``; ``answer.json`` holds the sentences and where each number stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from driftlab.records import (
    CURVES,
    EVALUATIONS,
    SCHEMA,
    columns,
    write_json,
    write_sealed,
    write_table,
    write_whole,
)
from driftlab.report.rendering import as_csv, as_files, shown
from driftlab.report.sections import Answer
from experiments.configuration import resolve
from experiments.cores import settle_process
from experiments.data.chosen import load_images
from experiments.errors import ConfigurationError
from experiments.experiment_folder import Experiment, alone, is_done, open_experiment, take_up
from experiments.judging import readable, write_verdict
from experiments.loggers import MetricsLogger, log_verdict
from experiments.outcome import Ran, in_sweep
from experiments.plan import at_a_time, plan_of_data
from experiments.questions.question import Measured, Question
from experiments.questions.settings import resolve_question
from experiments.run_record import Began, seed_record
from experiments.seeds import format_seeds, parse_seeds
from experiments.storage import storage
from experiments.stored_run import MEASUREMENTS, measurements
from experiments.terminal import Terminal
from experiments.workers import carry_out


def ask(config: DictConfig, question: Question) -> Ran:
    """Measure what is not finished yet, then answer from all finished seeds; a sweep does so at its end.

    Raises:
        ConfigurationError, Unfinished: with one line for the user.
    """
    terminal = Terminal(job=config.name if in_sweep() else "")
    seeds = parse_seeds(OmegaConf.to_container(config, resolve=False)["seed"])
    settings = resolve(config) if question.trains else resolve_question(config, terminal.say)
    settle_process(settings)
    settings.measurement = question.version
    about = question.about(settings)  # refuses what cannot be measured, before there is a folder
    images = load_images(settings, terminal.say) if question.trains else None
    experiment = open_experiment(settings, images, terminal)
    todo = [seed for seed in seeds if not is_done(experiment, seed)]
    plan = _plan(settings, about, seeds, todo) | plan_of_data(images)
    terminal.plan(f"{settings.name} {experiment.digest}", plan, in_full=not in_sweep())
    carry_out(experiment, todo, partial(_measure, question))
    if in_sweep():
        return Ran(str(experiment.folder), seeds, None)
    with alone(experiment.settings, experiment.folder):
        return Ran(str(experiment.folder), seeds, _answered(experiment, question))


def _plan(settings: DictConfig, about: str, seeds: list[int], todo: list[int]) -> dict[str, str]:
    done = f", {len(seeds) - len(todo)} done already" if len(todo) < len(seeds) else ""
    return {
        "asks": settings.hypothesis,
        "measures": about,
        "seeds": f"{format_seeds(seeds)}{done}{at_a_time(settings, todo)}",
        "device": settings.device,
        "scale": f"{settings.scale.name} ({settings.scale.get('why', 'as asked')})",
    }


def _measure(question: Question, experiment: Experiment, seed: int, home: Path) -> None:
    """Raises RecordError where it had finished and is damaged, Unfinished where the disk refuses a file."""
    began = Began.now()
    with storage(experiment.settings.results, lambda: f"seed {seed} is measured again"):
        take_up(experiment, seed, home)
        given = (experiment.images,) if question.trains else ()
        measured = question.measure(experiment.settings, seed, *given)
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
    run = measured.record.run
    horizon = int(measured.record.curves[-1]["step"]) if measured.record.curves else 0
    arms = {
        name: {"outcome": "finished" if arm["blown_up_at"] is None else "blew_up", "horizon": horizon} | arm
        for name, arm in run["arms"].items()
    }
    return {"arms": arms, "fold": None, "probes": run.get("probes", [])}


def _log(
    experiment: Experiment, seed: int, home: Path, rows: list[Mapping[str, float]], record: Mapping
) -> None:
    logger = MetricsLogger(experiment.settings, experiment.digest, seed, home)
    for row in rows:
        logger.log(int(row["step"]), {k: v for k, v in row.items() if k != "step"})
    logger.finish(record)


def _answered(experiment: Experiment, question: Question) -> str:
    folder, settings, terminal = experiment.folder, experiment.settings, experiment.terminal
    records = readable(folder, terminal)
    judgement = question.judge(records)
    answer = question.answer(settings, measurements(folder, records))
    files = write_verdict(folder, experiment.digest, settings, records, judgement, answer)
    files |= write_answer(folder, answer)
    terminal.tables(answer)
    terminal.verdict(judgement, settings.expected, None, files)
    log_verdict(settings, experiment.digest, folder, answer)
    return str(judgement.verdict)


def write_answer(folder: Path, answer: Answer) -> dict[str, str]:
    """Tables, figures and ``answer.json``; where they lie, by name. Raises ConfigurationError for a link."""
    for name in ("tables", "figures"):
        if (folder / name).is_symlink():  # a stranger's may lead anywhere
            raise ConfigurationError(f"{folder / name} is a link: delete it, or put a folder in its place")
    for table in answer.tables:
        write_whole(folder / "tables" / f"{table.name}.csv", as_csv(table))
    for figure in answer.figures:
        for suffix, content in as_files(figure).items():
            write_whole(folder / "figures" / f"{figure.name}.{suffix}", content)
    write_json(folder / "answer.json", _stored(answer))
    return {"tables": f"{folder}/tables/*.csv", "figures": f"{folder}/figures/*.svg, *.png"}


def _stored(answer: Answer) -> dict:
    tables = [vars(shown(table)) for table in answer.tables]
    figures = [{"name": f.name, "title": f.title, "caption": f.caption} for f in answer.figures]
    return {"schema": SCHEMA, "sentence": answer.sentence, "tables": tables, "figures": figures}
