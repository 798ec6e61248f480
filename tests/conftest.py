"""How the processes of the test run share two cores: one thread each, and what waits begins first."""

import os
from collections import defaultdict

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # two threads that share a core wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch


def pytest_collection_modifyitems(items):
    """By files, so that fixtures are made once. What is slow or waits for a service (Slurm) is dealt out in
    turn, longest first, and begins every process's share; the quick ones fill the shares up.
    """
    marks, files = defaultdict(set), defaultdict(list)
    for item in items:
        files[item.path].append(item)
        marks[item.path].update(mark.name for mark in item.iter_markers())
    weights = {"long": 4, "service": 2, "slow": 1}
    weight = {path: sum(weights.get(mark, 0) for mark in marks[path]) for path in files}
    shares = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))]
    for turn, path in enumerate(sorted(filter(weight.get, files), key=weight.get, reverse=True)):
        shares[turn % len(shares)] += files[path]
    quick = [item for path in files if not weight[path] for item in files[path]]
    for number, share in enumerate(shares):  # xdist cuts the list into as many parts of one length
        wanted = len(items) // len(shares) + (number < len(items) % len(shares))
        room = max(0, wanted - len(share))
        share += quick[:room]
        del quick[:room]
    items[:] = [item for share in shares for item in share] + quick


@pytest.fixture
def cuda():
    """One pretended GPU (``tests/pretended_cuda``): what the host waits for there is ``cuda.waited``."""
    from tests.pretended_cuda import pretended_cuda  # which imports torch

    with pretended_cuda() as device:
        yield device


@pytest.fixture(scope="session")
def forked():
    """A process that has imported everything, to fork programs of the project from."""
    from tests.suite.programs import Forked

    server = Forked()
    yield server
    server.end()
