"""The kind of experiment that trains: every arm in lockstep over every seed, then a verdict over all."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from experiments.configuration import resolve
from experiments.cores import settle_process
from experiments.data.chosen import load_images
from experiments.experiment_folder import Experiment, alone, is_done, open_experiment, overrides
from experiments.judging import judge
from experiments.loggers import log_verdict
from experiments.networks import source_digest
from experiments.outcome import Ran, in_sweep
from experiments.plan import plan_lines, seconds_per_seed
from experiments.seed_run import build, train
from experiments.seeds import parse_seeds
from experiments.terminal import Terminal
from experiments.workers import carry_out

WORTH_WORKERS = 15.0  # seconds of training; workers take about 5 s to start


def run(config: DictConfig) -> Ran:
    """Train what is not finished yet, then judge all finished seeds; a sweep does so at its end.

    Raises:
        ConfigurationError, DataError, Unfinished: with one line for the user.
    """
    terminal = Terminal(job=config.name if in_sweep() else "")
    seeds = parse_seeds(OmegaConf.to_container(config, resolve=False)["seed"])
    experiment = prepare(config, terminal)
    todo = [seed for seed in seeds if not is_done(experiment, seed)]
    _show_plan(experiment, config, seeds, todo)
    with terminal.progress(todo, experiment.settings.steps):
        carry_out(experiment, todo, train)
    if in_sweep():
        return Ran(str(experiment.folder), seeds, None)
    with alone(experiment.settings, experiment.folder):
        verdict = judge(experiment.folder, experiment.digest, experiment.settings, terminal)
        log_verdict(experiment.settings, experiment.digest, experiment.folder)
    return Ran(str(experiment.folder), seeds, verdict)


def prepare(config: DictConfig, terminal: Terminal) -> Experiment:
    """Check the settings, fetch the images, open the experiment's folder."""
    settings = resolve(config)
    settle_process(settings)
    if settings.rewrite.target and "candidate" in settings.roles:
        settings.rewrite.source = source_digest(settings.rewrite.target)
        if any(o.startswith("rewrite.target=") for o in overrides(settings)):
            # what the experiment expected was of its own rewrite
            settings.hypothesis = f"{settings.rewrite.target} changes nothing but rounding"
            settings.expected = None
    images = load_images(settings, terminal.say)
    return open_experiment(settings, images, terminal)


def _show_plan(experiment: Experiment, config: DictConfig, seeds: list[int], todo: list[int]) -> None:
    """Also settles how many seeds run at a time, which how long they take decides."""
    settings, images = experiment.settings, experiment.images
    lockstep, batches, _ = build(settings, images, seeds[0])
    evaluated = min(settings.eval_images or len(images.test_images), len(images.test_images))
    duration = seconds_per_seed(lockstep, *batches.batch(0), evaluated) if todo else 0.0
    if config.workers == "auto" and duration * len(todo) < WORTH_WORKERS:
        settings.workers = 1
    lines = plan_lines(settings, images, seeds, todo, lockstep, duration)
    experiment.terminal.plan(f"{settings.name} {experiment.digest}", lines, in_full=not in_sweep())
