"""An experiment in its folder, and the seeds in it: which are done, who works on one, what is damaged."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from driftlab.records import RecordError, read_seed, seed_folder, write_whole
from experiments.configuration import digest
from experiments.data.images import Images
from experiments.errors import ConfigurationError, one_line
from experiments.recorded import as_yaml
from experiments.terminal import Terminal


@dataclass(frozen=True)
class Experiment:
    """What all seeds of one experiment share."""

    settings: DictConfig
    digest: str
    folder: Path
    images: Images | None  # None where it trains on none
    command: str  # without the seeds
    terminal: Terminal


def open_experiment(settings: DictConfig, images: Images | None, terminal: Terminal) -> Experiment:
    """Its folder, by the digest of its settings, with ``experiment.yaml`` in it."""
    name = digest(settings)
    folder = Path(settings.results) / settings.name / name
    try:
        write_whole(folder / "experiment.yaml", as_yaml(settings))
    except OSError as error:
        raise ConfigurationError(
            f"results={settings.results} cannot be written ({one_line(error)}): write results=FOLDER"
        ) from None
    return Experiment(settings, name, folder, images, _command(settings), terminal)


def overrides(settings: DictConfig) -> list[str]:
    """The command line as Hydra read it."""
    if not HydraConfig.initialized():
        return [f"+experiment={settings.name}"]
    return list(HydraConfig.get().overrides.task)


def _command(settings: DictConfig) -> str:
    """The command line that asked for this experiment, less its seeds and where it wrote."""
    left_out = ("seed=", "results=", "rerun=", "data.root=")
    return " ".join(
        ["python train.py", *(shlex.quote(o) for o in overrides(settings) if not o.startswith(left_out))]
    )


def owned(experiment: Experiment, seed: int, work: Callable[[Experiment, int, Path], None]) -> None:
    """``work`` on a seed that is not done, in its folder. Another process that owns it is waited for."""
    with FileLock(experiment.folder / f".seed={seed}.owner"):
        if is_done(experiment, seed):
            return
        home = seed_folder(experiment.folder, seed)
        if experiment.settings.rerun and home.exists():
            shutil.rmtree(home)
        try:
            work(experiment, seed, home)
        except RecordError as error:
            set_aside(experiment, home, error)
            work(experiment, seed, home)


def is_done(experiment: Experiment, seed: int) -> bool:
    if experiment.settings.rerun:
        return False
    try:
        return read_seed(experiment.folder, seed) is not None
    except RecordError as error:
        set_aside(experiment, seed_folder(experiment.folder, seed), error)
        return False


def set_aside(experiment: Experiment, home: Path, error: RecordError) -> None:
    """Keep a damaged seed under another name and say so: it is redone, never used, never deleted."""
    number = 1
    while (aside := home.with_name(f"{home.name}.damaged-{number}")).exists():
        number += 1
    home.rename(aside)
    experiment.terminal.say(f"{error}; kept as {aside.name}, and the seed is done again")
