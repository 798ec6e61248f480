"""The front door: a configuration -> every seed -> a verdict. `train.py --help` lists the experiments."""

from __future__ import annotations

import os
import sys
from functools import partial

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()  # before all that takes its time to import, so that no moment is without a watch

import hydra
from omegaconf import DictConfig

from suite.command import command_line, jobs, machine, options
from suite.command.seeds import fan_out


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(config: DictConfig) -> jobs.Ended:
    """One Hydra job: all seeds of one experiment, or with --multirun one of them."""
    return jobs.carry_out(config)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def show(config: DictConfig) -> None:
    """The settings as a run of them would have them on this machine (``--cfg job --resolve``)."""
    jobs.show(config)


def main(arguments: list[str]) -> int:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises to us instead of printing and exiting
    try:
        if {"-h", "--help"} & set(arguments):
            options.look_in_own(arguments)
            print(command_line.usage(), flush=True)
            return 0
        ordered = options.check(arguments)
        machine.register_resolvers()
        given, resolved = options.without_resolve(ordered)
        sys.argv[1:] = fan_out(given)
        show() if resolved else job()
        jobs.print_shown()
    except Exception as error:
        supervision.raise_if_stopped()
        if not jobs.say_at_the_end(error):
            raise
    except SystemExit as asked:  # Hydra's own: of --hydra-help, or of an option that it cannot follow
        if asked.code:
            return 2
    return jobs.exit_status()


if __name__ == "__main__":
    supervision.end(partial(main, sys.argv[1:]))
