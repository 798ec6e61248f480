"""The functions and classes that settings name, from anybody's package or the current folder."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from omegaconf import DictConfig

from driftlab.blame import described
from driftlab.process import noticed
from suite.command.command_line import ROOT
from suite.command.errors import ConfigurationError
from suite.command.users_code import let_end
from suite.command.written import GROUPS


def imported(setting: str, target: str) -> Callable:
    """The function that a setting names. Raises ConfigurationError."""
    module_name, _, function_name = str(target).rpartition(".")
    if not module_name:
        raise ConfigurationError(f"{setting}={target}: write package.module.function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with noticed(f"importing {module_name}"):
            function = getattr(importlib.import_module(module_name), function_name)
    except BaseException as error:
        let_end(error)
        raise ConfigurationError(f"{setting}={target} cannot be imported: {described(error, 200)}") from None
    if not callable(function):
        raise ConfigurationError(f"{setting}={target} is a {type(function).__name__}, not a function")
    return function


def parameters(function: Callable) -> Mapping[str, inspect.Parameter] | None:
    """By name, annotations as types where they can be read; None where it has no signature."""
    for read in (True, False):
        try:
            return inspect.signature(function, eval_str=read).parameters
        except Exception:  # an annotation that only a type checker can read; something in C
            continue
    return None


# How networks name the number of classes. A function that takes any keyword is given the commonest name.
CLASSES = ("num_classes", "classes", "n_classes", "nb_classes", "nclasses", "n_class", "num_class")
CLASSES += ("num_labels", "n_labels", "n_outputs", "num_outputs", "vocab_size", "vocabulary_size")


def class_count(function: Callable) -> str | None:
    """The parameter of a network that takes the number of classes; None where it has none."""
    taken = parameters(function) or {}
    named = [name for name in CLASSES if name in taken]
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return named[0] if named else CLASSES[0] if anything else None


def source_digest(function: Callable) -> str | None:
    """The SHA-256 of the file that holds it, where it has one: edited, it is another experiment."""
    file = _file(function)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file else None


def own_sources(settings: DictConfig) -> dict[str, str]:
    """The digests of the files of what settings name that is neither installed nor of this suite.

    Edited, each is another experiment, as the rewrite's is (``rewrite.source``).
    """
    found = {}
    for name in GROUPS:
        target = (settings.get(name) or {}).get("_target_")
        function = imported(f"{name}._target_", target) if target else None
        if function is not None and _is_own(function):
            found[name] = source_digest(function)
    return found


def _is_own(function: Callable) -> bool:
    file = _file(function)
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    ours = {ROOT / room for room in ("models", "suite", "driftlab")}
    return file is not None and not any(file.is_relative_to(place) for place in installed | ours)


def _file(function: Callable) -> Path | None:
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(function))).resolve()
    except (TypeError, OSError):
        return None
    return file if file.is_file() else None
