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
from pathlib import Path

from driftlab.record.files import MissingFile, RecordError
from driftlab.record.json_files import read_json, write_sealed
from suite.command.errors import ConfigurationError
from suite.running.ownership.contenders import rename_onto

FILE = "chosen.json"


def read_choice(folder: Path, name: str, is_one: Callable[[object], bool]) -> dict | None:
    """What was chosen for the experiment in ``folder``; None where nobody has chosen yet.

    Args:
        name: of what is chosen, under which it stands in the file beside ``why``.
        is_one: whether a value is one that can have been chosen.

    Raises:
        ConfigurationError: it is damaged: its seeds' ``run.json`` say it too.
    """
    path = folder / name / FILE
    try:
        choice = read_json(path)
        if not is_one(choice.get(name)) or "why" not in choice:
            raise RecordError(f"{path} is damaged: it does not say what was chosen, and why")
        return choice
    except MissingFile:
        return None
    except RecordError as error:
        raise ConfigurationError(
            f"{error}: put the {name} of a finished seed's run.json there, or write results=FOLDER"
        ) from None


def first_of_all(folder: Path, name: str, choice: dict, is_one: Callable[[object], bool]) -> dict:
    """``choice`` where nobody has chosen yet, else what stands."""
    place = folder / name
    private = Path(tempfile.mkdtemp(dir=folder, prefix=f".{place.name}."))
    try:
        write_sealed(private / FILE, choice)
        os.chmod(private, 0o755)
        rename_onto(private, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(private, ignore_errors=True)
    stands = read_choice(folder, name, is_one)
    assert stands is not None
    return stands
