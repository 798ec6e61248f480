"""Settings that stand on the command line and change nothing: a line for each, so that nobody waits for them.

What a file sets may rest: an experiment sets more than each run of it needs. Who writes a setting expects
something of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from omegaconf import DictConfig, OmegaConf

from suite.command.checking import shown
from suite.command.command_line import in_sweep
from suite.command.errors import ConfigurationError
from suite.command.idle_rules import CEILINGS, NOT_TO_BE_SET, RULES, Idle, TakenAs
from suite.command.schema import ScaleName, Shared, Training
from suite.command.seeds import parse_seeds
from suite.command.written import written

OF_TRAININGS = Training.model_fields.keys() - Shared.model_fields.keys()


def say_idle(
    config: DictConfig, settings: DictConfig, schema: type[Shared], say: Callable[[str], None]
) -> None:
    """One line for each setting of the command line that changes nothing.

    Args:
        config: as composed, with its interpolations.
        settings: its values.

    Raises:
        ConfigurationError: for a setting that another stands for, written beside it.
    """
    given = written(say)
    for name, text in NOT_TO_BE_SET.items():
        if name in given:
            raise ConfigurationError(f"{given[name]}: {name} " + text.format(value=settings.scale.name))
    unread = frozenset(schema.unread if issubclass(schema, Training) else OF_TRAININGS)
    lines = dict(_at_most(given, settings, unread))
    lines |= dict(_beside(given, settings, unread, RULES))
    lines |= dict(_beside(given, settings, (), [r for r in schema.idle if isinstance(r, Idle)]))
    lines |= dict(_taken_as(given, settings, [r for r in schema.idle if isinstance(r, TakenAs)]))
    if issubclass(schema, Training):
        lines |= dict(_of_sizes(given, config, settings))
    trains = "has no use for it" if issubclass(schema, Training) else "trains no network of the config"
    lines |= {n: f"changes nothing: {settings.name} {trains}" for n in given if {n, _group(n)} & unread}
    for line in dict.fromkeys(f"{given[name]} {line}" for name, line in lines.items()):
        say(line)


def say_beyond(settings: DictConfig, size: int, say: Callable[[str], None]) -> None:
    """The same of the test set, where it is known how large that is."""
    given = written()
    for name in ("eval_images", "progress.images"):
        if name in given and (OmegaConf.select(settings, name) or 0) > size:
            say(f"{given[name]} does no more than {name}={size}: the test set holds no more")


def _group(name: str) -> str:
    """What a scale's size of the same name is for."""
    first, _, rest = name.partition(".")
    return rest if first == "scale" and rest not in ScaleName.model_fields else first


def _beside(
    given: Iterable[str], settings: DictConfig, unread: Iterable[str], rules: Iterable[Idle]
) -> Iterator[tuple[str, str]]:
    for rule in rules:
        reads = not {_group(rule.setting), _group(rule.beside)} & {*unread}
        if rule.setting in given and reads and rule.when(settings):
            yield rule.setting, f"changes nothing beside {_now(rule.beside, settings)}: {rule.why}"


def _taken_as(
    given: Iterable[str], settings: DictConfig, rules: Iterable[TakenAs]
) -> Iterator[tuple[str, str]]:
    for rule in rules:
        if rule.setting not in given:
            continue
        own, taken = OmegaConf.select(settings, rule.setting), rule.value(settings)
        if own is not None and own != taken:
            yield rule.setting, f"is taken as {rule.setting}={shown(taken)}: {rule.why}"


def _at_most(given: Iterable[str], settings: DictConfig, unread: Iterable[str]) -> Iterator[tuple[str, str]]:
    for most in CEILINGS:
        if most.setting in given and not {_group(most.setting), most.other} & {*unread}:
            own, other = (OmegaConf.select(settings, name) for name in (most.setting, most.other))
            if own != "auto" and own > other:
                yield (
                    most.setting,
                    f"does no more than {most.setting}={other}, for {most.other}={other}: {most.why}",
                )
    seeds = len(parse_seeds(settings.seed))
    if "workers" in given and not in_sweep() and settings.workers != "auto" and settings.workers > seeds:
        yield "workers", f"does no more than workers={seeds}: there are no more seeds"


def _of_sizes(
    given: Mapping[str, str], config: DictConfig, settings: DictConfig
) -> Iterator[tuple[str, str]]:
    """Sizes of another scale, and those in whose place stands another setting."""
    text = OmegaConf.to_yaml(config)
    for name in given:
        first, _, rest = name.partition(".")
        if first == "sizes" and rest.partition(".")[0] not in ("", settings.scale.name):
            yield name, f"changes nothing beside scale={settings.scale.name}"
        if first != "scale" or not rest or f"${{{name}}}" in text or _is_read(rest, settings):
            continue
        twin = next((n for n in given if n != name and n.rpartition(".")[2] == rest), None)
        if twin:
            raise ConfigurationError(f"{given[name]} and {given[twin]} set one thing: leave one of them out")
        yield name, f"changes nothing: {settings.name} sets what it is for by itself"


def _is_read(size: str, settings: DictConfig) -> bool:
    """Whether something asks the scale itself for this size."""
    steps = settings.get("float64_steps")
    return (size == "least_float64_steps" and steps is not None) or (
        size == "float64_steps" and steps == "auto"
    )


def _now(name: str, settings: DictConfig) -> str:
    value = OmegaConf.select(settings, name)
    if OmegaConf.is_dict(value):
        return name
    return f"{name}={shown(list(value) if OmegaConf.is_list(value) else value)}"
