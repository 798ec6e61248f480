"""What the command line sets, setting by setting, however it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from suite.command.checking import shown


def written(say: Callable[[str], None] = lambda line: None) -> dict[str, str]:
    """The settings that the command line sets, with dots, and the override that sets each.

    ``model={depth: 3}`` sets ``model.depth``. Of two the last one counts; the other is told to ``say``.
    """
    if not HydraConfig.initialized():
        return {}
    # as they stand: what they refer to may not be there, which is said where it is looked up
    given = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    found: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides(given):
        if override.is_delete():
            continue
        for name, value in _leaves(override.key_or_group, override.value()):
            text = (override.input_line or "") if name == override.key_or_group else f"{name}={shown(value)}"
            if name in found:
                say(f"{found[name]} changes nothing: {text} stands behind it")
            found[name] = text
    return found


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below)
    else:
        yield name, value
