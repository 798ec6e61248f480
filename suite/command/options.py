"""The command line as it is written, before Hydra reads it: what it would explain at length is one line.

Imports nothing heavy, for --help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from hydra.conf import HydraConf
from omegaconf import OmegaConf

from suite.command.command_line import CONF, choices, experiments, files, instead, look_in
from suite.command.errors import ConfigurationError

# Hydra's own, less --experimental-rerun: the same command goes on, and rerun=true begins again.
OPTIONS = (
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p"),
    *("--run", "-r", "--multirun", "-m", "--shell-completion", "-sc", "--info", "-i"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)
SWEEP = ("-m", "--multirun")

# Those that are followed by a word: which, or by any; --info may stand alone.
FOLLOWED = dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all"))
FOLLOWED |= dict.fromkeys(("--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), ())
FOLLOWED |= dict.fromkeys(("--config-dir", "-cd"), ())
FOLLOWED |= dict.fromkeys(
    ("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
)
SHOWING, OF_SHOWING = ("--cfg", "-c", "--info", "-i"), ("--resolve", "--package", "-p")
MAY_STAND_ALONE = ("--info", "-i")

# Hydra's own settings that mean nothing here, or nothing with or without -m: how they begin, what to write
OF_SWEEPS = dict.fromkeys(
    ("hydra/launcher=", "hydra.launcher.", "hydra/sweeper=", "hydra.sweeper.", "hydra.sweep."),
    "counts in a sweep: write -m before it, or leave it out",
)
OF_ONE_JOB = {"hydra.run.": "counts without -m: write hydra.sweep.dir=FOLDER"}
OF_NOBODY = {
    "hydra=": "is no setting: write hydra.NAME=VALUE",
    "hydra.searchpath=": "is not where experiments are looked for: write --config-dir FOLDER",
    "hydra.mode=": "is not how a sweep is asked for: write -m",
    "hydra.job.env_copy=": "writes what it copies to multirun.yaml: export it where the jobs begin",
}
# resolvers that read a setting, the time, or what Hydra is about to do
OF_HYDRA = r"\$\{(?!now:|hydra:|jobs_at_once:)[\w.]+:"


def check(arguments: list[str]) -> list[str]:
    """The same with options before settings, as Hydra understands it.

    Raises:
        ConfigurationError: for what Hydra would explain at length.
    """
    options, settings = _apart(arguments)
    look_in(_config_dir(options))
    swept = bool({*SWEEP} & {*options})
    shown = any(o.partition("=")[0] in SHOWING for o in options)
    if swept and any(o.startswith(("-c", "--cfg")) for o in options):
        raise ConfigurationError("--cfg shows the settings of one job: leave -m out")
    for option in () if shown else {o.partition("=")[0] for o in options} & {*OF_SHOWING}:
        raise ConfigurationError(f"{option} is for the settings that are shown: write --cfg job beside it")
    _check_package(options)
    if "--hydra-help" in options:
        return options  # which composes no experiment
    _check_experiments(settings, alone=not options, swept=swept)
    if {"--shell-completion", "-sc"} & {*options}:
        _check_completion(settings)
        return [*options, *settings]
    unmeant = OF_NOBODY | (OF_ONE_JOB if swept else {} if shown else OF_SWEEPS)
    for setting in settings:
        _check_setting(setting, unmeant)
    return [*options, *settings]


def look_in_own(arguments: list[str]) -> None:
    """What --help lists. Raises ConfigurationError."""
    look_in(_config_dir(_apart(arguments)[0]))


def _config_dir(options: Iterable[str]) -> Path | None:
    words = [o.partition("=")[2] for o in options if o.partition("=")[0] in ("--config-dir", "-cd")]
    return Path(words[-1]) if words else None  # of two Hydra takes the last


def _check_package(options: Iterable[str]) -> None:
    """That there are such settings, in the files of all experiments or one's own."""
    for option in options:
        name, _, package = option.partition("=")
        if name not in ("--package", "-p"):
            continue
        read = [CONF / "config.yaml", *files("experiment").values()]
        known = {"hydra", "_global_", *(f.name for f in CONF.iterdir() if f.is_dir())}
        known |= {str(key) for path in read for key in OmegaConf.load(path)}
        if (group := package.partition(".")[0]) not in known:
            raise ConfigurationError(
                f"{name} {package}: there are no such settings: {instead(group, sorted(known), every=False)}"
            )


