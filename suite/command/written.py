"""What the command line sets, setting by setting, however it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from hydra.core.override_parser.overrides_parser import OverridesParser

from suite.command.checking import shown


def written_by(given: Iterable[str], say: Callable[[str], None] = lambda line: None) -> dict[str, str]:
    """What the command line sets, with dots: the override that sets it. Of two the last one counts."""
    found: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides(list(given)):
        if override.is_delete():
            continue
        for name, value in _leaves(override.key_or_group, override.value()):
            text = (override.input_line or "") if name == override.key_or_group else f"{name}={shown(value)}"
            if name in found:
                say(f"{found[name]} changes nothing: {text} stands behind it")
            found[name] = text
    return found


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """``seeds={order: 1}`` sets ``seeds.order``."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below)
    else:
        yield name, value
