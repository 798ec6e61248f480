"""Draw the main curves of a stored run for a paper, as SVG and PNG; trains nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from driftlab.record.seed_record import RecordError
from driftlab.report.paper import WIDTHS, read_run, write_curves
from suite.command.errors import ConfigurationError, one_line
from suite.reading.judging import check_no_links
from suite.reading.stored import read_settings, read_strangers


def main() -> int:
    arguments = _arguments()
    try:
        read_settings(arguments.run)  # a folder without them is no run's
        records = read_run(arguments.run, read_strangers)
        if arguments.out is None:
            check_no_links(arguments.run / "figures")
        curves = write_curves(records, arguments.out or arguments.run / "figures", arguments.width)
    except (RecordError, ConfigurationError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename} cannot be written ({error.strerror}): write --out FOLDER")
    except Exception as error:  # whatever a stranger's records bring about
        return _refuse(f"{arguments.run} cannot be drawn: {one_line(error)}")
    for path in curves.files:
        print(path)
    print(f"caption: {curves.caption}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.error = _refuse_arguments  # type: ignore[method-assign]
    parser.add_argument("run", type=Path, help="a run's folder, results/runs/<experiment>/<digest>")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go (RUN/figures)")
    inches = ", ".join(f"{name} {value} in" for name, value in WIDTHS.items())
    parser.add_argument("--width", choices=WIDTHS, default="single", help=f"of a column: {inches}")
    return parser.parse_args()


def _refuse_arguments(line: str) -> NoReturn:
    sys.exit(_refuse(f"{line}: write scripts/figures.py RUN [--out FOLDER] [--width NAME]"))


def _refuse(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    supervision.end(main)
