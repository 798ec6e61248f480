"""Where drift grows along a long training, and what tells a fault that sets in on the way: the page of it.

    python train.py +experiment=long_run logger=none seed=0..7
    python scripts/long_run.py [results/runs/long_run]

Reads the finished seeds of every rewrite below the folder; the page is results/published/long_run/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from driftlab.glossary import PUBLISHED_NOTE
from driftlab.record.seed_record import write_whole
from scripts.long_run_parts.answer import answer
from scripts.long_run_parts.rules import network
from suite.command.command_line import ROOT
from suite.command.errors import ConfigurationError
from suite.reading.archive import find_runs, read_judged
from suite.reading.judging import Judged, write_shown
from suite.reading.publishing import made, opening, sections

BESIDE = (
    "`python train.py +experiment=long_run logger=none` trains the faults beside it, next to one reference.\n"
)
PAGE = ROOT / "results" / "published" / "long_run"


def runs_below(folder: str) -> list[Judged]:
    """The right rewrite first, then the faults in the order in which they set in.

    Raises:
        ConfigurationError: there are none with finished seeds, or one of another experiment.
    """
    found = [read_judged(run, print) for run in find_runs([folder])]
    runs = [run for run in found if run is not None and run.settings.name == "long_run"]
    if len(runs) < 2:
        raise ConfigurationError(f"{folder} holds no finished seeds of long_run: run its command first")
    return sorted(runs, key=lambda run: network(run).begins or 0)


def write_page(runs: Sequence[Judged], page: Path) -> Path:
    networks = [network(run) for run in runs]
    found = answer(networks, int(runs[0].settings.steps))
    shown = write_shown(page, found)
    text = [*_page(runs, found.sentence), *sections(shown, page), *made(runs[0]), BESIDE]
    write_whole(page / "README.md", "\n".join(text))
    return page / "README.md"


def _page(runs: Sequence[Judged], sentence: str) -> Iterable[str]:
    settings, judgement = runs[0].settings, runs[0].judgement
    n = min(len(run.records) for run in runs)
    yield f"# {settings.name}\n"
    yield f"{PUBLISHED_NOTE}\n"
    verdict = f"`{judgement.verdict}` of the split: {judgement.headline}."
    yield from opening(settings, n, True, verdict, sentence)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        print(write_page(runs_below(*(arguments or ["results/runs/long_run"])), PAGE))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    supervision.end(partial(main, sys.argv[1:]))
