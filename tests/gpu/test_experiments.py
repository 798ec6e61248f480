"""Every kind of experiment, small enough for a pretended GPU; its parent process stays off the GPU."""

import pytest
import torch

from suite.command.command_line import kind
from suite.command.configuration import composed
from suite.running import asking
from tests.suite.conftest import ROOT

QUICK = "scale=smoke data=shapes logger=none workers=2 threads=1 device=cuda probe_images=2 eval_images=4"
STEPS = ["batch_size=4", "steps=2", "float64_steps=2"]
SMALL = "model._target_=tests.networks.one_block"
OF_KIND = {
    "training": ["split_conv", SMALL, *STEPS],
    "batch_size": [
        *("batch_size", "case={blocks: 1, filters: 4, planes: 2, board: [7, 6], moves: 7}"),
        *("sweep={up_to: 3, above: [4], few: [2, 3]}", "layers.batch=3", "statistics.batches=1"),
        *("cost={batches: [1, 2], chunks: [2], repeats: 1}", "suite.rows=2", "suite.steps=1"),
    ],
    "edge_of_stability": ["edge_of_stability", SMALL, *STEPS],
    "gradient_check": ["gradient_check", "faults=false", "case.points=4", "curve={points: 2, decades: 3}"],
    "group_semantics": ["group_semantics", "sweep.cases=1", "training.updates=2"],
    "kinks": ["kinks", SMALL, *STEPS, "networks=[{activation: relu, pool: max}]"],
    "loss_curves_do_not_tell": [
        *("loss_curves_do_not_tell", "model._target_=tests.networks.faulty_layers"),
        *(*STEPS, "diagnosis_steps=1"),
    ],
    "one_bit": ["one_bit", SMALL, "batch_size=4", "steps=2", "warmup_steps=1", "window.steps=1"],
    "split_gradient": ["split_gradient", "window.steps=1"],
}
# where so few steps do not reach what the experiment expects, on the CPU neither
OTHERWISE = {"kinks": "inconclusive"}


def settings_of(results, name, *overrides):
    return composed(f"+experiment={name}", *QUICK.split(), *overrides, f"results={results}")


def test_no_kind_is_left_out():
    assert set(OF_KIND) == {p.parent.name for p in (ROOT / "experiments").glob("*/__init__.py")}


class WorkersBeginError(Exception):
    """Instead of the workers."""


@pytest.mark.parametrize("of_kind", [k for k in OF_KIND if k != "training"])
def test_what_starts_the_workers_stays_off_the_gpu(tmp_path, cuda, monkeypatch, of_kind):
    def begin(experiment, todo, measure):
        assert todo == [0]
        raise WorkersBeginError

    monkeypatch.setattr(asking, "carry_out", begin)
    settings = settings_of(tmp_path, *OF_KIND[of_kind])
    with pytest.raises(WorkersBeginError):
        kind(settings.kind).run(settings)
    assert not torch.cuda.is_initialized()
