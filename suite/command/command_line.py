"""What the command line offers, and what to say when it is misspelt. Imports nothing heavy, for --help."""

from __future__ import annotations

import difflib
import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from suite.command.errors import ConfigurationError

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
  rewrites=[a.b.f,NAME]   several against one reference, which is trained once; NAME: an experiment's rewrite
  logger=wandb            {logger}
  results=results/runs    where the files go
  rerun=true              do finished seeds again
  workers=auto            seeds at a time: as many as the cores carry, or one a GPU
  -m hydra/launcher=...   a job a seed: joblib on this machine, submitit_slurm on a cluster
  model._target_=my.Net   any network; likewise loss, optimizer, scheduler, data (docs/extending.md)
  --config-dir DIR        your own experiment/, model/ and data/ files
  fail_on=[bug]           end with exit status 3 on these verdicts

exit status: 0 this command wrote a verdict, whatever it says; 1 unfinished, the same command goes on;
             2 bad configuration; 3 a verdict of fail_on; 130 Ctrl-C; 143 SIGTERM; 129 SIGHUP; 131 SIGQUIT
all settings: python train.py +experiment=NAME --cfg job"""


_own: list[Path] = []  # --config-dir: one's own experiment/, model/, data/


def look_in(folder: Path | None) -> None:
    """Offer what this folder holds too; None: what the suite has alone.

    Raises:
        ConfigurationError: a file of it has the name of one of the suite's, which Hydra would take.
    """
    _own[:] = [folder] if folder else []
    twins = [path for path in (folder.glob("*/*.yaml") if folder else ()) if _twin(path).is_file()]
    if twins:
        name = f"{twins[0].parent.name}={twins[0].stem}"
        raise ConfigurationError(f"{twins[0]} would never be read: {name} is the suite's own: rename it")


def _twin(path: Path) -> Path:
    return CONF / path.parent.name / path.name


def files(group: str) -> dict[str, Path]:
    """Name -> file of everything there is to choose from in a group."""
    found = [path for folder in (CONF, *_own) for path in (folder / group).glob("*.yaml")]
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def experiments() -> dict[str, str]:
    """The name of every experiment and the first sentence of its comment."""
    return {name: _first_sentence(path) for name, path in files("experiment").items()}


def _first_sentence(path: Path) -> str:
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line for line in lines if not line.startswith("@"))
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0]


def choices(group: str) -> list[str]:
    return list(files(group))


def usage() -> str:
    found = experiments()
    width = max(map(len, found))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in found.items())
    return USAGE.format(experiments=lines, **{g: " | ".join(choices(g)) for g in ("scale", "data", "logger")})


def own_config_dir() -> list[str]:
    """``--config-dir DIR`` as this job was given it, seen from the current folder where it lies in it."""
    if not HydraConfig.initialized():
        return []
    given = [Path(s.path) for s in HydraConfig.get().runtime.config_sources if s.provider == "command-line"]
    below = [p.relative_to(Path.cwd()) if p.is_relative_to(Path.cwd()) else p for p in given]
    return [word for path in below for word in ("--config-dir", shlex.quote(str(path)))]


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


def chosen_file(group: str) -> Path | None:
    """The file of a group that this job chose, as in ``model=resnet14``; None where Hydra composed none."""
    if not HydraConfig.initialized():
        return None
    runtime = HydraConfig.get().runtime
    folders = (Path(s.path) for s in runtime.config_sources if s.schema == "file")
    files = (folder / group / f"{runtime.choices.get(group)}.yaml" for folder in folders)
    return next((file for file in files if file.is_file()), None)


def given(group: str, name: str, settings: DictConfig) -> bool:
    """Whether the command line sets ``name`` in this group, as in ``scale.steps=3`` and ``+sizes={...}``."""
    there = (o for o in overrides(settings) if re.match(rf"[+~]*{re.escape(group)}[.=]", o))
    return any(re.search(rf"\b{re.escape(name)}\b", o) for o in there)


def instead(name: str, known: list[str], *, every: bool = True) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"choose from {', '.join(known)}" if every else "all are in conf/config.yaml"
