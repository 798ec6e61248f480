"""What the command line sets, setting by setting; what falls away beside it; what a run is called by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from suite.command.checking import shown
from suite.command.command_line import chosen_file

# what anybody's own function or class may stand for, and what Hydra itself reads beside its arguments
GROUPS = ("model", "data", "optimizer", "loss", "scheduler")
HYDRAS = ("_target_", "_partial_")
LONGEST = 120
# Of a target its last word tells; what is shared by every setting of a rewrite is left out.
_TARGETS = ("rewrite.target", *(f"{group}._target_" for group in GROUPS))


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


# A network or optimizer of one's own in the place of a file's: ``model._target_=my.Net`` stands beside what
# ``conf/model/resnet18.yaml`` hands to its ResNet18, which no other network need take.


def drop_arguments_of_others(config: DictConfig) -> None:
    """In place: beside a target of the command line all but what stands there, beside one that an experiment
    names what the chosen file gives its own."""
    given = written()
    for group in GROUPS:
        own = config.get(group)
        if not OmegaConf.is_dict(own):
            continue
        for name in _of_others(group, own, f"{group}._target_" in given):
            if name not in HYDRAS and f"{group}.{name}" not in given:
                del own[name]  # pop() would look up what it refers to, which may be a size not taken yet


def _of_others(group: str, own: DictConfig, on_the_command_line: bool) -> list[str]:
    file = chosen_file(group)
    chosen = OmegaConf.load(file) if file else OmegaConf.create()
    if own._get_node("_target_") in (None, chosen._get_node("_target_")):
        return []
    if on_the_command_line:
        return [str(name) for name in own]
    return [str(name) for name in own if name in chosen and own._get_node(name) == chosen._get_node(name)]


# What a run is called where people look for it: two of one experiment differ in their digests, which say
# nothing to a reader.


def label(settings: DictConfig, left_out: tuple[str, ...]) -> str:
    """The settings of this command that make another run, ``parts=3 optimizer.lr=0.2``; "" where none does.

    Args:
        left_out: settings, and groups, that do not change the digest.
    """
    if settings.get("label"):
        return settings.label
    given = written()
    left = {*left_out, "experiment", "hydra", "data.root", "data.time_limit"}
    changed = [name for name in given if not {name, name.partition(".")[0]} & left]
    # the rewrite first, which is what most runs differ in
    rewrite = sorted(
        (n for n in changed if n.startswith("rewrite.")), key=lambda n: (n != "rewrite.target", n)
    )
    words = " ".join(_word(n, given[n]) for n in [*rewrite, *sorted({*changed} - {*rewrite})])
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


def _word(name: str, override: str) -> str:
    value = override.partition("=")[2].strip("'\"")
    if name in _TARGETS:
        return f"{name.partition('.')[0]}={value.rpartition('.')[2]}"
    return f"{name.removeprefix('rewrite.options.')}={value}"


def title(settings: DictConfig) -> str:
    """The experiment with its label; of one that was stored before there were labels, its name."""
    return " ".join(filter(None, (settings.name, settings.get("label"))))
