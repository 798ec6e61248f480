"""One line for what Hydra, OmegaConf or a disk refuse: what is wrong, and what to write instead."""

from __future__ import annotations

import difflib
import json
import re
from traceback import walk_tb

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from suite.command.command_line import CONF, choices, files, instead
from suite.command.errors import ConfigurationError, one_line, refused_by_disk
from suite.data.images import DataError

# what Hydra says without a remedy: what to write
REMEDIES = {
    "invalid literal for int|is not an int": "a list has no names below it: write it as a whole, NAME=[A,B]",
    "Cannot find primary config": "leave --config-name and --config-path out, and write +experiment=NAME",
    "Could not delete from config": "leave it out; --cfg job shows what there is",
    "requires --multirun": "write -m for a job each, or one value",
    "looks like a config group override": "leave out what stands from @ on, and write NAME=VALUE",
    "appears more than once": "write it without the plus sign",
}


def explain(error: BaseException) -> str | None:
    """One line for an error that the user can mend; None for any other, which deserves its traceback."""
    line = _line(error)
    return line and "".join(c if c.isprintable() else " " for c in line)


def _line(error: BaseException) -> str | None:
    if isinstance(error, ConfigurationError | DataError):
        return str(error)
    if isinstance(error, OSError) and refused_by_disk(error) and error.filename is None:
        return f"what is printed cannot be written ({str(error.strerror).lower()}): send it elsewhere"
    rooms = _rooms(error)
    if isinstance(error, OSError) and rooms[-1:] == ["pathlib"] and "hydra" in rooms:  # a folder for a job
        return f"{error.filename} cannot be made ({str(error.strerror).lower()}): write another one"
    if isinstance(error, OSError) and refused_by_disk(error):
        return f"{error.filename} cannot be written ({str(error.strerror).lower()}): write results=FOLDER"
    while_composing = rooms and rooms[-1] in ("hydra", "omegaconf")
    if not isinstance(error, HydraException | OmegaConfBaseException) and not while_composing:
        return None
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, InterpolationKeyError):
        return _unknown_reference(error)
    if isinstance(error, OverrideParseException):
        meant = _quoted(error.override) or f"{str(error).splitlines()[0]}: write NAME=VALUE, in quotes"
        return f"{error.override} cannot be read: {meant}"
    misspelt = re.search(r"Could not override '([^']+)'", text)
    if misspelt and misspelt[1].startswith("scale."):
        return _unknown_size(misspelt[1].removeprefix("scale."))
    if misspelt:
        return f"{misspelt[1]} is no setting: {_meant(misspelt[1], str(error))}"
    if text.startswith("Error merging override "):
        override = text.removeprefix("Error merging override ")
        return f"{override} cannot be used: {_wanted(error.__cause__ or error)}"
    if several := re.match(r"Ambiguous value for argument '(.+?)=(.+?)'", text):
        name, values = several.groups()
        return (
            f"{name}={values} holds several values: write -m for a job each, or {name}=[{values}] for a list"
        )
    for said, remedy in REMEDIES.items():
        if re.search(said, text):
            return f"{text.partition('. Check')[0].rstrip('.')}: {remedy}"
    return text or f"a setting cannot be read: {one_line(error.__cause__ or error)}"


def _unknown_reference(error: InterpolationKeyError) -> str:
    """``${nope}``, with the setting that holds it where that is known."""
    name = str(error).partition("'")[2].partition("'")[0]
    place = f"{error.full_key}: " if error.full_key else ""
    return f"{place}${{{name}}} names no setting: {instead(name, settings(), every=False)}"


def _unknown_size(size: str) -> str:
    sizes = _names(OmegaConf.load(CONF / "scale" / "small.yaml"))[1:]  # less its name
    if size in sizes:  # scale=auto has them where a run begins
        setting = "model.width" if size == "width" else size
        return f"scale.{size} is a size of one scale: write {setting}=VALUE, or scale=small beside it"
    return f"scale.{size} is no size: {instead(size, sizes)}"


# what OmegaConf calls a type: how its values are written
_TYPES = {"bool": "true or false", "integer": "a whole number", "float": "a number", "str": "text"}


def _wanted(cause: BaseException) -> str:
    """What a setting of Hydra's own takes."""
    said = one_line(cause).partition(": ")[2]
    if "is not an int" in said:
        return "a list has no names below it: write it as a whole, NAME=[A,B]"
    if "list index" in said:
        return "the list is shorter: write it as a whole, NAME=[A,B]"
    kind = next((words for name, words in _TYPES.items() if re.search(name, said, re.IGNORECASE)), None)
    return f"write {kind}" if kind else f"{said}: --cfg job and --cfg hydra show how it is written"


# What a function of anybody's takes, of which the files name a few.
_CHOOSING = ("name", "_target_", "_partial_")  # what a choice is known by
_ARGUMENTS = ("model", "optimizer", "rewrite.options")


def _meant(name: str, said: str) -> str:
    """What to write instead of a setting that Hydra did not find; it ``said`` how to add one."""
    group, _, rest = name.partition(".")
    having = [c for c, path in files(group).items() if rest in _names(OmegaConf.load(path))]
    if having:
        return f"it is one of {' and '.join(f'{group}={c}' for c in having)}, to be written beside it"
    function, _, own = name.rpartition(".")
    if function in _ARGUMENTS and not difflib.get_close_matches(own, _beside(function), 1):
        added = re.search(r"use (\+\S+)", said)
        return f"for one that its function takes write {added[1] if added else f'+{name}=VALUE'}"
    own = [n for n in settings() if n.startswith(f"{group}.") and n.rpartition(".")[2] not in _CHOOSING]
    if choices(group) and own and not difflib.get_close_matches(rest, [n.partition(".")[2] for n in own], 1):
        return f"there are {', '.join(own)}, each beside the {group} that has it"
    return instead(name, settings(), every=False)


def _beside(function: str) -> list[str]:
    return [n.rpartition(".")[2] for n in settings() if n.startswith(f"{function}.")]


def _rooms(error: BaseException) -> list[str]:
    """Whose code was at work, from the outermost call to the place of the error; none where ours was."""
    rooms = [f.f_globals.get("__name__", "").partition(".")[0] for f, _ in walk_tb(error.__traceback__)]
    return [] if {"suite", "experiments"} & {*rooms} else rooms


def _quoted(override: str) -> str | None:
    """What to write instead where Hydra's grammar stumbles over a character in a value."""
    name, _, value = override.partition("=")
    if value.startswith("~"):
        return f"write {name}=$HOME{value[1:]}"
    quoted = f"{name}={json.dumps(value, ensure_ascii=False)}"
    try:
        OverridesParser.create().parse_override(quoted)
    except HydraException:
        return None
    return f"write it in quotes: '{quoted}'"


def settings() -> list[str]:
    """The names of all settings, for the one that a misspelt name may have meant."""
    files = [(CONF / "config.yaml", "")] + [(p, f"{p.parent.name}.") for p in CONF.glob("[!e]*/*.yaml")]
    launchers = CONF.glob("hydra/launcher/*.yaml")
    found = {prefix + name for path, prefix in files for name in _names(OmegaConf.load(path))}
    found = {n for n in found if not n.startswith(("hydra", "defaults", "scale.scale"))}
    return sorted(found | {f"hydra.launcher.{n}" for p in launchers for n in _names(OmegaConf.load(p))})


def _names(node: object) -> list[str]:
    if not OmegaConf.is_dict(node):
        return []
    below = {key: _names(node._get_node(key)) for key in node}
    return [name for key, rest in below.items() for name in (key, *(f"{key}.{r}" for r in rest))]
