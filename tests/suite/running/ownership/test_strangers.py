"""Owners on another machine: nobody can ask whether they live, so their signs of life are watched."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.suite.conftest import ROOT
from tests.suite.running.ownership.conftest import QUICK


@pytest.fixture
def stranger(place):
    """The token of an owner on a machine that cannot be asked."""
    place.mkdir()
    token = place / "machine=0123456789abcdef.pid=1.start=1.0000000000000000"
    token.touch()
    return token


def test_a_stranger_is_not_judged_at_once(stranger, contender):
    assert contender(wait=False).says() == "none"
    assert stranger.exists()


@pytest.mark.parametrize("age", [0, -(10**9), 10**9], ids=["now", "long ago", "in the future"])
def test_a_stranger_that_stays_silent_is_taken_over(stranger, contender, age):
    os.utime(stranger, (time.time() + age,) * 2)
    began = time.monotonic()
    second = contender()
    assert [second.says(), second.says()] == ["waiting", "inside"]
    assert time.monotonic() - began >= QUICK["patience"]
    assert not stranger.exists()


@pytest.mark.slow
@pytest.mark.parametrize("step", [0.0, -3600.0, 3600.0], ids=["steady", "backward", "forward"])
def test_a_stranger_that_gives_signs_of_life_is_not(stranger, contender, step):
    """Whatever time they bear. Where this test itself stood still for too long, it may be."""
    second = contender(patience=2.0)
    assert second.says() == "waiting"
    beaten = [time.monotonic()]
    while not second.pipe.poll(0.1) and beaten[-1] - beaten[0] < 5.0:
        os.utime(stranger, (time.time() + len(beaten) * step,) * 2)
        beaten.append(time.monotonic())
    assert stranger.exists() or time.monotonic() - beaten[-2] >= 2.0


@pytest.mark.slow
def test_a_watcher_that_stood_still_itself_does_not_count_that_time(stranger, contender):
    began = time.monotonic()
    second = contender(patience=3.0)
    assert second.says() == "waiting"
    second.signalled(signal.SIGSTOP)
    watched = time.monotonic() - began
    time.sleep(4.0)
    woken = time.monotonic()
    second.signalled(signal.SIGCONT)
    assert second.says() == "inside"
    assert watched + QUICK["heartbeat"] + (time.monotonic() - woken) >= 3.0


def test_what_bears_no_known_name_is_a_stranger(place, contender):
    """Another version's token, say."""
    place.mkdir()
    (place / "token-2.0").touch()
    assert contender(wait=False).says() == "none"
    second = contender()
    assert [second.says(), second.says()] == ["waiting", "inside"]


@pytest.fixture
def elsewhere(place):
    """Own the place where process numbers mean something else, as in a container."""
    code = "from suite.running.ownership import owned_by_me; import sys; from pathlib import Path\n"
    code += "with owned_by_me(Path(sys.argv[1]), heartbeat=0.1): print('inside', flush=True); input()"
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces may be made here")
    command = [*apart, sys.executable, "-c", code, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as owner:
        assert owner.stdout.readline() == b"inside\n"
        yield owner
        owner.kill()


@pytest.mark.slow
def test_the_heart_of_a_real_stranger_beats_until_it_dies(elsewhere, contender):
    second = contender(patience=3.0)
    assert second.says() == "waiting"
    assert not second.pipe.poll(5.0)
    elsewhere.kill()
    assert second.says() == "inside"
