"""Settings that stand on the command line and change nothing: a line for each, so that nobody waits for them.

What a file sets may rest: an experiment sets more than each run of it needs. Who writes a setting expects
something of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from suite.command.checking import shown
from suite.command.command_line import in_sweep, overrides
from suite.command.errors import ConfigurationError
from suite.command.schema import WARMED_UP, ScaleName, Shared, Training
from suite.command.seeds import parse_seeds

OF_TRAININGS = Training.model_fields.keys() - Shared.model_fields.keys()


class Idle(NamedTuple):
    """``setting`` changes nothing ``beside`` another, of whose values ``when`` tells."""

    setting: str
    beside: str
    when: Callable[[DictConfig], bool]
    why: str


def _no_float64(s: DictConfig) -> bool:
    return "float64" not in s.dtypes


def _no_warmup(s: DictConfig) -> bool:
    return s.learning_rate_schedule not in WARMED_UP


def _own_data(s: DictConfig) -> bool:
    return s.data.get("_target_") is not None


def _one_run(s: DictConfig) -> bool:
    return len(parse_seeds(s.seed)) > 1 and None not in s.seeds.values()


RULES = (
    Idle("seed", "seeds", _one_run, "all of them are set, and each seed would be the same run"),
    Idle("seeds.augmentation", "augment", lambda s: not s.augment, "no image is moved"),
    Idle("augment", "data._target_", _own_data, "a data set of one's own augments by itself"),
    Idle("seeds.nudge", "roles", lambda s: "control" not in s.roles, "the control alone is nudged"),
    Idle("float64_steps", "dtypes", _no_float64, "no arm is in float64"),
    Idle("float64_share", "dtypes", _no_float64, "no arm is in float64"),
    Idle("scale.least_float64_steps", "float64_steps", lambda s: s.float64_steps != "auto", "none is chosen"),
    Idle("eval_every", "steps", lambda s: s.eval_every >= s.steps, "the end is evaluated in any case"),
    Idle("learning_rate_schedule", "steps", lambda s: s.steps == 1, "the first step has the full rate"),
    Idle("warmup", "learning_rate_schedule", _no_warmup, "its rate does not rise"),
    Idle("log_schedule.per_decade", "steps", lambda s: s.log_schedule.dense > s.steps, "each leaves a row"),
    Idle("optimizer.dampening", "optimizer", lambda s: not s.optimizer.get("momentum"), "it has no momentum"),
    Idle("local.share", "local.windows", lambda s: s.local.windows != "auto", "it chooses none of them"),
    Idle("local.updates", "local.windows", lambda s: s.local.windows == [], "there are none"),
    Idle("local.windows", "roles", lambda s: "candidate" not in s.roles, "no candidate is followed"),
    Idle("reprobe", "rerun", lambda s: s.rerun and s.reprobe, "the probes are asked again in any case"),
)


class Most(NamedTuple):
    """``setting`` does no more above another than at it."""

    setting: str
    other: str
    why: str


CEILINGS = (
    Most("float64_steps", "steps", "float64 arms go no further than the others"),
    Most("probe_images", "batch_size", "the probes take images of one batch"),
    Most("log_schedule.dense", "steps", "each leaves a row"),
)

# Whoever writes one of these means something else.
NOT_TO_BE_SET = {
    "scale.name": "is the name of what scale=NAME chooses: write scale={value}",
    "scale.why": "is what a run says of scale=auto: write the words as hypothesis=...",
}


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
    written = _written(overrides(config), say)
    for name, text in NOT_TO_BE_SET.items():
        if name in written:
            raise ConfigurationError(f"{written[name]}: {name} " + text.format(value=settings.scale.name))
    unread = frozenset(schema.unread if issubclass(schema, Training) else OF_TRAININGS)
    lines = dict(_at_most(written, settings, unread))
    lines |= dict(_beside(written, settings, unread))
    if issubclass(schema, Training):
        lines |= dict(_of_sizes(written, config, settings))
    trains = "has no use for it" if issubclass(schema, Training) else "trains no network of the config"
    lines |= {n: f"changes nothing: {settings.name} {trains}" for n in written if {n, _group(n)} & unread}
    for line in dict.fromkeys(f"{written[name]} {line}" for name, line in lines.items()):
        say(line)


def say_beyond(settings: DictConfig, images: int, say: Callable[[str], None]) -> None:
    """The same of ``eval_images``, where it is known how many test images there are."""
    text = _written(overrides(settings), lambda line: None).get("eval_images")
    if text and (settings.eval_images or 0) > images:
        say(f"{text} does no more than eval_images={images}: the data set has no more test images")


def _written(given: Iterable[str], say: Callable[[str], None]) -> dict[str, str]:
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


def _group(name: str) -> str:
    """What a scale's size of the same name is for."""
    first, _, rest = name.partition(".")
    return rest if first == "scale" and rest not in ScaleName.model_fields else first


def _beside(written: Iterable[str], settings: DictConfig, unread: Iterable[str]) -> Iterator[tuple[str, str]]:
    for rule in RULES:
        reads = not {_group(rule.setting), _group(rule.beside)} & {*unread}
        if rule.setting in written and reads and rule.when(settings):
            yield rule.setting, f"changes nothing beside {_now(rule.beside, settings)}: {rule.why}"


def _at_most(
    written: Iterable[str], settings: DictConfig, unread: Iterable[str]
) -> Iterator[tuple[str, str]]:
    for most in CEILINGS:
        if most.setting in written and not {_group(most.setting), most.other} & {*unread}:
            own, other = (OmegaConf.select(settings, name) for name in (most.setting, most.other))
            if own != "auto" and own > other:
                yield (
                    most.setting,
                    f"does no more than {most.setting}={other}, for {most.other}={other}: {most.why}",
                )
    seeds = len(parse_seeds(settings.seed))
    if "workers" in written and not in_sweep() and settings.workers != "auto" and settings.workers > seeds:
        yield "workers", f"does no more than workers={seeds}: there are no more seeds"


def _of_sizes(
    written: Mapping[str, str], config: DictConfig, settings: DictConfig
) -> Iterator[tuple[str, str]]:
    """Sizes of another scale, and those in whose place stands another setting."""
    text = OmegaConf.to_yaml(config)
    for name in written:
        first, _, rest = name.partition(".")
        if first == "sizes" and rest.partition(".")[0] not in ("", settings.scale.name):
            yield name, f"changes nothing beside scale={settings.scale.name}"
        if first != "scale" or not rest or f"${{{name}}}" in text or _is_read(rest, settings):
            continue
        twin = next((n for n in written if n != name and n.rpartition(".")[2] == rest), None)
        if twin:
            raise ConfigurationError(
                f"{written[name]} and {written[twin]} set one thing: leave one of them out"
            )
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
