"""What the command line offers, and what to say when it is misspelt. Imports nothing heavy, for --help."""

from __future__ import annotations

import difflib
import importlib
import json
import re
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from suite.command.errors import ConfigurationError, one_line, refused_by_disk
from suite.data.images import DataError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"

USAGE = """\
driftlab: is it round-off, unstable training, or a bug in the rewrite?

usage: python train.py +experiment=NAME [SETTING=VALUE ...]

experiments
{experiments}

settings, the most used
  seed=0..9               3, 0..9 (both ends included) or [0,2,5]; with -m each seed is a job of its own
  scale=auto              {scale}; auto is full on a GPU, small on a CPU
  data=auto               {data}; your own images: data=folder data.root=FOLDER
  rewrite.target=a.b.f    your own rewrite, f(model) -> model
  logger=wandb            {logger}
  results=results/runs    where the files go
  rerun=true              do finished seeds again
  workers=auto            seeds at a time: as many as the cores carry, or one a GPU
  -m hydra/launcher=...   a job a seed: joblib on this machine, submitit_slurm on a cluster
  fail_on=[bug]           end with exit status 3 on these verdicts

exit status: 0 this command wrote a verdict, whatever it says; 1 unfinished, the same command goes on;
             2 bad configuration; 3 a verdict of fail_on; 130 Ctrl-C; 143 SIGTERM
all settings: python train.py +experiment=NAME --cfg job"""


def experiments() -> dict[str, str]:
    """The name of every experiment and the first sentence of its comment."""
    return {path.stem: _first_sentence(path) for path in sorted((CONF / "experiment").glob("*.yaml"))}


def _first_sentence(path: Path) -> str:
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line for line in lines if not line.startswith("@"))
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0]


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def usage() -> str:
    found = experiments()
    width = max(map(len, found))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in found.items())
    return USAGE.format(experiments=lines, **{g: " | ".join(choices(g)) for g in ("scale", "data", "logger")})


def kind(name: str) -> ModuleType:
    """A kind of experiment, a folder of ``experiments/``: its ``run(config)`` carries one out.

    Its ``Settings`` say which settings it has (``suite.command.schema``).

    Raises:
        ConfigurationError: there is none of this name.
    """
    kinds = sorted(p.parent.name for p in (ROOT / "experiments").glob("*/__init__.py"))
    if name not in kinds:
        raise ConfigurationError(f"kind={name} is unknown: {instead(str(name), kinds)}")
    return importlib.import_module(f"experiments.{name}")


def in_sweep() -> bool:
    """Whether this is one job of several (``--multirun``)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def overrides(settings: DictConfig) -> list[str]:
    """The command line as Hydra read it."""
    if not HydraConfig.initialized():
        return [f"+experiment={settings.name}"]
    return list(HydraConfig.get().overrides.task)


def given(group: str, name: str, settings: DictConfig) -> bool:
    """Whether the command line sets ``name`` in this group, as in ``scale.steps=3`` and ``+sizes={...}``."""
    there = (o for o in overrides(settings) if re.match(rf"[+~]*{re.escape(group)}[.=]", o))
    return any(re.search(rf"\b{re.escape(name)}\b", o) for o in there)


def explain(error: BaseException) -> str | None:
    """One line for an error that the user can mend; None for any other, which deserves its traceback."""
    line = _line(error)
    return line and "".join(c if c.isprintable() else " " for c in line)


def _line(error: BaseException) -> str | None:
    if isinstance(error, ConfigurationError | DataError):
        return str(error)
    if isinstance(error, OSError) and refused_by_disk(error):
        return f"{error.filename} cannot be written ({str(error.strerror).lower()}): write results=FOLDER"
    if not isinstance(error, HydraException | OmegaConfBaseException) and not _while_composing(error):
        return None
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: {_quoted(error.override) or str(error).splitlines()[0]}"
    misspelt = re.search(r"Could not override '([^']+)'", text)
    if misspelt and misspelt[1].startswith("scale."):
        size = misspelt[1].removeprefix("scale.")
        return f"{misspelt[1]} is none of this scale's settings: write {size}=..., or scale=small beside it"
    if misspelt:
        return f"{misspelt[1]} is no setting: {_meant(misspelt[1], str(error))}"
    return text or f"a setting cannot be read: {one_line(error.__cause__ or error)}"


# What a function of anybody's takes, of which the files name a few.
_ARGUMENTS = ("model", "optimizer", "rewrite.options")


def _meant(name: str, said: str) -> str:
    """What to write instead of a setting that Hydra did not find; it ``said`` how to add one."""
    group, _, rest = name.partition(".")
    having = [c for c in choices(group) if rest in _names(OmegaConf.load(CONF / group / f"{c}.yaml"))]
    if having:
        return f"it is one of {' and '.join(f'{group}={c}' for c in having)}, to be written beside it"
    function, _, own = name.rpartition(".")
    if function in _ARGUMENTS and not difflib.get_close_matches(own, _beside(function), 1):
        added = re.search(r"use (\+\S+)", said)
        return f"for one that its function takes write {added[1] if added else f'+{name}=VALUE'}"
    return instead(name, settings(), every=False)


def _beside(function: str) -> list[str]:
    return [n.rpartition(".")[2] for n in settings() if n.startswith(f"{function}.")]


def _while_composing(error: BaseException) -> bool:
    """Whether Hydra itself stumbled, over what the command line holds, and nothing of ours was at work."""
    rooms = [f.f_globals.get("__name__", "").partition(".")[0] for f, _ in walk_tb(error.__traceback__)]
    return bool(rooms) and rooms[-1] in ("hydra", "omegaconf") and not {"suite", "experiments"} & {*rooms}


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


def instead(name: str, known: list[str], *, every: bool = True) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"choose from {', '.join(known)}" if every else "all are in conf/config.yaml"
