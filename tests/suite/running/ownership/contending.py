"""Processes that contend for a place, for the tests: each runs one of these functions."""

import ctypes
import fcntl
import os
import random
import socket
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from suite.running.ownership import OwnershipLost, owned_by_me

NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS of <linux/sched.h>
PRIMITIVES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.utime", "open"}


def hold(place: Path, pipe: Connection, **options) -> None:
    """Own the place; then do what is asked, one word at a time, until told to leave or to raise."""
    try:
        with owned_by_me(place, waiting=lambda: pipe.send("waiting"), **options) as owner:
            pipe.send("inside" if owner else "none")
            while owner and (word := pipe.recv()) != "leave":
                if word == "check":
                    pipe.send(_checked(owner))
                if word == "interrupt":
                    raise KeyboardInterrupt
                if word == "exit":
                    sys.exit(0)
                if word == "fork":
                    pipe.send(_in_a_fork(owner))
    except KeyboardInterrupt:
        pass
    pipe.send("left")


def _checked(owner) -> str:
    try:
        owner.check()
    except OwnershipLost as error:
        return f"lost: {error}"
    except OSError as error:
        return f"unreachable: {error}"
    return "owned"


def _in_a_fork(owner) -> str:
    """What a fork of the owner is told; it then leaves the ``with``, as any that ends does."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, _checked(owner).encode())
        os.close(writing)
        raise KeyboardInterrupt
    os.close(writing)
    os.wait()
    with os.fdopen(reading) as answers:
        return answers.read()


def count(place: Path, rounds: int, seed: int, **options) -> None:
    """Again and again own the place, and inside it count up, in two steps with a pause between them."""
    dice = random.Random(seed)
    for _ in range(rounds):
        with owned_by_me(place, **options) as owner, open(place.parent / "inside", "a") as inside:
            try:
                fcntl.flock(
                    inside, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # the kernel's word, given back by the dead
            except BlockingIOError:
                (place.parent / f"two-at-once.{os.getpid()}").touch()
            counter = place.parent / "counter"
            counted = int(counter.read_text()) if counter.exists() else 0
            time.sleep(dice.random() * 0.002)
            written = place.parent / f"counter.{os.getpid()}"
            written.write_text(str(counted + 1))
            owner.check()
            written.replace(counter)


def become_a_stranger() -> None:
    """To the others, a process on another machine: one that bears another name. Only root may."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_HOST_NAME):
        raise PermissionError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"host-{os.getpid()}")


def step_by_step(pipe: Connection, stranger: bool) -> None:
    """Own one place after another, and wait for leave before each step on the file system."""
    if stranger:
        become_a_stranger()
    watched = None

    def before(event: str, arguments: tuple) -> None:
        if event in PRIMITIVES and watched and str(arguments[0]).startswith(watched):
            pipe.send(event)
            pipe.recv()

    sys.addaudithook(before)
    with suppress(EOFError):
        while True:
            place, wait = pipe.recv()
            watched = str(place.parent)
            # the first heartbeat comes after the end
            with owned_by_me(place, wait=wait, poll=1e-6, heartbeat=1000.0, patience=5000.0) as owner:
                pipe.send("inside" if owner else "none")
                pipe.recv()
            watched = None
            pipe.send("outside")
