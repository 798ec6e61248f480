"""A wall clock that jumps: what is measured in seconds is not taken from it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.suite.below import below
from tests.suite.conftest import ROOT
from tests.suite.faults.conftest import TRAINING, assert_same, folder_of

COMMAND = ["+experiment=precision", "seed=0", *TRAINING]


@pytest.fixture(scope="module")
def undisturbed(forked, tmp_path_factory):
    results = tmp_path_factory.mktemp("undisturbed")
    assert forked.run(*COMMAND, f"results={results}").status == 0
    return folder_of(results) / "seed=0"


@pytest.fixture
def libfaketime():
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found and os.environ.get("CI") != "true":
        pytest.skip("libfaketime is not installed (apt-get install faketime)")
    return str(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("jumps", [("-40d", "+3y"), ("+3y", "-40d")], ids=["back", "forth"])
def test_a_jump_of_the_clock_changes_no_duration(libfaketime, undisturbed, tmp_path, jumps):
    clock, results = tmp_path / "clock", tmp_path / "results"
    clock.write_text("+0")
    faked = {
        **{"LD_PRELOAD": libfaketime, "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"},
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # nobody can set that one
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "train.py"), *COMMAND, f"results={results}"]
    process = subprocess.Popen(command, env={**os.environ, **faked}, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not any(below(results, "state.safetensors")):
        time.sleep(0.005)
    for jump in jumps:
        clock.write_text(jump)
        time.sleep(0.2)
    assert process.wait() == 0
    real = time.monotonic() - began
    home = folder_of(results) / "seed=0"
    times = json.loads((home / "run.json").read_text())["times"]
    assert 0 < times["seconds"] <= real
    assert 0 <= times["probes_seconds"] <= real
    assert abs(int(times["finished"][:4]) - int(times["began"][:4])) <= 4
    assert times["finished"][:7] != times["began"][:7], "the clock of the run did not jump"
    assert_same(undisturbed, home)
