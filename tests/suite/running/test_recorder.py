"""Picking up a run that was begun before a curve was declared."""

import pytest
import torch

from driftlab.record.seed_record import CURVES, RecordError, columns, read_table
from suite.running import recorder as module
from suite.running.recorder import TABLES, Recorder
from tests.driftlab.lockstep.test_lockstep import STEPS, batch, lockstep, run


class FewBatches:
    device, batch_size = torch.device("cpu"), 12

    def epoch(self, step):
        return 0

    def test_batches(self, images, size):
        return [batch(100)]


def recorder(steps, home):
    every = {"eval_every": 0, "eval_images": None, "checkpoint_every": 1e9}
    return Recorder(steps, FewBatches(), None, home, progress=lambda step, row: None, **every)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Stopped before step 3, when there was no accuracy."""
    with monkeypatch.context() as then:
        then.setattr(module, "TABLES", TABLES | {"curves.csv": CURVES[:-1]})
        recorder(run(lockstep(), stop=3), tmp_path).checkpoint(3)
    return tmp_path


def test_its_column_begins_where_the_run_goes_on(begun):
    resumed = recorder(lockstep(), begun)
    assert resumed.resume() == 3
    run(resumed.lockstep, start=3)
    resumed.write_tables()
    table = read_table(begun / "curves.csv")
    assert table.header == columns(CURVES, [arm.name for arm in resumed.lockstep.arms])
    assert list(table.series("accuracy/candidate.float32")) == list(range(3, STEPS + 1))
    whole = run(lockstep()).rows
    assert table.series("loss/candidate.float32") == {
        s: r["loss/candidate.float32"] for s, r in whole.items()
    }


def test_a_column_that_was_lost_is_damage(begun):
    path = begun / "curves.csv"
    lines = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match="not what the checkpoint says"):
        recorder(lockstep(), begun).resume()


def test_an_environment_of_which_less_was_recorded_is_no_other(begun, monkeypatch):
    """As an earlier driftlab wrote it; only what both know can differ."""
    here = module.environment(FewBatches.device)
    monkeypatch.setattr(module, "environment", lambda device: here | {"attention of later": "math"})
    resumed = recorder(lockstep(), begun)
    resumed.resume()
    assert len(resumed.parts) == 1
    monkeypatch.setattr(module, "environment", lambda device: here | {"threads": 77})
    resumed = recorder(lockstep(), begun)
    resumed.resume()
    assert [part["from"] for part in resumed.parts] == [0, 3]
