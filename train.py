"""The front door: a configuration -> every seed -> a verdict. `train.py --help` lists the experiments."""

from __future__ import annotations

import importlib
import os
import sys

import hydra
from omegaconf import DictConfig

from experiments import command_line
from experiments.seeds import fan_out

# What the jobs of this process leave for its exit status.
_listed: list[str] = []  # verdicts that fail_on names
_refused: list[str] = []  # what was wrong with the configuration


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(config: DictConfig) -> str:
    """One Hydra job: all seeds of one experiment, or with --multirun one of them."""
    try:
        command_line.check_kind(config.kind)
        verdict = importlib.import_module(f"experiments.{config.kind}").run(config)
    except Exception as error:
        # handed over instead of raised, because Hydra prints the overrides of a job that raises
        line = command_line.explain(error)
        if line is None:
            raise
        _refused.append(line)
        return "refused"
    if verdict in list(config.fail_on):
        _listed.append(verdict)
    return verdict


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(command_line.usage())
        return 0
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises to us instead of printing and exiting
    try:
        command_line.check(arguments)
        sys.argv[1:] = fan_out(arguments)
        job()
    except Exception as error:
        line = command_line.explain(error)
        if line is None:
            raise
        _refused.append(line)
    for line in dict.fromkeys(_refused):
        print(f"error: {line}", file=sys.stderr)
    return 2 if _refused else 3 if _listed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
