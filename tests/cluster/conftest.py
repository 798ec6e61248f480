"""One Slurm and one undisturbed run for the tests of a module; each process of pytest-xdist has its own."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.cluster.loopback import Cluster
from tests.suite.programs import ONE_BLOCK

SETTINGS = [
    "scale=smoke",
    "data=shapes",
    "logger=none",
    ONE_BLOCK,
    "steps=120",
    "float64_steps=5",
    "eval_every=40",
    "checkpoint_every=0",
    "log_schedule.dense=10",
    "threads=1",
]


@pytest.fixture(scope="module")
def cluster():
    missing = [name for name in ("slurmctld", "munged") if not shutil.which(name, path="/usr/sbin:/usr/bin")]
    if missing and os.environ.get("CI") != "true":
        pytest.skip("apt-get install slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # the names of sockets are short
    folder.chmod(0o755)
    slurm = Cluster(folder)
    slurm.start()
    yield slurm
    stopped = slurm.tool("stop")
    assert stopped.returncode == 0, stopped.stderr
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def undisturbed(forked, tmp_path_factory) -> Path:
    """The results of seeds 0 and 1, one after the other in a process, without a cluster."""
    results = tmp_path_factory.mktemp("undisturbed")
    done = forked.run("+experiment=split_conv", "seed=0..1", "workers=1", *SETTINGS, f"results={results}")
    assert done.status == 0, done.out
    return results
