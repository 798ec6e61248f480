"""Killed at random moments of its whole life, a sweep ends as one that was never killed.

Twelve a run, with other dice each time; ``KILLS=1000 pytest …`` for more.
"""

import os
import random
import time

import pytest

from driftlab.record.seed_record import finished_seeds
from tests.suite.faults.conftest import QUESTION, TRAINING, assert_same
from tests.suite.programs import attempt

SWEEP = [
    ["+experiment=split_conv", "seed=0", *TRAINING],
    ["-m", "+experiment=precision,control", "seed=0..1", *TRAINING],
    ["+experiment=gradient_check", "seed=0..1", *QUESTION],
]
KILLS = int(os.environ.get("KILLS", 12))
JUDGED_EVERY = 6  # kills, beside a run


def seeds_of(results):
    """(experiment, digest, seed) of what has finished."""
    files = results.glob("*/*/experiment.yaml")
    return {(f.parent.relative_to(results), s) for f in files for s in finished_seeds(f.parent)}


def assert_finished_are_whole(undisturbed, results, said):
    for folder, seed in seeds_of(results):
        name = f"seed={seed}"
        assert_same(undisturbed / folder / name, results / folder / name, said)


@pytest.mark.slow
@pytest.mark.long
def test_kills_lose_nothing(forked, tmp_path):
    number = int(os.environ.get("DICE") or random.SystemRandom().randrange(10**6))
    dice, said = random.Random(number), f"(repeat with DICE={number})"
    undisturbed, seconds = tmp_path / "undisturbed", []
    for command in SWEEP:
        began = time.monotonic()
        assert forked.run(*command, f"results={undisturbed}").status == 0
        seconds.append(time.monotonic() - began)
    kills, rounds, open_commands = 0, 0, []
    while kills < KILLS:
        if not open_commands:  # every command survived: the next round starts from nothing
            rounds, open_commands = rounds + 1, list(zip(SWEEP, seconds, strict=True))
        results = tmp_path / f"round-{rounds}"
        chosen = dice.choice(open_commands)
        # memoryless, so that a kill is as likely at any moment of a life, and any stage can be survived
        attempts = [attempt(*chosen[0], f"results={results}", kill_after=dice.expovariate(4 / chosen[1]))]
        if kills % JUDGED_EVERY == 0 and seeds_of(results):
            attempts.append(attempt(results, program="scripts/judge.py"))
        ended, *judged = forked.together(*attempts)
        assert ended.status in (0, -9), f"{said}\n{ended.out}"
        for judge in judged:
            assert judge.status == 0, f"{said}\n{judge.out}"
            assert "left out" not in judge.out, f"{said}\n{judge.out}"
        kills += ended.status == -9
        if ended.status == 0:
            open_commands.remove(chosen)
        assert_finished_are_whole(undisturbed, results, said)
    for command, _ in open_commands:
        assert forked.run(*command, f"results={tmp_path / f'round-{rounds}'}").status == 0, said
    expected = seeds_of(undisturbed)
    for results in (tmp_path / f"round-{n + 1}" for n in range(rounds)):
        assert seeds_of(results) == expected, said
        assert_finished_are_whole(undisturbed, results, said)
        left = [p.name for p in results.rglob("*") if ".damaged" in p.name]
        left += [p.name for p in results.rglob("seed=*/**/.*.part")]
        assert not left, said
