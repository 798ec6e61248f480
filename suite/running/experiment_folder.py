"""An experiment in its folder, and the seeds in it: which are done, who works on one, what is damaged."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig

from driftlab.record.environment import instruments
from driftlab.record.files import OtherVersion, RecordError, Unreadable, remove_parts, write_whole
from driftlab.record.seed_record import read_json, seed_folder
from suite.command.command_line import overrides, own_config_dir
from suite.command.configuration import AUTO, digest, follows_auto
from suite.command.errors import ConfigurationError, one_line, refused_by_disk, storage
from suite.command.seeds import format_seeds
from suite.data.samples import DataSet
from suite.reading.stored import MEASUREMENTS, as_yaml, read_checked
from suite.running.float64_steps import NUMBER
from suite.running.local_choice import WINDOWS
from suite.running.ownership import OwnershipLost, owned_by_me
from suite.showing.terminal import Terminal


@dataclass(frozen=True)
class Experiment:
    """What all seeds of one experiment share.

    Attributes:
        choice: of the number of float64 steps, where ``float64_steps=auto``, as it stands in the folder.
        windows: of where local windows begin, where ``local.windows=auto``, likewise.
        first: the seed whose probes' own answer is shown before its training.
        beside: experiments of the same settings with other rewrites, whose seeds train together with this
            one's (``seed_run``); data set and terminal are this one's.
        outdated: the finished seeds seen so far that were probed by other instruments than today's.
    """

    settings: DictConfig
    digest: str
    folder: Path
    data_set: DataSet | None  # None where it trains on none
    command: str  # without the seeds
    terminal: Terminal
    still_owner: Callable[[], None] = lambda: None  # raises OwnershipLost; asked before a seed leaves a file
    choice: dict | None = None
    windows: dict | None = None
    first: int | None = None
    beside: tuple[Experiment, ...] = ()
    outdated: set[int] = field(default_factory=set)


def open_experiment(settings: DictConfig, data_set: DataSet | None, terminal: Terminal) -> Experiment:
    """Its folder, by the digest of its settings, with ``experiment.yaml`` in it."""
    experiment = look_up(settings, data_set, terminal)
    make_folder(experiment)
    begin(experiment)
    return experiment


def look_up(settings: DictConfig, data_set: DataSet | None, terminal: Terminal) -> Experiment:
    """The experiment, as far as an earlier command left it; nothing is written."""
    name = digest(settings)
    folder = Path(settings.results) / settings.name / name
    choice = NUMBER.read(folder) if settings.get("float64_steps") == AUTO else None
    if choice is not None:
        settings = NUMBER.taken(settings, choice)
    windows = WINDOWS.read(folder) if follows_auto(settings) else None
    if windows is not None:
        settings = WINDOWS.taken(settings, windows)
    terms = {"choice": choice, "windows": windows}
    return Experiment(settings, name, folder, data_set, _command(settings), terminal, **terms)


def make_folder(experiment: Experiment) -> None:
    """Raises ConfigurationError, or Unfinished where there is no room."""
    with _made(experiment):
        experiment.folder.mkdir(parents=True, exist_ok=True)


def begin(experiment: Experiment) -> None:
    """Leaves ``experiment.yaml``. Raises ConfigurationError, or Unfinished where there is no room."""
    with _made(experiment):
        write_whole(experiment.folder / "experiment.yaml", as_yaml(experiment.settings))
        _list(experiment)


def _list(experiment: Experiment) -> None:
    """A line in the list beside the experiment's folder: which digest is which. One process, one write."""
    folder = experiment.folder
    line = "  ".join((experiment.digest, experiment.settings.label or "as it is", experiment.command))
    listed = folder.parent.with_name(f"{folder.parent.name}.txt")
    if not listed.is_file() or line not in listed.read_text().splitlines():
        with listed.open("a") as file:
            file.write(f"{line}\n")


@contextmanager
def _made(experiment: Experiment) -> Iterator[None]:
    begun = os.path.exists(experiment.folder / "experiment.yaml")
    results = experiment.settings.results
    try:
        yield
    except OSError as error:
        if (begun and refused_by_disk(error)) or error.errno in (errno.ENOSPC, errno.EDQUOT):
            with storage(results, lambda: "what has finished is safe"):
                raise
        why = (error.strerror or one_line(error)).lower()
        raise ConfigurationError(
            f"results={results} cannot be written ({why}): write results=FOLDER"
        ) from None


def _command(settings: DictConfig) -> str:
    """The command line that asked for this experiment, less its seeds and what is about this machine."""
    left_out = ("seed=", "results=", "rerun=", "reprobe=", "data.root=", "workers=", "hydra")
    return " ".join(
        [
            "python train.py",
            *own_config_dir(),
            *(shlex.quote(o) for o in overrides(settings) if not o.startswith(left_out)),
        ]
    )


