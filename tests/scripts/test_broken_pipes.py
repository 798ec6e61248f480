"""Whoever has read enough of what a script prints (``| head -1``) hears no more: 141, and not a word."""

import os
import signal
import subprocess
import sys

import pytest

from tests.suite.conftest import ROOT
from tests.suite.reading.test_judge import make_run  # noqa: F401 (a fixture)
from tests.suite.reading.test_publishing import run  # noqa: F401 (a fixture)

SCRIPTS = sorted(p.name for p in (ROOT / "scripts").glob("*.py") if "__main__" in p.read_text())
HEAVY = ("benchmark.py", "calibrate.py", "float64_convolutions.py", "growth.py")  # they import torch


def assert_silent(script, *arguments, **options):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    own = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | options
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, timeout=300, env=own)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in HEAVY])
def test_help_that_nobody_reads(name):
    assert_silent(name, "--help")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", HEAVY)
def test_help_of_what_takes_its_time_that_nobody_reads(name):
    assert_silent(name, "--help")


@pytest.mark.parametrize("command", ["judge.py --help", "../train.py --help", "../train.py --version"])
def test_what_argparse_could_not_write_unbuffered(command):
    assert_silent(*command.split(), PYTHONUNBUFFERED="1")


@pytest.mark.parametrize("name", ["figures.py", "judge.py"])
def test_a_runs_lines_that_nobody_reads(name, run):  # noqa: F811
    assert_silent(name, run)
