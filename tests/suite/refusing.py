"""What a command that ends before its time leaves: a status, one line, and nothing else."""

from pathlib import Path

from tests.suite.conftest import Finished


def assert_one_line(done: Finished, status: int, text: str) -> None:
    assert done.status == status, done.err
    assert len(done.errors) == 1, done.err
    assert text in done.errors[0]


def assert_refused(done: Finished, text: str, results: Path | None = None) -> None:
    """Bad input; nothing is left in ``results``."""
    assert_one_line(done, 2, text)
    assert done.errors[0].startswith("error: ")
    assert results is None or not list(results.iterdir())
