"""A file that fell: named, kept aside, done again to the same bits; never used, by training or by a judge."""

import json
import random
import shutil

import pytest

from tests.suite.faults.conftest import QUESTION, TRAINING, assert_same, folder_of

DICE = random.Random(20)


def other_digit(path):
    """One digit of the file, any one, becomes another."""
    data = bytearray(path.read_bytes())
    at = DICE.choice([i for i, byte in enumerate(data) if 48 <= byte <= 57])
    data[at] = DICE.choice([d for d in range(48, 58) if d != data[at]])
    path.write_bytes(data)


def flipped_bit(path):
    data = bytearray(path.read_bytes())
    data[DICE.randrange(len(data) // 2, len(data))] ^= 1 << DICE.randrange(8)
    path.write_bytes(data)


def flipped_bit_in_header(path):
    data = bytearray(path.read_bytes())
    at = data.index(b"next_step")
    data[at + DICE.randrange(40)] ^= 1
    path.write_bytes(data)


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: DICE.randrange(1, len(data) - 1)])


def without_a_row(path):
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[DICE.randrange(1, len(lines) - 1)]
    path.write_bytes(b"".join(lines))


def nul_bytes(path):
    data = bytearray(path.read_bytes())
    at = DICE.randrange(0, len(data) - 20)
    data[at : at + 20] = bytes(20)
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def gone(path):
    path.unlink()


def no_file(path):
    path.unlink()
    path.mkdir()


CURVES, EVALUATIONS, RUN = "curves.csv", "evaluations.csv", "run.json"
STATE = "checkpoint/state.safetensors"
# seed -> what falls in it: a seed each, so that one command meets them all
FINISHED = dict(
    enumerate(
        [
            *((RUN, damage) for damage in (other_digit, cut, nul_bytes, empty)),
            *((CURVES, damage) for damage in (other_digit, cut, without_a_row, nul_bytes, gone)),
            *((EVALUATIONS, damage) for damage in (other_digit, empty, no_file)),
        ]
    )
)
UNFINISHED = dict(
    enumerate(
        [
            *((STATE, damage) for damage in (cut, empty, flipped_bit, flipped_bit_in_header, nul_bytes)),
            *((CURVES, damage) for damage in (other_digit, cut, without_a_row, nul_bytes, gone)),
            *((EVALUATIONS, damage) for damage in (other_digit, no_file)),
        ]
    )
)
COMMAND = ["+experiment=precision", f"seed=0..{len(FINISHED) - 1}", *TRAINING]


@pytest.fixture(scope="module")
def undisturbed(forked, tmp_path_factory):
    results = tmp_path_factory.mktemp("undisturbed")
    assert forked.run(*COMMAND, f"results={results}").status == 0
    return results


def fallen(undisturbed, results, damages, finished):
    """A copy in which each seed fell in its own way."""
    shutil.copytree(undisturbed, results)
    folder = folder_of(results)
    for seed, (name, damage) in damages.items():
        home = folder / f"seed={seed}"
        before = (home / name).read_bytes()
        damage(home / name)
        assert not (home / name).is_file() or (home / name).read_bytes() != before
        if not finished:
            (home / "run.json").unlink()
    return folder


def kinds(damages):
    return {seed: f"{damage.__name__} {name}" for seed, (name, damage) in damages.items()}


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_every_fallen_seed_is_named_and_done_again(forked, undisturbed, tmp_path, finished):
    damages = FINISHED if finished else UNFINISHED
    results = tmp_path / "results"
    folder = fallen(undisturbed, results, damages, finished)
    fell = {s: (folder / f"seed={s}" / n) for s, (n, _) in damages.items()}
    fell = {s: p.read_bytes() if p.is_file() else None for s, p in fell.items()}
    ended = forked.run(*COMMAND, f"results={results}")
    assert ended.status == 0, ended.out
    for seed, what in kinds(damages).items():
        kept = folder / f"seed={seed}.damaged-1"
        name = damages[seed][0]
        # a last line that is cut off after the checkpoint's last row leaves what the checkpoint needs
        assert kept.exists(), what
        assert ended.says(f"{folder}/seed={seed}/{name} is "), what
        assert ended.says(f"kept as {kept.name}, and the seed is done again"), what
        assert fell[seed] is None or (kept / name).read_bytes() == fell[seed], what
        assert_same(folder_of(undisturbed) / f"seed={seed}", folder / f"seed={seed}", what)
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["seeds"] == sorted(damages)
    again = forked.run(*COMMAND, f"results={results}")
    assert not again.says("kept as")


@pytest.mark.slow
def test_a_judge_leaves_every_fallen_seed_out(forked, undisturbed, tmp_path):
    results = tmp_path / "results"
    damages = {s: d for s, d in FINISHED.items() if s}  # seed 0 stays sound
    folder = fallen(undisturbed, results, damages, finished=True)
    (folder / "verdict.json").unlink()
    ended = forked.run(results, program="scripts/judge.py")
    assert ended.status == 0, ended.out
    for seed, what in kinds(damages).items():
        assert ended.says(f"left out of the verdict: {folder}/seed={seed}/{damages[seed][0]} is "), what
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [0]


@pytest.mark.slow
def test_fallen_probes_are_not_gone_on_with(forked, tmp_path):
    command = ["+experiment=split_conv", "seed=0", *TRAINING, f"results={tmp_path}"]
    assert forked.run(*command).status == 0
    folder = folder_of(tmp_path)
    home = folder / "seed=0"
    whole = json.loads((home / "run.json").read_text())["probes"]
    (home / "run.json").unlink()
    other_digit(home / "probes.json")
    ended = forked.run(*command)
    assert ended.status == 0, ended.out
    assert ended.says(f"{home}/probes.json is damaged")
    assert ended.says("kept as seed=0.damaged-1")
    assert json.loads((home / "run.json").read_text())["probes"] == whole


MEASURED = {"measurements.json": [other_digit, cut, nul_bytes, gone], RUN: [other_digit], CURVES: [cut]}


@pytest.mark.slow
def test_fallen_measurements_are_measured_again(forked, tmp_path):
    damages = [(name, damage) for name, ds in MEASURED.items() for damage in ds]  # one a seed
    command = ["+experiment=gradient_check", f"seed=0..{len(damages)}", *QUESTION, f"results={tmp_path}"]
    assert forked.run(*command).status == 0
    folder = folder_of(tmp_path)
    measured = [folder / f"seed={seed}" / "measurements.json" for seed in range(len(damages))]
    whole = [json.loads(file.read_text()) for file in measured]
    for seed, (name, damage) in enumerate(damages):
        damage(folder / f"seed={seed}" / name)
    other = [*command[:1], f"seed={len(damages)}", *command[2:]]  # touches no other, and must use none
    ended = forked.run(*other)
    assert ended.status == 0, ended.out
    for seed, (name, _) in enumerate(damages):
        assert ended.says(f"left out of the verdict: {folder}/seed={seed}/{name} is ")
    ended = forked.run(*command)
    assert ended.status == 0, ended.out
    for seed in range(len(damages)):
        assert ended.says(f"kept as seed={seed}.damaged-1, and the seed is done again")
    assert [json.loads(file.read_text()) for file in measured] == whole
