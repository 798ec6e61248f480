"""Runs train.py and scripts/judge.py again and again without importing torch anew: a child forked for each.

One for all processes of a test run, which connect to its socket. Each sends a line of JSON a time, a list of
attempts that live side by side:
``{"program", "arguments", "environment", "kill_after", "kill_by", "path"}``. A child is sent the signal
``kill_by`` after so many seconds, null lets it end. Answers with a line: for each its status (negative: the
signal) and both streams.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]


def import_all() -> None:
    """What a run imports, and the drawn images, so that a child is at work at once."""
    import lightning
    import matplotlib.backends.backend_svg
    import matplotlib.pyplot
    import torch
    import torchvision
    from hydra import compose, initialize_config_dir

    import driftlab.report.figures
    import driftlab.report.layers
    import train
    from driftlab.probes import every_probe
    from suite.data import load

    del lightning, matplotlib, torch, torchvision, driftlab, train
    for kind in (ROOT / "experiments").glob("*/__init__.py"):
        importlib.import_module(f"experiments.{kind.parent.name}")
    every_probe()
    load("shapes")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose("config", ["+experiment=control"])  # Hydra's plug-ins, and its grammar
    gc.freeze()  # what is there now no child looks through, and so copies, to collect it
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1, (
        "a fork copies one thread only"
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def fork(attempt: dict, out: int, err: int) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # one that comes early waits for the child's streams
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return pid
    status = 1  # as Python's own where an error is not caught
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)  # whoever started the tests may have these ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.environ.clear()
        os.environ.update(attempt["environment"])
        sys.path[:0] = [attempt["path"]] if attempt["path"] else []
        program = str(ROOT / attempt["program"])
        sys.argv[:] = [program, *attempt["arguments"]]
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as Python does
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int, until: float | None, kill_by: int) -> int:
    """Its status; at the time ``until`` it is sent the signal."""
    while until is not None and time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    if until is not None:
        os.kill(pid, kill_by)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def carry_out(attempts: list[dict]) -> list[dict]:
    began, started = time.monotonic(), []
    for attempt in attempts:
        printed = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 (read below)
        pid = fork(attempt, *(file.fileno() for file in printed))
        after = attempt["kill_after"]
        started.append((pid, printed, None if after is None else began + after, attempt["kill_by"]))
    # those that are killed first: while one is waited for, nobody kills another
    in_order = sorted(started, key=lambda s: s[2] or float("inf"))
    ends = {pid: wait(pid, until, kill_by) for pid, _, until, kill_by in in_order}
    answers = []
    for pid, printed, *_ in started:
        out, err = (_text(file) for file in printed)
        answers.append({"status": ends[pid], "out": out, "err": err})
    return answers


def _text(file: BinaryIO) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def serve(client: socket.socket) -> None:
    with client, client.makefile("rw") as lines:
        print(json.dumps("ready"), file=lines, flush=True)
        for line in lines:
            print(json.dumps(carry_out(json.loads(line))), file=lines, flush=True)


def main(place: str) -> None:
    """Listens at ``place`` until the last who connected has gone; a fork for each of them."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{place}.new")
    listening.listen()
    os.rename(f"{place}.new", place)  # who sees it may connect
    import_all()
    listening.settimeout(1)  # seconds between looks at who has gone
    serving: set[int] = set()
    while True:
        with suppress(TimeoutError):
            client, _ = listening.accept()
            if pid := os.fork():
                serving.add(pid)
                client.close()
            else:
                listening.close()
                serve(client)
                os._exit(0)
        gone = {pid for pid in serving if os.waitpid(pid, os.WNOHANG)[0]}
        serving -= gone
        if gone and not serving:
            os._exit(0)  # torch takes its time to end


if __name__ == "__main__":
    main(sys.argv[1])