@contextmanager
def alone(settings: DictConfig, folder: Path) -> Iterator[None]:
    """One process at a time judges: the last to do so sees every seed that had finished before.

    Raises:
        Unfinished: the disk refused a file.
    """
    safe = "every seed asked for has finished"
    with storage(settings.results, lambda: safe), owned_by_me(folder / ".verdict.owner"):
        yield


def owned(
    experiment: Experiment,
    seed: int,
    work: Callable[[Experiment, int, Path], None],
    *,
    wait: bool = True,
) -> bool:
    """``work`` on a seed that is not done, in its folder, by one process at a time.

    Returns:
        False where another process owns it that is not to be waited for.
    """

    def waiting() -> None:
        experiment.terminal.say(f"seed {seed}: another process is at it, waiting for its end")

    place = experiment.folder / f".seed={seed}.owner"
    try:
        with (
            storage(experiment.settings.results, lambda: "what has finished is safe"),
            owned_by_me(place, wait=wait, waiting=waiting) as owner,
        ):
            if owner is not None and not is_done(experiment, seed):
                _work(replace(experiment, still_owner=owner.check), seed, work)
            return owner is not None
    except OwnershipLost as error:
        experiment.terminal.say(f"seed {seed}: {error}")
        return owned(experiment, seed, work, wait=wait)


def _work(experiment: Experiment, seed: int, work: Callable[[Experiment, int, Path], None]) -> None:
    home = seed_folder(experiment.folder, seed)
    if experiment.settings.rerun and home.exists():
        shutil.rmtree(home)
    try:
        work(experiment, seed, home)
    except RecordError as error:
        set_aside(experiment, home, error)
        work(experiment, seed, home)


def is_done(experiment: Experiment, seed: int) -> bool:
    """Whether a seed has finished and is sound. One that is damaged is not: its next owner sets it aside.

    Raises:
        ConfigurationError: another version of driftlab finished it, which must not be done again.
        Unfinished: the disk does not let it be read now.
    """
    if experiment.settings.rerun:
        return False
    try:
        with storage(experiment.settings.results, lambda: "nothing was changed"):
            return _finished(experiment, seed)
    except OtherVersion as error:
        raise ConfigurationError(f"{error}: use that one, or write results=FOLDER") from None
    except RecordError:
        return False


def _finished(experiment: Experiment, seed: int) -> bool:
    """Raises RecordError where the seed has finished and is damaged."""
    record = read_checked(experiment.folder, seed)
    if record is None:
        return False
    home = seed_folder(experiment.folder, seed)
    if (theirs := record.run["digest"]) != experiment.digest:
        raise RecordError(f"{home / 'run.json'} is of digest {theirs}, not of {experiment.digest}")
    if experiment.settings.kind != "training":
        read_json(home / MEASUREMENTS)
    if record.run.get("instruments") == instruments():
        return True
    experiment.outdated.add(seed)
    return not experiment.settings.get("reprobe")


def say_outdated(experiment: Experiment) -> None:
    """Other code may find something else in the same networks: one line, with what would probe them again."""
    seeds = sorted(experiment.outdated)
    if seeds and not experiment.settings.get("reprobe"):
        again = "reprobe=true asks the probes again without training"
        if experiment.settings.kind != "training":
            again = "rerun=true measures them again"
        which = f"seed{'s' * (len(seeds) > 1)} {format_seeds(seeds)}"
        experiment.terminal.say(f"{which} finished under other instruments than today's: {again}")


def take_up(experiment: Experiment, seed: int, home: Path) -> None:
    """What the owner of a seed does first: clears away what killed writers left, looks for damage.

    Raises:
        RecordError: the seed has finished and is damaged: it has to be set aside.
    """
    for folder in (home, home / "checkpoint"):
        remove_parts(folder)
    _finished(experiment, seed)


def set_aside(experiment: Experiment, home: Path, error: RecordError) -> None:
    """Keep a seed that cannot be used under another name and say so: it is done again, never deleted.

    Raises:
        Unfinished: it only cannot be read or moved now.
    """
    with storage(experiment.settings.results, lambda: "nothing was changed"):
        if isinstance(error, Unreadable):
            raise error
        aside = _free_name(home, error)
        home.rename(aside)
    experiment.terminal.say(f"{error}; kept as {aside.name}, and the seed is done again")


def _free_name(home: Path, error: RecordError) -> Path:
    why, number = "damaged", 1
    if isinstance(error, OtherVersion):
        why = f"of-{error.version or 'another-version'}"
    while os.path.lexists(aside := home.with_name(f"{home.name}.{why}-{number}")):
        number += 1
    return aside
