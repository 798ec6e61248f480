"""The jobs of this command: each carried out, how it ended, and what that makes of the exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from traceback import format_exc
from typing import NamedTuple, TypedDict

from omegaconf import DictConfig, OmegaConf

from suite.command import command_line, users_code
from suite.command.command_line import in_sweep
from suite.command.errors import Unfinished, exit_called, unfinished_by
from suite.command.explaining import explain
from suite.command.leftovers import take_away_hydras
from suite.command.supervision import Stopped, raise_if_stopped


class Ran(NamedTuple):
    """An experiment whose seeds have finished.

    Attributes:
        folder: ``<results>/<experiment>/<digest>``.
        verdict: None in a sweep, which judges once, when all of its jobs have ended, and of several rewrites,
            each of which is collected with its own.
        others: the folders of further rewrites that were trained with it.
    """

    folder: str
    verdict: str | None
    others: tuple[str, ...] = ()


class Ended(TypedDict, total=False):
    """How a job ended: in ``folder`` where its seeds have finished, else in one of the lines.

    Plain data, for a job of a sweep may be another process.

    Attributes:
        refused: bad configuration, in one line.
        unfinished: what stopped the seeds, in one line; the same command goes on.
        crashed: a traceback.
    """

    folder: str
    others: list[str]
    listed: bool  # the verdict is one of fail_on
    refused: str
    unfinished: str
    crashed: str


# How the jobs of this process ended, and with --multirun those of the processes that it started. One with a
# folder has its verdict, written by this process.
_ended: list[Ended] = []
_shown: list[str] = []
_begun: list[bool] = []  # for exit_status: a command such as --cfg has no jobs


def carry_out(config: DictConfig) -> Ended:
    """One Hydra job: all seeds of one experiment, or with ``--multirun`` one of them.

    Nothing is raised in a sweep, whose other jobs go on; nor what the user can mend, for Hydra prints the
    overrides of a job that raises.
    """
    begin()
    try:
        ran = command_line.kind(config.kind).run(config)
        ended: Ended = {"folder": ran.folder, "listed": ran.verdict in list(config.fail_on)}
        if ran.others:
            ended["others"] = list(ran.others)
    except (Stopped, KeyboardInterrupt):
        raise
    except SystemExit as asked:
        ended = _explained(asked) or {"refused": exit_called(asked)}
    except BaseException as error:  # somebody's own need not be an Exception
        raise_if_stopped()
        ended = _explained(error)
        if not ended and not in_sweep():
            raise
        ended = ended or {"crashed": format_exc()}
    if ended.get("refused"):
        take_away_hydras()
    if not in_sweep():  # a sweep collects what its jobs return, wherever they ran
        _ended.append(ended)
    return ended


def show(config: DictConfig) -> None:
    """For ``print_shown``, the settings as a run has them; ``exit_status`` says what cannot be used."""
    from suite.command.configuration import resolve  # not needed for --help
    from suite.command.rewrites import each

    try:
        for own in each(config):
            _shown.append("---\n" if _shown else "")  # a document each
            settings = resolve(own, lambda line: _shown.append(f"# {line}\n"))
            _shown.append(OmegaConf.to_yaml(settings))
    except Exception as error:
        raise_if_stopped()
        if not say_at_the_end(error):
            raise


def print_shown() -> None:
    """Outside of Hydra, which has a word on whatever is raised in its job."""
    print("".join(_shown), end="", flush=True)


def begin() -> None:
    """This command has jobs, here or elsewhere."""
    _begun.append(True)


def collect(ended: Iterable[Mapping]) -> None:
    begin()
    _ended.extend(ended)


def refuse(line: str) -> None:
    _ended.append({"refused": line})


def say_at_the_end(error: Exception) -> bool:
    """Whether there is a line for what a command raised outside of its jobs; ``exit_status`` says it."""
    if isinstance(error, BrokenPipeError) and not _begun:  # nothing but its output was asked for
        return False
    ended = _explained(error)
    _ended.extend([ended] if ended else [])
    return bool(ended)


def _explained(error: BaseException) -> Ended:
    """How a job ended that raised what the user or the surroundings can mend; else empty."""
    if isinstance(error, Unfinished):
        return {"unfinished": str(error)}
    if line := users_code.line_of(error) or explain(error):
        return {"refused": line}
    if line := unfinished_by(error):
        return {"unfinished": line}
    return {}


def exit_status() -> int:
    """Says what went wrong, each thing once. 2 bad configuration, 1 unfinished, 3 a verdict of fail_on.

    0 only where this command has written a verdict, or had no job to do.
    """
    for kind in ("crashed", "refused", "unfinished"):
        for line in dict.fromkeys(e[kind] for e in _ended if e.get(kind)):
            print(line if kind == "crashed" else f"error: {line}", file=sys.stderr)
    if any(e.get("refused") for e in _ended):
        return 2
    if any(e.get("unfinished") or e.get("crashed") for e in _ended):
        return 1
    if _begun and not any(e.get("folder") for e in _ended):
        print("error: no verdict was written: the same command goes on", file=sys.stderr)
        return 1
    return 3 if any(e.get("listed") for e in _ended) else 0
