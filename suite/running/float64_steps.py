"""``float64_steps=auto``: how many a seed takes, chosen once an experiment and taken by all of its seeds.

How many fit depends on the machine, so the number is no setting and no part of the digest: it stands in the
experiment's folder, ``float64_steps/chosen.json``, with what was measured. Whoever comes first puts it
there, in a directory that is renamed onto that name: however many machines measured at a time, one rename
succeeds (``suite.running.ownership`` says why), and all take what then stands there.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from driftlab.record.files import MissingFile, RecordError, write_whole
from driftlab.record.json_files import read_json, write_sealed
from suite.command.configuration import ALL_FLOAT64_STEPS, AUTO, digest, with_float64_steps
from suite.command.errors import ConfigurationError, storage
from suite.reading.stored import as_yaml
from suite.running.ownership.contenders import rename_onto

if TYPE_CHECKING:
    from suite.running.experiment_folder import Experiment

CHOSEN = Path("float64_steps") / "chosen.json"


def as_begun(settings: DictConfig, say: Callable[[str], None]) -> DictConfig:
    """``scale=full`` with the number of before there was ``auto``, where it was begun with that."""
    if not settings.float64_steps == settings.scale.float64_steps == AUTO:
        return settings
    before = with_float64_steps(settings, ALL_FLOAT64_STEPS)
    folder = Path(settings.results) / settings.name / digest(before)
    if not os.path.exists(folder / "experiment.yaml"):
        return settings
    say(f"float64_steps={before.float64_steps}: so this experiment was begun in {folder}")
    return before


def read_choice(folder: Path) -> dict | None:
    """What was chosen for the experiment in ``folder``; None where nobody has chosen yet.

    Raises:
        ConfigurationError: it is damaged: its seeds' ``run.json`` say it too.
    """
    try:
        choice = read_json(folder / CHOSEN)
        steps = choice.get("float64_steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1 or "why" not in choice:
            raise RecordError(f"{folder / CHOSEN} is damaged: it does not say how many steps, and why")
        return choice
    except MissingFile:
        return None
    except RecordError as error:
        raise ConfigurationError(
            f"{error}: put the float64_steps of a finished seed's run.json there, or write results=FOLDER"
        ) from None


def settle(experiment: Experiment, choice: dict) -> Experiment:
    """The experiment with the number that stands in its folder: that of ``choice``, if it comes first.

    Raises:
        Unfinished: the disk refuses the file.
    """
    settings, folder = experiment.settings, experiment.folder
    with storage(settings.results, lambda: "no seed was begun"):
        choice = _first_of_all(folder, choice)
        settings = with_choice(settings, choice)
        write_whole(folder / "experiment.yaml", as_yaml(settings))
    return replace(experiment, settings=settings, choice=choice)


def with_choice(settings: DictConfig, choice: dict) -> DictConfig:
    settings = settings.copy()
    settings.float64_steps = choice["float64_steps"]
    return settings


def _first_of_all(folder: Path, choice: dict) -> dict:
    """``choice`` where nobody has chosen yet, else what stands."""
    place = folder / CHOSEN.parent
    private = Path(tempfile.mkdtemp(dir=folder, prefix=f".{place.name}."))
    try:
        write_sealed(private / CHOSEN.name, choice)
        os.chmod(private, 0o755)
        rename_onto(private, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(private, ignore_errors=True)
    stands = read_choice(folder)
    assert stands is not None
    return stands
