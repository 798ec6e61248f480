"""The arguments that settings hand to a function of anybody's, held to its signature before it is called."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from suite.command.checking import shown
from suite.command.command_line import given, instead
from suite.command.errors import ConfigurationError
from suite.command.written import HYDRAS
from suite.running.importing import class_count, imported, parameters
from suite.running.own_data import part_argument

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def check_network(settings: DictConfig) -> None:
    """The arguments of all that the settings name, and of the rewrite. Raises ConfigurationError."""
    for name in _KNOWN:
        if not settings[name].get("_target_"):
            continue
        function = imported(f"{name}._target_", settings[name]._target_)
        own = {k: v for k, v in OmegaConf.to_container(settings[name]).items() if k not in HYDRAS}
        check_arguments(name, function, own, known=_KNOWN[name](function, own))
    if settings.rewrite.target and "candidate" in settings.roles:
        check_rewrite("rewrite", settings)


def check_rewrite(name: str, settings: DictConfig) -> None:
    """The options of a rewrite, less those for the experiment's own where another took its place."""
    rewrite = settings[name]
    function = imported(f"{name}.target", rewrite.target)
    options = OmegaConf.to_container(rewrite).get("options") or {}
    if not HydraConfig.initialized() or given(name, "target", settings):
        options = {k: v for k, v in options.items() if given(f"{name}.options", k, settings)}
    check_arguments(f"{name}.options", function, options, known=_first(function))


def check_arguments(
    place: str, function: Callable, arguments: Mapping[str, Any], known: Sequence[str | None] = ()
) -> None:
    """Raises ConfigurationError for an argument that it does not take, or not of this type.

    Args:
        known: parameters that are given to it anyway.
    """
    taken = parameters(function)
    if taken is None:
        return
    free = [name for name in taken if name not in known]
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    for name, value in arguments.items():
        if name not in free and not (anything and name not in taken):
            near = instead(name, free) if free else "it takes none"
            raise ConfigurationError(f"{place}.{name} is no argument of {function.__qualname__}: {near}")
        if name in taken and not _fits(value, taken[name].annotation):
            wanted = f"{name}: {inspect.formatannotation(taken[name].annotation)}"
            raise ConfigurationError(
                f"{place}.{name}={shown(value)} does not fit: {function.__qualname__} takes {wanted}"
            )


def _first(function: Callable, count: int = 1) -> list[str]:
    return list(parameters(function) or [])[:count]


# setting -> the parameters of its function that the suite fills: of a network the number of classes, the part
# of a data set, what an optimizer updates, outputs and targets, the optimizer
_KNOWN: dict[str, Callable[[Callable, object], list[str | None]]] = {
    "model": lambda function, given: [class_count(function)],
    "data": lambda function, given: [part_argument(function, given)],
    "optimizer": lambda function, given: _first(function),
    "loss": lambda function, given: [] if isinstance(function, type) else _first(function, count=2),
    "scheduler": lambda function, given: _first(function),
}


def _fits(value: Any, annotation: Any) -> bool:
    """As JSON, where a list may stand for a tuple but a word for nothing else than a word."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str) or _is_made_by_hydra(value):
        return True
    try:
        TypeAdapter(annotation, config=_STRICT).validate_json(json.dumps(value))
    except ValidationError:
        return False
    except PydanticUserError:  # a type that no text can stand for
        return True
    return True


def _is_made_by_hydra(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value
