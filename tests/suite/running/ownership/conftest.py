"""Contenders for a place, each a process of its own that does what it is asked."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tests.suite.running.ownership import contending

QUICK = {"poll": 0.01, "heartbeat": 0.1, "patience": 1.0}

processes = multiprocessing.get_context("fork")  # cheap: a contender is there in a few milliseconds


class Contender:
    """A process that holds a place, or wants to."""

    def __init__(self, place: Path, **options):
        self.pipe, far = processes.Pipe()
        self.process = processes.Process(target=contending.hold, args=[place, far], kwargs=QUICK | options)
        self.process.start()
        far.close()

    def says(self) -> str:
        assert self.pipe.poll(60), "nothing was said"
        return self.pipe.recv()

    def asked(self, word: str) -> str:
        self.pipe.send(word)
        return self.says()

    def signalled(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()


@pytest.fixture
def contender(tmp_path):
    """Start one; all are ended with the test."""
    started = []

    def start(place: Path | None = None, **options) -> Contender:
        started.append(Contender(place or tmp_path / ".seed=3.owner", **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.join()


@pytest.fixture
def place(tmp_path):
    return tmp_path / ".seed=3.owner"


def token_of(place: Path) -> Path:
    (token,) = place.iterdir()
    return token
