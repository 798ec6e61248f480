"""A run read back from its files, which somebody else may have made: checked before use, never executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from driftlab.record.files import RecordError, read_text, readable
from driftlab.record.json_files import DEEPEST, read_json
from driftlab.record.seed_record import SeedRecord, finished_seeds, read_seed, seed_folder
from driftlab.words import Finding, Verdict
from suite.command.errors import ConfigurationError, one_line

SETTINGS = "experiment.yaml"
MEASUREMENTS = "measurements.json"
# A run writes 1 to 3 kB and about a hundred values. What is read of them grows faster than their number: with
# the most that is let through, reading takes about a second.
LARGEST_SETTINGS = 2**16  # bytes
MOST_SETTINGS = 2**11
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Of any run that was made before names were held to letters, digits, _ and - too.
FOLDER_NAME = r"[^./\\~\s][^/\\]{,99}"

SUBJECTS = ("candidate", "control", "reference")
_ARM = re.compile(r"[a-z][a-z_0-9]*\.[a-z0-9][a-z0-9-]*")
_RUN = {"digest": str, "command": str, "dataset": Mapping, "environment": Mapping, "times": Mapping}
_NUMBER = int | float | None
# What YAML's own constructors raise where a value is not of the type that its tag says.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def as_yaml(settings: DictConfig) -> str:
    """``experiment.yaml``: the settings less the paths of this machine, which may name a person.

    The folder itself and the next machine know where results and data lie, and how many seeds have room.
    """
    kept = OmegaConf.to_container(settings)
    for key in ("results", "workers"):
        kept.pop(key, None)
    if isinstance(kept.get("data"), dict):
        kept["data"].pop("root", None)
    return OmegaConf.to_yaml(OmegaConf.create(kept))


def read_settings(folder: Path) -> DictConfig:
    """``experiment.yaml``: values alone.

    An interpolation would read this machine's environment, an alias can grow without end; neither stands in a
    file that was written by a run. A run writes the file itself, and never through a link.

    Raises:
        ConfigurationError: it is missing, a link, no YAML, holds more than values; its name is no folder's.
    """
    path = folder / SETTINGS
    try:
        _check_no_link(path)
        text = read_text(path, LARGEST_SETTINGS)
        _check_events(path, yaml.parse(text, _YAML))
        settings = OmegaConf.create(text)
        values = OmegaConf.to_container(settings, resolve=False)
    except RecordError as error:
        raise ConfigurationError(str(error)) from None
    except ConfigurationError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, *_MALFORMED) as error:
        raise ConfigurationError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ConfigurationError(f"{path} is no experiment: it has no name")
    if not re.fullmatch(FOLDER_NAME, values["name"]):
        name = values["name"][:100]
        raise ConfigurationError(f"{path}: name={name!r} is no folder's name: write letters, digits, _ and -")
    return _with_defaults(settings, path)


def _check_events(path: Path, events: Iterable[yaml.Event]) -> None:
    """Before anything is made of them: what follows is slow, or asks this machine for values."""
    depth = values = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise ConfigurationError(f"{path} holds a YAML alias (*): write its value instead")
        if isinstance(event, yaml.ScalarEvent) and ("${" in event.value or event.value == "???"):
            found = event.value[:60]
            raise ConfigurationError(f"{path} holds {found}, which has no value yet: write the value instead")
        values += isinstance(event, yaml.NodeEvent)
        if values > MOST_SETTINGS:
            raise ConfigurationError(f"{path} cannot be read: it holds more than {MOST_SETTINGS:,} values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ConfigurationError(f"{path} cannot be read: it is nested too deeply")


def _with_defaults(settings: DictConfig, path: Path) -> DictConfig:
    for key, value in {"hypothesis": "", "expected": None}.items():
        if key not in settings:
            settings[key] = value
    for key, values in {"expected": (None, *map(str, Verdict)), "subject": SUBJECTS}.items():
        if settings.get(key, values[0]) not in values:
            choices = ", ".join(v or "null" for v in values)
            raise ConfigurationError(f"{path}: {key}={settings[key]} is unknown: choose from {choices}")
    if not isinstance(settings.hypothesis, str):
        raise ConfigurationError(f"{path}: hypothesis={settings.hypothesis} must be a sentence")
    return settings


def finished(folder: Path, say: Callable[[str], None], *, ran_here: bool = False) -> list[SeedRecord]:
    """The finished seeds of an experiment; one that is damaged is left out, and that is said.

    Args:
        ran_here: whether they are this command's own, whose owner may keep some of them elsewhere, by a link.
    """
    read, records = read_checked if ran_here else read_strangers, []
    for seed in finished_seeds(folder):
        try:
            records.append(read(folder, seed))
        except RecordError as error:
            say(f"left out of the verdict: {error}")
    return [r for r in records if r is not None]


def read_strangers(folder: Path, seed: int) -> SeedRecord | None:
    """As ``read_checked``, of a folder that somebody else may have made. Raises RecordError of any link."""
    home = seed_folder(folder, seed)
    with readable(home):
        for place in (home, *home.iterdir()):
            _check_no_link(place)
    return read_checked(folder, seed)


def _check_no_link(place: Path) -> None:
    """A stranger's link may lead to any file of this machine. Raises RecordError."""
    if place.is_symlink():
        raise RecordError(f"{place} is a link: put the file or folder itself in its place")


