"""Makes verdict and report again from stored runs, without training, or puts two experiments side by side.

    python scripts/judge.py results/runs                      every experiment at or below a folder, or a glob
    python scripts/judge.py RUN RUN --fail-on bug,unstable    ends with exit status 3 on these verdicts
    python scripts/judge.py --compare A B [--out FOLDER]      writes compare.html (into A's folder)

exit status: 0 judged, whatever the verdicts; 2 something cannot be judged; 3 a verdict of --fail-on;
             130 Ctrl-C; 143 SIGTERM; 129 SIGHUP; 131 SIGQUIT
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()  # Ctrl-C, and whatever a stranger's folder brings about, is one line

from driftlab.words import Verdict
from suite.command.errors import ConfigurationError


class Parser(argparse.ArgumentParser):
    """What it refuses is one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}: judge.py --help says how")


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="results/runs/<experiment>/<digest>, or above")
    parser.add_argument(
        "--fail-on", default="", metavar="VERDICT,...", help="of these verdicts the exit status is 3"
    )
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"))
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where compare.html goes")
    options = parser.parse_args(arguments)
    if bool(options.runs) == bool(options.compare):
        raise ConfigurationError("name the runs to judge, or two with --compare: judge.py RUN, --compare A B")
    if options.out and not options.compare:
        raise ConfigurationError(f"--out {options.out} is for --compare: a run is judged where it lies")
    if options.fail_on and options.compare:
        raise ConfigurationError("--fail-on is for judging runs, not for --compare")
    return options


def verdicts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in list(Verdict):
            raise ConfigurationError(f"--fail-on {name} is unknown: choose from {', '.join(Verdict)}")
    return names


def main(arguments: list[str]) -> int:
    try:
        options = parsed(arguments)
        listed = verdicts(options.fail_on)
        # here, so that --help and a misspelt option are answered at once
        if options.compare:
            from suite.reading.comparing import compare

            compare(*options.compare, options.out)
            return 0
        from suite.reading.archive import judge_all

        return judge_all(options.runs, listed)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    supervision.end(partial(main, sys.argv[1:]))
