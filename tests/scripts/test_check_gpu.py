"""The check for the first person who has a GPU: a crash costs one item, and what is missing is said."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from driftlab.record.json_files import read_json

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "scripts/check_gpu.py"


@pytest.fixture
def check(tmp_path):
    """Run it with made-up parts; answers with the exit status, what was printed, and what was tried."""

    def run(*told: str, minutes: float = 5) -> tuple[int, str, list[str]]:
        (tmp_path / "told").write_text("\n".join(told))
        (tmp_path / "tried").write_text("")
        python = f"{sys.executable} -m tests.scripts.stand_in"
        options = ["--results", tmp_path / "sent", "--minutes", minutes, "--python", python]
        command = [*python.split(), PROGRAM, *map(str, options)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert not ended.stderr, ended.stderr
        return ended.returncode, ended.stdout, (tmp_path / "tried").read_text().split()

    return run


def block(text: str, heading: str) -> str:
    """What stands under a heading of the summary."""
    return text.partition(f"\n{heading}")[2].partition("\n\n")[0]


def test_all_that_is_well_ends_with_0_and_is_not_done_again(check, tmp_path):
    status, out, tried = check()
    assert (status, tried) == (0, list("abcdef"))
    assert "6 right" in out
    assert (tmp_path / "sent" / "summary.txt").read_text() in out
    status, out, tried = check()
    assert (status, tried) == (0, [])
    assert "6 right" in out


def test_a_crash_costs_its_item_alone_and_is_run_again(check):
    status, out, tried = check("b dies", "c raises")
    assert (status, tried) == (1, list("abcdef"))
    failed = block(out, "FAILED")
    assert "first: b: its process ended with SIGSEGV" in failed
    assert "first: c: ValueError: c cannot" in failed
    assert "ValueError: c cannot" in failed.partition("first.log ends with")[2]
    status, out, tried = check()
    assert (status, tried) == (0, ["b", "c"])
    assert not block(out, "FAILED")


def test_what_is_not_as_it_should_be_stands_first(check):
    status, out, _ = check("d errs")
    assert status == 1
    assert "first: d: d found a fault" in block(out, "NOT AS IT SHOULD BE")
    assert "5 right, 1 not right" in out


def test_what_takes_too_long_is_cut_off_and_the_next_part_has_its_time(check):
    status, out, tried = check("b lasts", minutes=0.4)
    assert status == 1
    missing = block(out, "NOT RUN")
    assert "first: b (cut off" in missing
    assert all(f"first: {name} (no time was left)" in missing for name in "cd")
    assert tried == list("abef")
    assert check()[2] == list("bcd")


def test_another_gpu_is_measured_anew(check):
    check()
    status, out, tried = check("gpu Other")
    assert (status, tried) == (0, list("abcdef"))
    assert "Other" in out


def test_a_damaged_file_is_measured_anew(check, tmp_path):
    check()
    (tmp_path / "sent" / "second.json").write_text('{"of": ')
    assert check()[2] == ["e", "f"]


def test_without_a_gpu_there_is_one_line(tmp_path):
    results = tmp_path / "sent"
    ended = subprocess.run(
        [sys.executable, PROGRAM, "--results", str(results)],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600},
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "finds no CUDA device" in ended.stderr
    assert not results.exists()


def process_of(part: str, results: Path) -> int | None:
    """The one that carries out a part of the check whose results lie there."""
    for number in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            given = Path("/proc", number, "cmdline").read_bytes().decode().split("\0")
            if part in given and str(results) in given:
                return int(number)
    return None


def at(file: Path) -> str | None:
    """The item that a part is at."""
    return read_json(file)["at"] if file.exists() else None


@pytest.mark.slow
def test_rehearsed_on_a_pretended_gpu_with_a_part_killed_and_started_again(tmp_path):
    results = tmp_path / "sent"
    options = ["--size", "smoke", "--minutes", "30", "--python", f"{sys.executable} -m tests.pretended_cuda"]
    command = [sys.executable, PROGRAM, "--results", str(results), *options]
    streams = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    first = subprocess.Popen(command, **streams)
    while (killed := at(results / "kernels.json")) is None:
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.05)
    os.kill(process_of("kernels", results), signal.SIGKILL)
    out, _ = first.communicate()
    assert first.returncode == 1, out
    assert f"kernels: {killed}: its process ended with SIGKILL" in block(out, "FAILED")
    assert ", 0 not right," in out
    assert ", 1 failed, 0 not run" in out
    kept = {
        file: file.read_bytes() for file in results.glob("*.json") if file.stem not in ("machine", "kernels")
    }
    again = subprocess.run(command, **streams)
    assert again.returncode == 0, again.stdout
    assert ", 0 failed, 0 not run" in again.stdout
    assert all(file.read_bytes() == content for file, content in kept.items())
