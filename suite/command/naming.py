"""What a run is called where people look for it: its experiment, its rewrite and the settings changed.

Two runs of one experiment differ in their digests, which say nothing to a reader.
"""

from __future__ import annotations

from omegaconf import DictConfig

from suite.command.own_targets import GROUPS
from suite.command.written import written

LONGEST = 120
# Of a target its last word tells; what is shared by every setting of a rewrite is left out.
_TARGETS = ("rewrite.target", *(f"{group}._target_" for group in GROUPS))


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
