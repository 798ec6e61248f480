"""The setting ``rewrites``: several candidates against one reference, each as if it had been asked for alone.

Of each, the configuration and the command line say what ``rewrite.target=...`` would have them say. So its
folder and digest are those of the experiment that it is, and the command that its records name repeats it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from suite.command.checking import shown
from suite.command.command_line import choices, files, instead
from suite.command.errors import ConfigurationError

MOST = 26  # the page names them by letters
_HINT = "write rewrites=[package.module.function, {target: ..., options: {...}}, EXPERIMENT]"


class Rewrite(NamedTuple):
    """One of ``rewrites``.

    Attributes:
        target: the function that makes the candidate.
        options: of it, beside those of the experiment.
    """

    target: str
    options: Mapping[str, object]

    @property
    def overrides(self) -> list[str]:
        """As the command line of an experiment of its own has it."""
        options = [f"++rewrite.options.{name}={_quoted(value)}" for name, value in self.options.items()]
        return [f"rewrite.target={self.target}", *options]


def rewrites_of(config: DictConfig) -> list[Rewrite]:
    """In the order given; none where the setting is null.

    Raises:
        ConfigurationError: it is no list of rewrites, or names one twice.
    """
    given = config.get("rewrites")
    if given is None:
        return []
    given = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    if not isinstance(given, list) or not given:
        raise ConfigurationError(f"rewrites={shown(given)} names no rewrite: {_HINT}")
    if len(given) > MOST:
        raise ConfigurationError(f"rewrites names {len(given)} rewrites: at most {MOST} at a time")
    found = [_rewrite(item) for item in given]
    if twice := next((r for i, r in enumerate(found) if r in found[:i]), None):
        raise ConfigurationError(f"rewrites names {twice.target} twice: leave one of them out")
    return found


def _rewrite(item: object) -> Rewrite:
    """A function, a function with options, or the rewrite of an experiment by its name."""
    if isinstance(item, str) and "." in item:
        return Rewrite(item, {})
    if isinstance(item, str) and item in choices("experiment"):
        own = OmegaConf.to_container(OmegaConf.load(files("experiment")[item])).get("rewrite") or {}
        if own.get("target"):
            return Rewrite(own["target"], own.get("options") or {})
        raise ConfigurationError(f"rewrites: the experiment {item} has no rewrite of its own: {_HINT}")
    if isinstance(item, dict) and {"target"} <= item.keys() <= {"target", "options"}:
        options = item.get("options") or {}
        if isinstance(item["target"], str) and isinstance(options, dict):
            return Rewrite(item["target"], options)
    if isinstance(item, str):
        raise ConfigurationError(
            f"rewrites: {item} is no function and no experiment: {instead(item, choices('experiment'))}"
        )
    raise ConfigurationError(f"rewrites: {shown(item)} is no rewrite: {_HINT}")


def each(config: DictConfig) -> Iterator[DictConfig]:
    """What ``alone`` gives of each, inside it; the configuration itself where it names no several."""
    if config.get("kind") != "training" or config.get("rewrites") is None:
        yield config
        return
    for rewrite in rewrites_of(config):
        with alone(config, rewrite) as own:
            yield own


@contextmanager
def alone(config: DictConfig, rewrite: Rewrite) -> Iterator[DictConfig]:
    """Inside, the command line names this rewrite and no other; the configuration that goes with it."""
    config = config.copy()
    OmegaConf.set_struct(config, False)
    config.rewrites = None
    config.rewrite.target = rewrite.target
    config.rewrite.options = {**(config.rewrite.get("options") or {}), **rewrite.options}
    if not HydraConfig.initialized():
        yield config
        return
    given = HydraConfig.instance().cfg.hydra.overrides
    kept = list(given.task)
    others = [o for o in kept if not o.lstrip("+").startswith("rewrites=")]
    _write(given, [*others, *rewrite.overrides])
    try:
        yield config
    finally:
        _write(given, kept)


def _write(overrides: DictConfig, task: list[str]) -> None:
    with read_write(overrides), open_dict(overrides):
        overrides.task = task


def _quoted(value: object) -> str:
    """In Hydra's grammar."""
    if isinstance(value, str) and re.fullmatch(r"(?!(true|false|null|nan|inf)$)[a-zA-Z_][\w./-]*", value):
        return value
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_quoted(below)}" for name, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_quoted, value)) + "]"
    return json.dumps(value)  # null, true, a number
