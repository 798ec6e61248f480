"""How the processes of the test run share two cores: one thread each, and what waits begins first.

Of long lists of slow cases that are alike a run takes some, drawn by the commit, so that a few commits run
all of them; ``--all-cases`` takes every one.
"""

import os
import random
import subprocess
from collections import defaultdict

import pytest

DRAWN_BY = "DRIFTLAB_DRAWN_BY"  # any text; another one draws others
if DRAWN_BY not in os.environ:  # once, for all processes of the run
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=os.path.dirname(__file__)
    )
    os.environ[DRAWN_BY] = head.stdout.strip()[:12]

# Both before torch is imported. Two threads that share a core wait for each other; where a process takes
# two all the same (``-n 0``, ``threads=2``), the one that waits shall sleep: beside other work a training of
# ResNet18 at smoke took 78 s of a core where two spun, 5 s where they slept, 3 s with one thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser):
    parser.addoption("--all-cases", action="store_true", help="every case of a list that is drawn from")


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("all_cases"):
        by = f"{DRAWN_BY}={os.environ[DRAWN_BY]}"
        terminalreporter.line(f"of long lists of cases some were drawn, by {by}; --all-cases runs every one")


def drawn_from(items):
    """Those that this run takes: of a function marked ``drawn(count)`` so many cases."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn"):
            cases[item.path, item.originalname].append(item)
    left = set()
    for (path, name), of_one in cases.items():
        die = random.Random(f"{os.environ[DRAWN_BY]} {path.name} {name}")
        left.update(die.sample(of_one, max(0, len(of_one) - of_one[0].get_closest_marker("drawn").args[0])))
    return left


def pytest_collection_modifyitems(config, items):
    left = set() if config.getoption("all_cases") else drawn_from(items)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]
    in_their_order(items)


def in_their_order(items):
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
def forked(tmp_path_factory):
    """A process that has imported everything, to fork programs of the project from: one for the whole run."""
    from tests.suite.programs import Forked

    own = tmp_path_factory.getbasetemp()
    server = Forked((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "forked")
    yield server
    server.end()
