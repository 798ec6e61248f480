"""A configuration held to its schema: the first setting that cannot be used, in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse
from pydantic import BaseModel, ValidationError

from suite.command.command_line import instead
from suite.command.errors import ConfigurationError, one_line

# resolvers that read nothing else, but for the scale that a machine gives
_OF_SETTINGS_ALONE = ("oc.create", "oc.decode", "oc.dict.keys", "oc.dict.values", "oc.select")
_OF_SETTINGS_ALONE += ("scale_of_this_machine",)


def check(settings: Mapping[str, Any], schema: type[BaseModel]) -> None:
    """Raises ConfigurationError where a setting has another type or range, is missing, or is none."""
    _check_values(settings)
    try:
        schema.model_validate(settings)
    except ValidationError as error:
        raise ConfigurationError(_line(error.errors(include_url=False)[0], schema)) from None


def check_interpolations(config: DictConfig) -> None:
    """What reads its surroundings would end up in files and on pages: ``${oc.env:SECRET}``.

    Raises ConfigurationError. Of the resolvers those that work on settings alone are taken.
    """
    for name, text in _leaves("", OmegaConf.to_container(config, resolve=False)):
        for resolver in _resolvers(text) if isinstance(text, str) and "${" in text else ():
            if resolver not in _OF_SETTINGS_ALONE:
                raise ConfigurationError(
                    f"{name}={text} reads the surroundings of a run, and settings are written to its files: "
                    "write the value itself"
                )


def _resolvers(text: str) -> Iterator[str]:
    try:
        nodes = [parse(text)]
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{text} cannot be read: {one_line(error)}") from None
    while nodes:
        node = nodes.pop()
        if isinstance(node, OmegaConfGrammarParser.InterpolationResolverContext):
            yield node.resolverName().getText()
        nodes += getattr(node, "children", None) or ()


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Every value with the setting that it stands under."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if not isinstance(key, str):
                raise ConfigurationError(f"{name}.{key}: the name of a setting is a word")
            yield from _leaves(f"{name}.{key}".lstrip("."), below)
    elif isinstance(value, list):
        for below in value:
            yield from _leaves(name, below)
    else:
        yield name, value


def _check_values(settings: Mapping[str, Any]) -> None:
    """What no file could hold, wherever it stands: numbers that are none, characters that no screen shows."""
    for name, value in _leaves("", settings):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{name}={value} must be a finite number")
        if isinstance(value, str) and not (value.replace("\n", "").isprintable() and "${" not in value):
            raise ConfigurationError(
                f"{name}={value!a} must be plain text, without control characters and ${{"
            )


def _line(error: Mapping[str, Any], schema: type[BaseModel]) -> str:
    """As in "steps=0 must be a whole number of at least 1"."""
    name = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    if error["type"] == "extra_forbidden":
        return f"{name} is no setting: {instead(name, names(schema), every=False)}"
    if error["type"] == "missing":
        return f"{name} is not set: write {name}=VALUE"
    if error["type"] == "unused":  # of one of several by their names
        return f"{name}={error['input']['name']} {error['msg'].replace('{group}', name)}"
    return f"{name}={shown(error['input'])} {_words(error, name, schema)}"


def _words(error: Mapping[str, Any], name: str, schema: type[BaseModel]) -> str:
    value, context = shown(error["input"]), error.get("ctx", {})
    match error["type"]:
        case "must":
            return error["msg"]
        case "bool_type":
            return "must be true or false"
        case "string_type" if isinstance(error["input"], int | float):
            return f"must be text: write '{name}=\"{value}\"'"
        case "string_type":
            return "must be text"
        case "list_type" if error["input"] is not None:
            return f"must be a list: write {name}=[{value}]"
        case "list_type":
            return f"must be a list: write {name}=[...]"
        case "too_short":
            return "is empty: name one at least"
        case "model_type" | "dict_type":
            below = [n.removeprefix(f"{name}.") for n in names(schema) if n.startswith(f"{name}.")]
            return f"must hold {', '.join(n for n in below if '.' not in n) or 'names and values, {a: 1}'}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
        case _:
            return f"cannot be used: {error['msg'].lower()}"


def shown(value: object) -> str:
    """As it is written on the command line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")
    return text if len(text) <= 60 else f"{text[:57]}..."


def names(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """All settings that a schema knows, with dots."""
    found = []
    for name, field in schema.model_fields.items():
        own = prefix + (field.alias or name)
        found += [own, *(n for group in _groups(field.annotation) for n in names(group, f"{own}."))]
    return found


def _groups(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _groups(part)
