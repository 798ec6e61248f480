"""The kind of experiment that trains: every arm in lockstep over every seed, then a verdict over all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from driftlab.lockstep.checkpoint import checkpoint_step
from driftlab.record.seed_record import seed_folder
from suite.command.command_line import in_sweep
from suite.command.configuration import AUTO, follows_auto, resolve
from suite.command.idle import say_beyond
from suite.command.jobs import Ran
from suite.command.leftovers import no_empty_folder
from suite.command.machine import process_settled
from suite.command.rewrites import each, rewrites_of
from suite.command.schema import Training as Settings
from suite.command.seeds import parse_seeds
from suite.command.written import title, written
from suite.running.arguments import check_network
from suite.running.building import Built, on_cpu
from suite.running.costs import Sketch, build_sketched, float64_choice, forecast, make_sketch
from suite.running.ending import end, end_together
from suite.running.experiment_folder import (
    Experiment,
    begin,
    is_done,
    look_up,
    make_folder,
    say_outdated,
)
from suite.running.float64_steps import NUMBER, as_begun
from suite.running.importing import imported, own_sources, source_digest
from suite.running.local_choice import WINDOWS, local_choice
from suite.running.own_data import load_data
from suite.running.seed_run import answer_first, train
from suite.running.workers import carry_out, in_a_worker
from suite.showing.plan import training_plan
from suite.showing.terminal import Terminal

__all__ = ["Settings", "run"]

WORTH_WORKERS = 18.0  # seconds in one process; workers take about 5 s to start


def run(config: DictConfig) -> Ran:
    """Train what is not finished yet, then judge all finished seeds; a sweep does so at its end.

    Raises:
        ConfigurationError, DataError, Unfinished: with one line for the user.
    """
    terminal = Terminal(job=config.get("name") if in_sweep() else "")
    seeds, rewrites = parse_seeds(config.get("seed")), len(rewrites_of(config)) or 1
    begun: list[tuple[Experiment, list[int]]] = []
    with ExitStack() as settled:
        for own in each(config):
            settings = resolve(own, terminal.say)
            if begun:
                begun.append(_begun_beside(settings, seeds, begun[0][0]))
                continue
            settled.enter_context(process_settled(settings, terminal.say))
            few_are_fast = config.workers == "auto"
            experiment, todo, built = _begun(settings, seeds, terminal, rewrites, few_are_fast=few_are_fast)
            begun.append((experiment, todo))
        begun[0] = _first_answered(*begun[0], built, seeds[0], rewrites)
        for place, (experiment, todo) in enumerate(begun):
            if place:  # those before it may have trained it beside them
                todo = [seed for seed in todo if not is_done(experiment, seed)]
            _carry_out(experiment, todo, [other for other, _ in begun[place + 1 :]])
        experiments = [experiment for experiment, _ in begun]
        return end(experiments[0], seeds) if rewrites == 1 else end_together(experiments, seeds)


def _carry_out(experiment: Experiment, todo: list[int], others: list[Experiment]) -> None:
    """``others``: experiments with other rewrites, whose seeds train beside these."""
    beside = tuple(replace(other, first=next(iter(todo), None)) for other in others)
    with experiment.terminal.progress(todo, experiment.settings.steps):
        carry_out(replace(experiment, beside=beside), todo, train)


def _begun(
    settings: DictConfig, seeds: list[int], terminal: Terminal, rewrites: int, *, few_are_fast: bool
) -> tuple[Experiment, list[int], Built]:
    """The experiment in its folder, with what is measured beforehand; the seeds that are to be done; and the
    first of all seeds as it was built to plan, on the CPU.

    Args:
        rewrites: how many train together.
        few_are_fast: where workers are not worth their start there are none.
    """
    settings = as_begun(_of_its_rewrite(settings), terminal.say)
    data_set = load_data(settings, terminal.say)
    say_beyond(settings, data_set.test_count, terminal.say)
    built = build_sketched(on_cpu(settings), data_set, seeds[0])  # what cannot be built leaves no folder
    with _in_its_folder(look_up(settings, data_set, terminal), seeds) as (experiment, todo):
        return _planned(experiment, built, seeds, todo, rewrites, few_are_fast=few_are_fast), todo, built


def _first_answered(
    experiment: Experiment, todo: list[int], built: Built, seed: int, rewrites: int
) -> tuple[Experiment, list[int]]:
    """The probes of the first seed asked here, of what was built to plan: before any worker has begun.

    Args:
        built: ``seed``, on the CPU.
    """
    if not todo:
        return experiment, todo
    named = title(experiment.settings) if rewrites > 1 else ""
    here = todo[0] == seed and experiment.settings.device == "cpu"
    with experiment.terminal.progress(todo, experiment.settings.steps):
        answered = here and answer_first(experiment, built, seed, named)
    return replace(experiment, first=None if answered else todo[0]), todo


def _begun_beside(settings: DictConfig, seeds: list[int], first: Experiment) -> tuple[Experiment, list[int]]:
    """As ``_begun``, of a further rewrite: with the data set and the choices of the first, so that both train
    as long, unless it had choices of its own already."""
    terminal = first.terminal
    settings = as_begun(_of_its_rewrite(settings), terminal.say)
    settings.data, settings.workers = first.settings.data, first.settings.workers
    build_sketched(on_cpu(settings), first.data_set, seeds[0])
    with _in_its_folder(look_up(settings, first.data_set, terminal), seeds) as (experiment, todo):
        begin(experiment)
        if todo and experiment.settings.float64_steps == AUTO and first.choice:
            experiment = NUMBER.settle(experiment, first.choice)
        if todo and follows_auto(experiment.settings) and first.windows:
            experiment = WINDOWS.settle(experiment, first.windows)
        terminal.say(f"beside it: {title(experiment.settings)}  {experiment.digest}")
        return experiment, todo


@contextmanager
def _in_its_folder(experiment: Experiment, seeds: list[int]) -> Iterator[tuple[Experiment, list[int]]]:
    """The experiment and the seeds that are to be done; inside it has a folder, which is not left empty."""
    with no_empty_folder(experiment.folder):
        make_folder(experiment)
        todo = [seed for seed in seeds if not is_done(experiment, seed)]
        say_outdated(experiment)
        yield experiment, todo


def _of_its_rewrite(settings: DictConfig) -> DictConfig:
    """The settings, with what is known of the rewrite that they name. Raises ConfigurationError."""
    check_network(settings)
    if sources := own_sources(settings):
        settings.sources = sources
    if settings.rewrite.target and "candidate" in settings.roles:
        settings.rewrite.source = source_digest(imported("rewrite.target", settings.rewrite.target))
        given = written()
        if "rewrite.target" in given:  # what the experiment expected was of its own rewrite
            about = f"{settings.rewrite.target} changes nothing but rounding"
            meant = {"hypothesis": about, "expected": None}
            settings.update({name: value for name, value in meant.items() if name not in given})
    return settings


def _planned(
    experiment: Experiment,
    built: Built,
    seeds: list[int],
    todo: list[int],
    rewrites: int,
    *,
    few_are_fast: bool,
) -> Experiment:
    """Settle what is measured first, and say what is to be done.

    Args:
        built: the first seed, on the CPU.
    """
    sketch = _sketch(experiment, built, seeds[0], timed=bool(todo))  # whose error leaves no file
    begin(experiment)
    if todo and experiment.settings.float64_steps == AUTO:
        experiment = NUMBER.settle(experiment, float64_choice(experiment.settings, sketch))
    if todo and follows_auto(experiment.settings):
        experiment = WINDOWS.settle(experiment, local_choice(experiment.settings, sketch))
    settings = experiment.settings
    starts = [checkpoint_step(seed_folder(experiment.folder, seed) / "checkpoint") or 0 for seed in todo]
    # as many arms more as there are further candidates
    more = 1 + (rewrites - 1) * sum(arm.startswith("candidate.") for arm in sketch.arms) / len(sketch.arms)
    if few_are_fast and more * forecast(settings, sketch, starts, workers=1) < WORTH_WORKERS:
        settings.workers = 1
    duration = more * forecast(settings, sketch, starts, workers=settings.workers)
    lines = training_plan(experiment, seeds, todo, sketch, duration)
    experiment.terminal.plan(f"{title(settings)}  {experiment.digest}", lines, in_full=not in_sweep())
    return experiment


def _sketch(experiment: Experiment, built: Built, seed: int, *, timed: bool) -> Sketch:
    """Where workers train on GPUs this process stays off them: a GPU may be another process's alone."""
    settings = experiment.settings
    if settings.device == "cpu" or not timed:
        return make_sketch(settings, built, timed=timed)
    if settings.workers == 1:
        return _timed(experiment, seed)
    return in_a_worker(experiment, partial(_timed, seed=seed))


def _timed(experiment: Experiment, seed: int) -> Sketch:
    settings = experiment.settings
    return make_sketch(settings, build_sketched(settings, experiment.data_set, seed))
