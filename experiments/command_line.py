"""What the command line offers, and what to say when it is misspelt. Imports nothing heavy, for --help."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent
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

exit status: 0 finished, whatever the verdict; 1 unfinished, the same command goes on; 2 bad configuration;
             3 a verdict of fail_on
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


def check(arguments: list[str]) -> None:
    """Refuse what Hydra would explain at length. Raises ConfigurationError."""
    overrides = [a for a in arguments if "=" in a]
    names = [n for a in overrides if re.match(r"\+?experiment=", a) for n in a.split("=", 1)[1].split(",")]
    for name in names:
        if name not in experiments():
            raise ConfigurationError(f"+experiment={name} is unknown: {_instead(name, list(experiments()))}")
    if any(a.startswith("experiment=") for a in overrides):
        raise ConfigurationError(f"experiment={names[0]} needs a plus sign: write +experiment={names[0]}")
    known = names or any(a.startswith(("name=", "rewrite.target=", "-", "hydra")) for a in arguments)
    if not known:
        raise ConfigurationError(f"no experiment: write +experiment=NAME, one of {', '.join(experiments())}")
    for argument in overrides:
        group, _, value = argument.partition("=")
        # of Hydra's own groups it knows more choices than ours
        for name in value.split(",") if (CONF / group).is_dir() and not group.startswith("hydra/") else []:
            if name not in choices(group):
                raise ConfigurationError(f"{argument} is unknown: {_instead(name, choices(group))}")


def check_kind(kind: str) -> None:
    kinds = [p.stem for p in (ROOT / "experiments").glob("*.py") if "\ndef run(" in p.read_text()]
    if kind not in kinds:
        raise ConfigurationError(f"kind={kind} is unknown: {_instead(kind, sorted(kinds))}")


def explain(error: Exception) -> str | None:
    """One line for an error that the user can mend; None for any other, which deserves its traceback."""
    from experiments.data.images import DataError
    from experiments.storage import refused_by_disk

    if isinstance(error, ConfigurationError | DataError):
        return str(error)
    if isinstance(error, OSError) and refused_by_disk(error):
        return f"{error.filename} cannot be written ({str(error.strerror).lower()}): write results=FOLDER"
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: {str(error).splitlines()[0]}"
    misspelt = re.search(r"Could not override '([^']+)'", text)
    if misspelt:
        return f"{misspelt[1]} is no setting: {_instead(misspelt[1], settings(), every=False)}"
    return text


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


def _instead(name: str, known: list[str], *, every: bool = True) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"choose from {', '.join(known)}" if every else "all are in conf/config.yaml"
