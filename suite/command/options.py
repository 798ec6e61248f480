"""The command line as it is written, before Hydra reads it: what it would explain at length is one line.

Imports nothing heavy, for --help.
"""

from __future__ import annotations

import re

from suite.command.command_line import CONF, choices, experiments, instead
from suite.command.errors import ConfigurationError

# Hydra's own.
OPTIONS = (
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "-r", "--package", "-p"),
    *("--run", "--multirun", "-m", "--shell-completion", "-sc", "--info", "-i", "--experimental-rerun"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)

# Those that are followed by a word: which, or by any.
FOLLOWED = dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all"))
FOLLOWED |= dict.fromkeys(("--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), ())
FOLLOWED |= dict.fromkeys(("--config-dir", "-cd", "--experimental-rerun"), ())


def check(arguments: list[str]) -> None:
    """Refuse what Hydra would explain at length. Raises ConfigurationError."""
    for option in (a.partition("=")[0] for a in arguments if a.startswith("-")):
        if option not in OPTIONS:
            near = instead(option, [o for o in OPTIONS if o.startswith("--")])
            raise ConfigurationError(f"{option} is no option (a setting is written NAME=VALUE): {near}")
    _check_followed(arguments)
    given = [a for a in arguments if "=" in a]
    names = [n for a in given if re.match(r"\+?experiment=", a) for n in a.split("=", 1)[1].split(",")]
    for name in names:
        if name not in experiments():
            raise ConfigurationError(f"+experiment={name} is unknown: {instead(name, list(experiments()))}")
    if any(a.startswith("experiment=") for a in given):
        raise ConfigurationError(f"experiment={names[0]} needs a plus sign: write +experiment={names[0]}")
    known = names or any(a.startswith(("name=", "rewrite.target=", "-", "hydra")) for a in arguments)
    if not known:
        raise ConfigurationError(f"no experiment: write +experiment=NAME, one of {', '.join(experiments())}")
    if {"-m", "--multirun"} & {*arguments} and any(a.startswith(("-c", "--cfg")) for a in arguments):
        raise ConfigurationError("--cfg shows the settings of one job: leave -m out")
    for argument in given:
        group, _, value = argument.partition("=")
        # of Hydra's own groups it knows more choices than ours
        for name in value.split(",") if (CONF / group).is_dir() and not group.startswith("hydra/") else []:
            if name not in choices(group):
                raise ConfigurationError(f"{argument} is unknown: {instead(name, choices(group))}")


def _check_followed(arguments: list[str]) -> None:
    for option, after in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = option.partition("=")
        if (known := FOLLOWED.get(option)) is None:
            continue
        word = value if equals else after
        if not word or word.startswith("-") or word not in (known or (word,)):
            wanted = " or ".join(known) or "a word"
            raise ConfigurationError(f"{option} {word}".rstrip() + f": {option} is followed by {wanted}")


def without_resolve(arguments: list[str]) -> tuple[list[str], bool]:
    """The command line without ``--cfg job --resolve``, and whether that was asked for.

    Hydra's own does not know what an experiment means by a scale.
    """
    text = " ".join(arguments)
    if not re.search(r"(^| )(--cfg|-c)[ =]job( |$)", text) or not {"--resolve", "-r"} & {*arguments}:
        return arguments, False
    return [a for a in arguments if a not in ("--cfg", "-c", "job", "--cfg=job", "--resolve", "-r")], True
