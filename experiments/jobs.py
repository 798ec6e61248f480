"""The jobs of this command: each carried out, how it ended, and what that makes of the exit status."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from traceback import format_exc

from omegaconf import DictConfig

from experiments import command_line
from experiments.errors import Unfinished, is_out_of_memory, one_line
from experiments.outcome import Ended, in_sweep

# How the jobs of this process ended, and with --multirun those of the processes that it started.
_ended: list[Ended] = []


def carry_out(config: DictConfig) -> Ended:
    """One Hydra job: all seeds of one experiment, or with ``--multirun`` one of them.

    Nothing is raised in a sweep, whose other jobs go on; nor what the user can mend, for Hydra prints the
    overrides of a job that raises.
    """
    ended: Ended = {"experiment": str(config.get("name"))}
    try:
        command_line.check_kind(config.kind)
        ran = importlib.import_module(f"experiments.{config.kind}").run(config)
        ended |= {**ran._asdict(), "listed": ran.verdict in list(config.fail_on)}
    except Unfinished as error:
        ended["unfinished"] = str(error)
    except Exception as error:
        if line := command_line.explain(error):
            ended["refused"] = line
        elif is_out_of_memory(error):
            ended["unfinished"] = f"memory does not hold a seed: {one_line(error)}"
        elif in_sweep():
            ended["crashed"] = format_exc()
        else:
            raise
    if not in_sweep():  # a sweep collects what its jobs return, wherever they ran
        _ended.append(ended)
    return ended


def collect(ended: Iterable[Mapping]) -> None:
    _ended.extend(ended)


def refuse(line: str) -> None:
    _ended.append({"refused": line})


def exit_status() -> int:
    """Says what went wrong, each thing once. 2 bad configuration, 1 unfinished, 3 a verdict of fail_on."""
    for kind in ("crashed", "refused", "unfinished"):
        for line in dict.fromkeys(e[kind] for e in _ended if e.get(kind)):
            print(line if kind == "crashed" else f"error: {line}", file=sys.stderr)
    if any(e.get("refused") for e in _ended):
        return 2
    if any(e.get("unfinished") or e.get("crashed") for e in _ended):
        return 1
    return 3 if any(e.get("listed") for e in _ended) else 0
