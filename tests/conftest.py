"""How the processes of the test run share two cores: one thread each, and what waits begins first."""

import os
from collections import defaultdict

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # two threads that share a core wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch


def pytest_collection_modifyitems(items):
    """By files, so that fixtures are made once: first those that are slow and wait for a service (Slurm),
    then those that are either, and last the quick ones, which fill what is left.
    """
    marks = defaultdict(set)
    for item in items:
        marks[item.path].update(mark.name for mark in item.iter_markers())
    items.sort(key=lambda item: -len(marks[item.path] & {"slow", "service"}))


@pytest.fixture
def cuda():
    """One pretended GPU (``tests/pretended_cuda``): what the host waits for there is ``cuda.waited``."""
    from tests.pretended_cuda import pretended_cuda  # which imports torch

    with pretended_cuda() as device:
        yield device
