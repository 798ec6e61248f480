"""Builds the W&B workspace and report of a project from code.

python scripts/wandb_dashboard.py --project driftlab --entity my-team    makes both, says where
python scripts/wandb_dashboard.py --dry-run                              prints the specs as JSON

Run again it makes new ones; --workspace URL and --report URL put them in place of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

if __name__ == "__main__":
    supervision.begin()

from suite.command.errors import ConfigurationError, one_line
from suite.showing.loggers.weights_and_biases import logged_in


def main(arguments: list[str]) -> int:
    asked = _asked(arguments)
    try:
        if asked.dry_run:
            _show(asked)
        else:
            _save(asked)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _asked(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--project", default="driftlab", help="the W&B project (driftlab)")
    parser.add_argument("--entity", default="", help="the user or team that owns it (your own)")
    parser.add_argument("--workspace", metavar="URL", help="the workspace to replace")
    parser.add_argument("--report", metavar="URL", help="the report to replace")
    parser.add_argument("--dry-run", action="store_true", help="print the specs as JSON, send nothing")
    return parser.parse_args(arguments)


def _show(asked: argparse.Namespace) -> None:
    from suite.showing.dashboard import report, specs, workspace

    built = workspace(asked.project, asked.entity), report(asked.project, asked.entity)
    print(json.dumps(specs(*built), indent=1))


def _save(asked: argparse.Namespace) -> None:
    """Raises ConfigurationError where nobody is logged in or W&B refuses."""
    if not logged_in():
        raise ConfigurationError(
            "W&B knows no login here: run `wandb login` or set WANDB_API_KEY; --dry-run needs none"
        )
    import wandb

    from suite.showing.dashboard import report, saved, workspace

    with refusals():
        entity = asked.entity or wandb.Api().default_entity
    built = workspace(asked.project, entity), report(asked.project, entity)
    with refusals():
        print("\n".join(saved(*built, asked.workspace, asked.report)))


@contextmanager
def refusals() -> Iterator[None]:
    """W&B raises errors of requests, of its own and bare exceptions alike: each becomes one line."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(
            f"W&B refuses ({one_line(error)}): check login, --entity and --project"
        ) from None


if __name__ == "__main__":
    supervision.end(partial(main, sys.argv[1:]))