def read_checked(folder: Path, seed: int) -> SeedRecord | None:
    """A finished seed, with inf and -inf as the numbers that JSON has no word for; None where unfinished.

    Raises:
        RecordError: it is not what a run writes; the message names the file and what is wrong.
    """
    record = read_seed(folder, seed)
    if record is None:
        return None
    file = seed_folder(folder, seed) / "run.json"
    run = record.run | {key: finite(record.run.get(key) or []) for key in ("probes", "layers")}
    if wrong := _wrong_key(run) or _wrong_arms(run["arms"]) or wrong_probe(run["probes"]):
        raise RecordError(f"{file} is damaged: {wrong} cannot be read")
    return replace(record, run=run)


def _wrong_key(run: Mapping) -> str | None:
    for key, kind in _RUN.items():
        if not isinstance(run.get(key), kind):
            return key
    if not isinstance(run["times"].get("seconds"), _NUMBER):
        return "times.seconds"
    sound = isinstance(run["layers"], list) and all(map(_is_layer, run["layers"]))
    return None if sound else "layers"


def _wrong_arms(arms: Mapping) -> str | None:
    for name, arm in arms.items():
        if not _ARM.fullmatch(name) or not isinstance(arm, Mapping):
            return "arms"
        if not {"blown_up_at", "against"} <= set(arm) or arm["against"] not in (None, *arms):
            return f"arms.{name}"
        if not isinstance(arm["blown_up_at"], int | None):
            return f"arms.{name}.blown_up_at"
    return None


def wrong_probe(probes: object) -> str | None:
    """Where stored probes are not what a run writes."""
    if not isinstance(probes, list):
        return "probes"
    for number, stored in enumerate(probes):
        try:
            evidence = Finding.from_dict(stored).evidence
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return f"probes[{number}] ({one_line(error)})"
        texts = (evidence.probe, evidence.question, evidence.reading)
        numbers = (evidence.measured, evidence.threshold)
        if not all(isinstance(t, str) for t in texts) or not all(isinstance(n, _NUMBER) for n in numbers):
            return f"probes[{number}]"
        if not _is_place(stored["place"]):
            return f"probes[{number}].place"
    return None


def _is_layer(value: object) -> bool:
    passes = value.get("passes") if isinstance(value, Mapping) else None
    if (
        not isinstance(passes, Mapping)
        or not isinstance(value.get("module"), str)
        or "rewritten" not in value
    ):
        return False
    kinds = [k for k in passes.values() if isinstance(k, Mapping)]
    return len(kinds) == len(passes) and all(isinstance(v, _NUMBER) for k in kinds for v in k.values())


def _is_place(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, Mapping) or not {"module", "pass"} <= set(value):
        return False
    types = (("module", str | None), ("pass", str), ("step", int))
    return all(isinstance(value.get(key, 0), kind) for key, kind in types)


def measurements(folder: Path, records: Sequence[SeedRecord]) -> dict[int, dict]:
    """Seed -> what it measured beside its curves. Raises RecordError where a file is damaged."""
    return {r.seed: finite(read_json(seed_folder(folder, r.seed) / MEASUREMENTS)) for r in records}


def finite(value: object) -> object:
    """JSON's words for what it has no number for, as the floats that they stand for."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return float(value) if value in ("inf", "-inf") else value
