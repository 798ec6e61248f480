"""A network or optimizer of one's own in the place of a file's: the arguments of that file fall away.

``model._target_=my.Net`` stands beside what ``conf/model/resnet18.yaml`` hands to its ResNet18, which no
other network need take.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from suite.command.command_line import chosen_file
from suite.command.written import written

GROUPS = ("model", "data", "optimizer", "loss", "scheduler")
_HYDRAS = ("_target_", "_partial_")


def drop_arguments_of_others(config: DictConfig) -> None:
    """In place: beside a target of the command line all but what stands there, beside one that an experiment
    names what the chosen file gives its own."""
    given = written()
    for group in GROUPS:
        own = config.get(group)
        if not OmegaConf.is_dict(own):
            continue
        for name in _of_others(group, own, f"{group}._target_" in given):
            if name not in _HYDRAS and f"{group}.{name}" not in given:
                del own[name]  # pop() would look up what it refers to, which may be a size not taken yet


def _of_others(group: str, own: DictConfig, on_the_command_line: bool) -> list[str]:
    file = chosen_file(group)
    chosen = OmegaConf.load(file) if file else OmegaConf.create()
    if own._get_node("_target_") in (None, chosen._get_node("_target_")):
        return []
    if on_the_command_line:
        return [str(name) for name in own]
    return [str(name) for name in own if name in chosen and own._get_node(name) == chosen._get_node(name)]
