"""A disk that is full or turns read-only: one line, nothing lost, and the same command goes on."""

import ctypes
import errno
import os
import shutil
import subprocess
import threading
import time

import pytest

from tests.suite.below import below
from tests.suite.faults.conftest import QUESTION, TRAINING, assert_same, folder_of

MS_RDONLY, MS_REMOUNT = 1, 32  # <sys/mount.h>
COMMAND = ["+experiment=precision", "seed=0..1", *TRAINING]


def mounted(place, options):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode and os.environ.get("CI") != "true":
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def remount(disk, how):
    """Read-only is refused while a file is open for writing: again and again, and at once."""
    libc, flags = ctypes.CDLL(None, use_errno=True), MS_REMOUNT | (MS_RDONLY if how == "ro" else 0)
    give_up = time.monotonic() + 300
    while libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", flags, None):
        assert ctypes.get_errno() == errno.EBUSY, os.strerror(ctypes.get_errno())
        assert time.monotonic() < give_up, f"{disk} was not remounted {how}"


@pytest.fixture
def disk(tmp_path):
    """A file system of 24 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted(place, "size=24m")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(scope="module")
def undisturbed(forked, tmp_path_factory):
    results = tmp_path_factory.mktemp("undisturbed")
    assert forked.run(*COMMAND, f"results={results}").status == 0
    return folder_of(results)


def taken(folder):
    """The bytes of its files, each of which begins a page of its own."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


def fill(disk, leave):
    """Leave that many bytes."""
    room = shutil.disk_usage(disk).free - leave
    with open(disk / "filler", "wb") as file:
        file.write(bytes(max(room, 0)))


def assert_one_line(ended, *words):
    assert ended.status == 1, ended.out
    assert "Traceback" not in ended.out
    assert len(ended.errors) == 1, ended.out
    for word in words:
        assert word in ended.errors[0], ended.errors


def assert_nothing_half(folder, undisturbed):
    """Every file under its final name is whole, every seed that has finished is right."""
    for home in folder.glob("seed=*"):
        for file in home.rglob("*"):
            assert file.is_dir() or file.stat().st_size or file.suffix == ".part", file
        if (home / "run.json").exists():
            assert_same(undisturbed / home.name, home)


# a page of the file system takes 4 kB, the report 120 kB
@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "more"), [(0, 0), (0, 8_000), (0.5, 0), (1, 0), (2, 0), (2, 50_000)])
def test_a_full_disk_is_one_line_and_nothing_is_lost(forked, undisturbed, disk, seeds, more):
    results = disk / "results"
    fill(disk, int(seeds * taken(undisturbed / "seed=0")) + more)
    ended = forked.run(*COMMAND, f"results={results}")
    assert_one_line(ended, "no space left on device", f"results={results}", "make room")
    for folder in results.glob("*/*"):
        assert_nothing_half(folder, undisturbed)
    (disk / "filler").unlink()
    ended = forked.run(*COMMAND, f"results={results}")
    assert ended.status == 0, ended.out
    assert not ended.says("kept as")
    for seed in ("seed=0", "seed=1"):
        assert_same(undisturbed / seed, folder_of(results) / seed)
    assert not list(results.rglob("seed=*/**/.*.part"))


@pytest.mark.slow
def test_a_folder_turned_read_only_is_one_line_and_the_same_command_goes_on(forked, undisturbed, disk):
    results = disk / "results"
    ended = []
    runs = threading.Thread(target=lambda: ended.append(forked.run(*COMMAND, f"results={results}")))
    runs.start()
    while runs.is_alive() and not any(below(results, "state.safetensors")):
        time.sleep(0.001)
    remount(disk, "ro")
    runs.join()
    assert_one_line(ended[0], "read-only file system", "make it writable, then the same command goes on")
    assert "seed 0" in ended[0].errors[0] or "finished" in ended[0].errors[0]
    again = forked.run(*COMMAND, f"results={results}")
    assert_one_line(again, "read-only file system", f"results={results}")
    remount(disk, "rw")
    assert_nothing_half(folder_of(results), undisturbed)
    last = forked.run(*COMMAND, f"results={results}")
    assert last.status == 0, last.out
    for seed in ("seed=0", "seed=1"):
        assert_same(undisturbed / seed, folder_of(results) / seed)


@pytest.mark.slow
def test_where_only_the_verdict_cannot_be_written_the_seeds_have_finished(forked, undisturbed, disk):
    results = disk / "results"
    folder = results / undisturbed.parent.name / undisturbed.name
    shutil.copytree(undisturbed, folder)
    for name in ("verdict.json", "report.html"):
        (folder / name).unlink()
    fill(disk, 12_000)
    ended = forked.run(*COMMAND, f"results={results}")
    assert_one_line(ended, "no space left on device", "has finished")
    assert not (folder / "report.html").exists()
    (disk / "filler").unlink()
    assert forked.run(*COMMAND, f"results={results}").status == 0
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_a_disk_that_was_never_writable_is_a_bad_setting(forked, disk):
    remount(disk, "ro")
    ended = forked.run(*COMMAND, f"results={disk / 'results'}")
    assert ended.status == 2
    assert len(ended.errors) == 1
    assert "cannot be written (read-only file system): write results=FOLDER" in ended.errors[0]


@pytest.mark.slow
def test_a_full_disk_while_a_question_is_measured(forked, disk):
    results = disk / "results"
    command = ["+experiment=gradient_check", "seed=0", *QUESTION, f"results={results}"]
    fill(disk, 12_000)
    assert_one_line(forked.run(*command), "no space left on device", "seed 0 is measured again")
    (disk / "filler").unlink()
    assert forked.run(*command).status == 0
