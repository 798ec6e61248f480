"""The front door: a configuration -> every seed -> a verdict. `train.py --help` lists the experiments."""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig

from experiments import command_line, cores, jobs
from experiments.outcome import Ended
from experiments.seeds import fan_out


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(config: DictConfig) -> Ended:
    """One Hydra job: all seeds of one experiment, or with --multirun one of them."""
    return jobs.carry_out(config)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(command_line.usage())
        return 0
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises to us instead of printing and exiting
    try:
        command_line.check(arguments)
        cores.register_resolver()
        sys.argv[1:] = fan_out(arguments)
        job()
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    except Exception as error:
        line = command_line.explain(error)
        if line is None:
            raise
        jobs.refuse(line)
    return jobs.exit_status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
