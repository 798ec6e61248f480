"""Put the answer of finished runs into results/published/: scripts/publish.py RUN [RUN ...]"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from suite.command.command_line import ROOT
from suite.command.errors import ConfigurationError, one_line
from suite.reading.publishing import publish


def main(runs: list[str]) -> int:
    if {"-h", "--help"} & set(runs):
        print(__doc__)
        return 0
    if not runs:
        print("error: no run: write scripts/publish.py results/runs/EXPERIMENT/DIGEST", file=sys.stderr)
        return 2
    for run in runs:
        try:
            page = publish(Path(run), ROOT / "results" / "published")
        except ConfigurationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever a stranger's records bring about
            print(f"error: {run} cannot be published: {one_line(error)}", file=sys.stderr)
            return 2
        print(page, flush=True)
    return 0


if __name__ == "__main__":
    supervision.end(partial(main, sys.argv[1:]))
