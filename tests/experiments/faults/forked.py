"""Runs train.py and scripts/judge.py again and again without importing torch anew: a child forked for each.

Reads a line of JSON a time, a list of attempts ``{"program", "arguments", "kill_after", "path"}`` that live
side by side; a child is killed after so many seconds, null lets it end. Answers with a line: for each its
status (negative: the signal) and what it printed.
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def import_all() -> None:
    """What a run imports, so that a child is at work at once."""
    import lightning
    import matplotlib.pyplot
    import torch
    import torchvision

    import experiments.rejudging_table
    import experiments.split_gradient
    import experiments.training
    import train

    del lightning, matplotlib, torch, torchvision, experiments, train
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1, (
        "a fork copies one thread only"
    )


def fork(program: str, arguments: list[str], path: str | None, output: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.path[:0] = [path] if path else []
        sys.argv[:] = [str(ROOT / program), *arguments]
        runpy.run_path(str(ROOT / program), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int, until: float | None) -> int:
    """Its status; at the time ``until`` it is killed."""
    while until is not None and time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    if until is not None:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def carry_out(attempts: list[dict]) -> list[dict]:
    began, started = time.monotonic(), []
    for attempt in attempts:
        output = tempfile.TemporaryFile()  # noqa: SIM115 (read below)
        pid = fork(attempt["program"], attempt["arguments"], attempt["path"], output.fileno())
        after = attempt["kill_after"]
        started.append((pid, output, None if after is None else began + after))
    # those that are killed first: while one is waited for, nobody kills another
    ends = {pid: wait(pid, until) for pid, _, until in sorted(started, key=lambda s: s[2] or float("inf"))}
    answers = []
    for pid, output, _ in started:
        output.seek(0)
        answers.append({"status": ends[pid], "out": output.read().decode(errors="replace")})
    return answers


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(carry_out(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
