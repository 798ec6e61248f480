"""What is measured once an experiment and taken by all of its seeds: ``<name>/chosen.json`` in its folder.

What fits depends on the machine, so it is no setting and no part of the digest. Whoever comes first puts it
there, in a directory that is renamed onto that name: however many machines measured at a time, one rename
succeeds (``suite.running.ownership`` says why), and all take what then stands there.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from driftlab.record.files import MissingFile, RecordError, write_whole
from driftlab.record.json_files import read_json, write_sealed
from suite.command.errors import ConfigurationError, storage
from suite.reading.stored import as_yaml
from suite.running.ownership.contenders import rename_onto

if TYPE_CHECKING:
    from suite.running.experiment_folder import Experiment

FILE = "chosen.json"


@dataclass(frozen=True)
class Chosen:
    """One thing that is chosen so.

    Attributes:
        name: under which it stands in the file, beside ``why``.
        setting: whose value it becomes.
        field: of ``Experiment``, which holds the choice.
        is_one: whether a value is one that can have been chosen.
    """

    name: str
    setting: str
    field: str
    is_one: Callable[[object], bool]

    def read(self, folder: Path) -> dict | None:
        """What was chosen for the experiment in ``folder``; None where nobody has chosen yet.

        Raises:
            ConfigurationError: it is damaged: its seeds' ``run.json`` say it too.
        """
        path = folder / self.name / FILE
        try:
            choice = read_json(path)
            if not self.is_one(choice.get(self.name)) or "why" not in choice:
                raise RecordError(f"{path} is damaged: it does not say what was chosen, and why")
            return choice
        except MissingFile:
            return None
        except RecordError as error:
            raise ConfigurationError(
                f"{error}: put the {self.name} of a finished seed's run.json there, or write results=FOLDER"
            ) from None

    def taken(self, settings: DictConfig, choice: dict) -> DictConfig:
        """The settings with it."""
        settings = settings.copy()
        OmegaConf.update(settings, self.setting, choice[self.name], merge=False)
        return settings

    def settle(self, experiment: Experiment, choice: dict) -> Experiment:
        """The experiment with what stands in its folder: ``choice``, if it comes first.

        Raises:
            Unfinished: the disk refuses the file.
        """
        settings, folder = experiment.settings, experiment.folder
        with storage(settings.results, lambda: "no seed was begun"):
            choice = self._first_of_all(folder, choice)
            settings = self.taken(settings, choice)
            write_whole(folder / "experiment.yaml", as_yaml(settings))
        return replace(experiment, settings=settings, **{self.field: choice})

    def _first_of_all(self, folder: Path, choice: dict) -> dict:
        """``choice`` where nobody has chosen yet, else what stands."""
        private = Path(tempfile.mkdtemp(dir=folder, prefix=f".{self.name}."))
        try:
            write_sealed(private / FILE, choice)
            os.chmod(private, 0o755)
            rename_onto(private, folder / self.name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(private, ignore_errors=True)
        stands = self.read(folder)
        assert stands is not None
        return stands
