"""One owner at a time: real processes that contend, die and stand still."""

import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from suite.running.ownership import OwnershipLost, owned_by_me
from tests.suite.conftest import ROOT
from tests.suite.running.ownership import contending
from tests.suite.running.ownership.conftest import QUICK, processes, token_of

CONTENDERS, ROUNDS = 24, 12
KILLS = 100


def test_nothing_is_left_behind(place):
    with owned_by_me(place) as owner:
        owner.check()
    assert list(place.parent.iterdir()) == []


def test_no_name_of_the_machine_is_written(place):
    with owned_by_me(place):
        assert os.uname().nodename not in token_of(place).name


@pytest.mark.slow
def test_of_many_processes_one_at_a_time_is_inside(place):
    started = [
        processes.Process(target=contending.count, args=[place, ROUNDS, n], kwargs={"poll": 0.001})
        for n in range(CONTENDERS)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * CONTENDERS
    assert (place.parent / "counter").read_text() == str(CONTENDERS * ROUNDS)
    assert sorted(p.name for p in place.parent.iterdir()) == ["counter", "inside"]


@pytest.mark.slow
def test_owners_killed_at_random_moments_are_replaced_and_leave_no_trace(place):
    seed = random.randrange(2**32)
    dice = random.Random(seed)

    def one():
        options = {"poll": 0.001}
        process = processes.Process(
            target=contending.count, args=[place, 10**9, dice.random()], kwargs=options
        )
        process.start()
        return process

    started = [one() for _ in range(6)]
    for _ in range(KILLS):
        time.sleep(dice.random() * 0.03)
        victim = dice.randrange(len(started))
        started[victim].kill()
        started[victim].join()
        assert started[victim].exitcode == -signal.SIGKILL, f"dice {seed}: it had ended before"
        started[victim] = one()
    for process in started:
        process.kill()
        process.join()
    with owned_by_me(place, wait=False) as owner:
        assert owner is not None, f"dice {seed}: all are dead, and somebody owns it"
    left = {p.name.split(".")[0] for p in place.parent.iterdir()}
    assert left == {"counter", "inside"}, f"dice {seed}"
    assert int((place.parent / "counter").read_text()) > KILLS, f"dice {seed}: hardly anybody got in"


def test_who_waits_is_told_so_once_and_comes_in_when_the_owner_leaves(contender):
    first, second = contender(), None
    assert first.says() == "inside"
    second = contender()
    assert second.says() == "waiting"
    assert first.asked("leave") == "left"
    assert second.says() == "inside"


def test_who_does_not_want_to_wait_is_told_that_somebody_is_there(contender):
    first = contender()
    assert first.says() == "inside"
    assert contender(wait=False).says() == "none"
    assert first.asked("check") == "owned"


def test_a_killed_owner_is_replaced_without_patience(contender):
    first = contender()
    assert first.says() == "inside"
    first.signalled(signal.SIGKILL)
    assert contender(wait=False, patience=1e9).says() == "inside"


def test_who_waits_for_one_that_is_killed_comes_in(contender):
    first = contender()
    assert first.says() == "inside"
    second = contender(patience=1e9)
    assert second.says() == "waiting"
    first.signalled(signal.SIGKILL)
    assert second.says() == "inside"


def test_a_zombie_is_dead(place):
    """Killed, and its parent does not care."""
    code = "from suite.running.ownership import owned_by_me; import sys; from pathlib import Path\n"
    code += "with owned_by_me(Path(sys.argv[1])): print('inside', flush=True); input()"
    owner = subprocess.Popen(
        [sys.executable, "-c", code, place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with owner:
        assert owner.stdout.readline() == b"inside\n"
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        with owned_by_me(place, wait=False) as mine:
            assert mine is not None


def test_an_owner_that_stands_still_on_this_machine_is_not_taken_over(contender):
    first = contender()
    assert first.says() == "inside"
    first.signalled(signal.SIGSTOP)
    assert contender(wait=False).says() == "none"
    second = contender(patience=0.3)
    assert second.says() == "waiting"
    assert not second.pipe.poll(1.0)
    first.signalled(signal.SIGCONT)
    assert first.asked("check") == "owned"


@pytest.mark.parametrize("word", ["interrupt", "exit"])
def test_an_owner_that_is_interrupted_leaves(place, contender, word):
    first = contender()
    assert first.says() == "inside"
    first.pipe.send(word)
    first.process.join(60)
    assert not place.exists()


def test_two_threads_of_one_process_are_two_contenders(place):
    entered = threading.Event()

    def other() -> None:
        with owned_by_me(place, **QUICK):
            entered.set()

    with owned_by_me(place) as owner:
        thread = threading.Thread(target=other)
        thread.start()
        assert not entered.wait(0.3)
        owner.check()
    thread.join(60)
    assert entered.is_set()


def test_a_fork_of_the_owner_is_not_the_owner_and_takes_nothing_away(place, contender):
    first = contender()
    assert first.says() == "inside"
    assert first.asked("fork") == "left"  # said by the fork, which has left the ``with``
    assert first.says().startswith("lost: ")
    assert first.asked("check") == "owned"


def test_the_owner_notices_that_it_was_replaced_and_leaves_the_other_alone(place, contender):
    first = contender()
    assert first.says() == "inside"
    token_of(place).unlink()
    second = contender()
    assert second.says() == "inside"
    lost = first.asked("check")
    assert lost.startswith(f"lost: {place} was taken over")
    assert "\n" not in lost
    assert first.asked("leave") == "left"
    assert second.asked("check") == "owned"


def test_a_folder_that_is_gone_is_not_taken_for_a_lost_place(tmp_path, contender):
    folder = tmp_path / "folder"
    folder.mkdir()
    first = contender(folder / ".seed=3.owner")
    assert first.says() == "inside"
    folder.rename(tmp_path / "elsewhere")
    assert first.asked("check").startswith("unreachable: ")
    (tmp_path / "elsewhere").rename(folder)
    assert first.asked("check") == "owned"


def test_a_folder_that_is_missing_is_said(tmp_path):
    with pytest.raises(FileNotFoundError), owned_by_me(tmp_path / "missing" / ".seed=3.owner"):
        pass


def test_the_lock_file_of_an_earlier_version_is_no_obstacle(place):
    place.touch()
    with owned_by_me(place, wait=False) as owner:
        owner.check()
    assert not place.exists()


def test_a_link_at_the_place_is_removed_and_not_followed(tmp_path, place):
    (tmp_path / "target").mkdir()
    place.symlink_to("target")
    with owned_by_me(place, wait=False) as owner:
        owner.check()
        assert list((tmp_path / "target").iterdir()) == []


def test_a_pipe_at_the_place_is_not_waited_for(place):
    os.mkfifo(place)
    with owned_by_me(place, wait=False) as owner:
        assert stat.S_ISDIR(os.lstat(place).st_mode)
        owner.check()


def test_a_lost_place_raises_one_line_here_too(place):
    with owned_by_me(place) as owner:
        token_of(place).unlink()
        with pytest.raises(OwnershipLost, match="was taken over"):
            owner.check()
