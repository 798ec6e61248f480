"""Two versions of driftlab, or two machines, on one folder."""

import json

import pytest

from driftlab.record.seed_record import write_sealed
from tests.suite.faults.conftest import TRAINING, assert_same, folder_of

COMMAND = ["+experiment=precision", "seed=0", *TRAINING]


@pytest.fixture
def other_version(tmp_path):
    """What has to stand first in ``sys.path`` for driftlab to be another version."""

    def make(number):
        about = tmp_path / number / f"driftlab-{number}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: driftlab\nVersion: {number}\n")
        return str(about.parent)

    return make


@pytest.fixture
def ran(forked, tmp_path):
    """Run the command into one folder."""

    def run(*more, path=None, program="train.py"):
        return forked.run(*COMMAND, *more, f"results={tmp_path / 'results'}", path=path)

    return run


@pytest.mark.slow
def test_a_checkpoint_of_another_version_is_set_aside(ran, other_version, tmp_path):
    assert ran(path=other_version("0.0.9")).status == 0
    folder = folder_of(tmp_path / "results")
    home = folder / "seed=0"
    theirs = json.loads((home / "run.json").read_text())
    assert theirs["environment"]["versions"]["driftlab"] == "0.0.9"
    (home / "run.json").unlink()
    ended = ran()
    assert ended.status == 0, ended.out
    assert ended.says(f"{home}/checkpoint/state.safetensors was written by driftlab 0.0.9, not by ")
    assert ended.says("kept as seed=0.of-0.0.9-1, and the seed is done again")
    assert not ended.says("damaged")
    kept = folder / "seed=0.of-0.0.9-1"
    assert (kept / "checkpoint" / "state.safetensors").exists()
    assert not (kept / "run.json").exists()
    assert (home / "run.json").exists()
    assert_same(kept, home)  # of the same code, with another number


@pytest.mark.slow
def test_finished_seeds_of_another_version_are_judged_with_the_others(forked, ran, other_version, tmp_path):
    assert ran("seed=0..1", path=other_version("0.0.9")).status == 0
    folder = folder_of(tmp_path / "results")
    before = (folder / "seed=0" / "run.json").read_bytes()
    ended = ran("seed=0..2")
    assert ended.status == 0, ended.out
    assert (folder / "seed=0" / "run.json").read_bytes() == before
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [0, 1, 2]


@pytest.mark.slow
def test_a_seed_finished_in_another_schema_is_neither_used_nor_replaced(forked, ran, tmp_path):
    assert ran("seed=0..1").status == 0
    folder = folder_of(tmp_path / "results")
    file = folder / "seed=0" / "run.json"
    run = {k: v for k, v in json.loads(file.read_text()).items() if k != "seal"}
    run["environment"]["versions"]["driftlab"] = "9.1"
    write_sealed(file, run | {"schema": 9})
    before = file.read_bytes()
    ended = ran()
    assert ended.status == 2, ended.out
    assert len(ended.errors) == 1
    assert f"{file} was written by driftlab 9.1 (schema 9), which driftlab" in ended.errors[0]
    assert "use that one, or write results=FOLDER" in ended.errors[0]
    assert file.read_bytes() == before
    assert not list(folder.glob("seed=0.*"))
    ended = forked.run(folder, program="scripts/judge.py")
    assert ended.status == 0, ended.out
    assert ended.says(f"left out of the verdict: {file} was written by driftlab 9.1")
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [1]


@pytest.mark.slow
def test_a_schema_that_is_only_damaged_is_done_again(ran, tmp_path):
    assert ran().status == 0
    file = folder_of(tmp_path / "results") / "seed=0" / "run.json"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 7'))
    ended = ran()
    assert ended.status == 0, ended.out
    assert ended.says("kept as seed=0.damaged-1")


def interrupted(home, threads):
    """As if it had been killed after its last checkpoint."""
    run = json.loads((home / "run.json").read_text())
    assert run["environment"]["threads"] == threads
    (home / "run.json").unlink()


@pytest.mark.slow
def test_a_checkpoint_of_another_machine_goes_on_and_the_record_says_so(forked, tmp_path):
    """The threads stand for whatever differs: they are not part of the digest either."""
    results = tmp_path / "results"

    def run(threads):
        return forked.run(*COMMAND, f"threads={threads}", f"results={results}")

    assert run(1).status == 0
    home = folder_of(results) / "seed=0"
    assert json.loads((home / "run.json").read_text())["resumed"] == []
    interrupted(home, 1)
    ended = run(2)
    assert ended.status == 0, ended.out
    assert ended.says("seed 0 goes on from step 8 in another environment (threads 2, was 1)")
    record = json.loads((home / "run.json").read_text())
    assert record["environment"]["threads"] == 2
    (part,) = record["resumed"]
    assert (part["from"], part["step"], part["environment"]["threads"]) == (0, 8, 1)
    assert part["environment"] == record["environment"] | {"threads": 1}