def _apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Options with the words that follow them, and settings."""
    options, settings, left = [], [], list(arguments)
    while left:
        argument = left.pop(0)
        if not argument.startswith("-"):
            settings.append(argument)
            continue
        option, equals, _ = argument.partition("=")
        if option not in OPTIONS:
            near = instead(option, [o for o in OPTIONS if o.startswith("--")])
            raise ConfigurationError(f"{option} is no option (a setting is written NAME=VALUE): {near}")
        if equals and option not in FOLLOWED:
            raise ConfigurationError(f"{argument}: {option} takes no value: write {option}")
        options.append(argument)
        if option in FOLLOWED and not equals and _word_follows(option, left):
            options[-1] += f"={left.pop(0)}"
        _check_followed(option, options[-1])
        if options[-1] in MAY_STAND_ALONE:
            options[-1] += "=all"  # else argparse takes the setting that follows for its word
    return options, settings


def _word_follows(option: str, left: list[str]) -> bool:
    if option in MAY_STAND_ALONE and left and re.match(r"[+~]*[\w/.@]+=", left[0]):
        return False
    return bool(left) and not left[0].startswith("-")


def _check_followed(option: str, argument: str) -> None:
    known, word = FOLLOWED.get(option), argument.partition("=")[2]
    if known is None or argument in MAY_STAND_ALONE:
        return
    if not word or word not in (known or (word,)):
        wanted = " or ".join(known) or "a word"
        raise ConfigurationError(f"{option} {word}".rstrip() + f": {option} is followed by {wanted}")
    if option in ("--config-dir", "-cd") and not Path(word).is_dir():
        raise ConfigurationError(f"{option} {word}: there is no such folder: write one that holds settings")


def _check_experiments(settings: Iterable[str], *, alone: bool, swept: bool) -> None:
    named = [s for s in settings if re.match(r"\+{0,2}experiment=", s)]
    names = [n for s in named for n in s.partition("=")[2].split(",")]
    if names and names[0].startswith("["):
        several = re.sub(r"[\[\]\s]", "", ",".join(names))
        raise ConfigurationError(f"{named[0]} names experiments in a list: write -m +experiment={several}")
    for name in names:
        if name not in experiments():
            raise ConfigurationError(f"+experiment={name} is unknown: {instead(name, list(experiments()))}")
    if len(named) > 1 or (len(names) > 1 and not swept):
        raise ConfigurationError(
            f"{' and '.join(named)}: write one experiment, or -m +experiment={','.join(names)}"
        )
    if named and not named[0].startswith("+experiment="):
        raise ConfigurationError(f"experiment={names[0]} needs a plus sign: write +experiment={names[0]}")
    if not names and alone and not any(s.startswith(("name=", "rewrite.target=", "hydra")) for s in settings):
        raise ConfigurationError(f"no experiment: write +experiment=NAME, one of {', '.join(experiments())}")
    for setting in settings:
        _check_kind(setting, names)


def _check_kind(setting: str, names: list[str]) -> None:
    """Each kind has settings of its own, which experiments of another do not set."""
    option, _, kind = setting.partition("=")
    if option != "kind":  # no file is read for any other
        return
    found = {name: OmegaConf.load(path).get("kind", "training") for name, path in files("experiment").items()}
    if kind in found.values() and {found[name] for name in names} - {kind}:
        near = " or ".join(f"+experiment={name}" for name, of in found.items() if of == kind)
        raise ConfigurationError(f"{setting}: {names[0]} is of kind {found[names[0]]}: write {near}")


def _check_completion(words: Iterable[str]) -> None:
    asked = [w for w in words if re.fullmatch(r"(install|uninstall|query)=(bash|fish|zsh)", w)]
    if len(asked) != 1:
        raise ConfigurationError(
            "--shell-completion: write install=bash behind it, or fish, or zsh, or uninstall=bash"
        )
    if asked[0].startswith("query") and "COMP_LINE" not in os.environ:
        raise ConfigurationError(f"--shell-completion {asked[0]} is what the shell asks: write install=bash")


def _check_setting(setting: str, unmeant: dict[str, str]) -> None:
    name, equals, value = setting.partition("=")
    bare = name.lstrip("+~")
    if not bare:
        raise ConfigurationError(f"'{setting}' names no setting: a setting is written NAME=VALUE")
    if not equals and not name.startswith("~"):
        raise ConfigurationError(f"{setting} has no value: a setting is written {setting}=VALUE")
    for beginning, why in unmeant.items():
        if setting.lstrip("+").startswith(beginning):
            raise ConfigurationError(f"{setting} {why}")
    if not _is_known_to_hydra(bare):
        raise ConfigurationError(
            f"{setting} is no setting of Hydra's: --cfg hydra shows those that there are"
        )
    if (CONF / "hydra" / bare).is_dir():
        raise ConfigurationError(f"{setting} is no setting: write hydra/{bare}={value}")
    if bare.startswith("hydra") and re.search(OF_HYDRA, value):
        raise ConfigurationError(
            f"{setting} reads the surroundings of a run, and settings are written to its files: "
            "write the value itself"
        )
    # of Hydra's own groups it knows more choices than ours
    for choice in value.split(",") if (CONF / name).is_dir() and not name.startswith("hydra/") else []:
        if choice not in choices(name):
            raise ConfigurationError(f"{setting} is unknown: {instead(choice, choices(name))}")


def _is_known_to_hydra(name: str) -> bool:
    """Hydra takes ``+hydra.nonsense=1`` as well."""
    first, *rest = name.split(".")
    kind = HydraConf if first == "hydra" else None
    for part in rest:
        fields = getattr(kind, "__dataclass_fields__", None)
        if fields is None:  # anything may stand in it
            return True
        if part not in fields:
            return False
        kind = fields[part].type
    return True


def without_resolve(arguments: list[str]) -> tuple[list[str], bool]:
    """The command line without ``--cfg job --resolve``, and whether that was asked for.

    Hydra's own does not know what an experiment means by a scale.
    """
    of_a_job = {"--cfg=job", "-c=job"} & {*arguments}
    if not of_a_job or "--resolve" not in arguments:
        return arguments, False
    return [a for a in arguments if a not in (*of_a_job, "--resolve")], True
