"""Data sets by their names: numbered samples, a DataModule; order and augmentation by our seeds."""

import json

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from suite.command.errors import ConfigurationError
from suite.data.samples import SampleBatches
from suite.running.own_data import load_data
from tests.suite.refusing import assert_refused


def loaded(name: str, **given):
    name = name if name.startswith("_") else f".{name}"
    return load_data(OmegaConf.create({"data": {"_target_": f"tests.suite.own{name}", **given}}))


def batches(of, order: int = 0, augmentation: int = 0) -> SampleBatches:
    return SampleBatches(of, 8, order, augmentation, "cpu")


def rows(batch) -> torch.Tensor:
    return batch[0]["row"]


def test_a_batch_is_a_function_of_seeds_and_step():
    of = loaded("Rows")
    mine, other = batches(of), batches(of)
    forwards = [mine.batch(step) for step in range(7)]
    torch.randn(3)
    for step in reversed(range(7)):
        assert torch.equal(rows(other.batch(step)), rows(forwards[step]))
    assert not torch.equal(rows(batches(of, order=1).batch(0)), rows(forwards[0]))
    augmented = batches(of, augmentation=1).batch(0)
    assert torch.equal(augmented[1], forwards[0][1])
    assert not torch.equal(rows(augmented), rows(forwards[0]))


def test_an_epoch_holds_each_sample_once_and_is_augmented_anew():
    of = loaded("Rows", noise=0.0)
    own = batches(of)
    first = torch.cat([rows(own.batch(step)) for step in range(5)])
    assert sorted(first[:, 0].tolist()) == sorted(of.train.rows[:, 0].tolist())
    noisy = batches(loaded("Rows", noise=1.0))
    both = (torch.cat([rows(noisy.batch(5 * epoch + k)) for k in range(5)]) for epoch in range(2))
    one, two = (part[:, 0].sort().values for part in both)
    assert not torch.equal(one, two)


def test_the_random_state_is_left_as_it_was():
    own = batches(loaded("Rows"))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    own.batch(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_and_test_set_are_asked_for_by_name_or_split():
    of = loaded("Rows")
    assert (of.train.train, of.test.train, of.classes) == (True, False, ("a", "b", "c"))
    assert loaded("Rows", length=40, sha256=of.sha256).sha256 == of.sha256 != loaded("Rows", length=41).sha256
    split = loaded("one_set")
    assert (split.train_count, split.test_count, split.classes) == (20, 4, ("a", "b", "c"))
    module = loaded("_module.Module")
    assert (module.train_count, module.test_count) == (30, 12)
    sizes = [len(targets) for _, targets in batches(module).test_batches(None, 5)]
    assert sizes == [5, 5, 2]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Drifting", "gives other samples when it is asked again: draw what is random from the global state"),
        ("no_network", "holds 0 training and 0 test samples|no_network"),
        ("Net", "is a Net, whose order nobody rules: give a data set"),
    ],
)
def test_what_is_no_data_set_is_one_line(name, line):
    with pytest.raises(ConfigurationError, match=line):
        loaded(name)


def test_a_sampler_that_is_not_taken_is_said():
    said = []
    for name in ("Module", "Weighted"):
        load_data(OmegaConf.create({"data": {"_target_": f"tests.suite.own_module.{name}"}}), said.append)
    (line,) = said
    assert line.startswith("tests.suite.own_module.Weighted: its WeightedRandomSampler is not taken")


OWN = ("model._target_=tests.suite.own.OfRows", "rewrite.target=tests.suite.own.by_halves")


def test_a_network_of_named_inputs_is_judged_on_a_data_set_of_ones_own(train, tmp_path):
    asked = ["data._target_=tests.suite.own.Rows", "+data.length=36", "batch_size=8"]
    done = train("+experiment=split_conv", *OWN, *asked, "local.windows=[2]", "seed=1")
    assert (done.status, done.errors) == (0, [])
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["verdict"] == "round_off"
    (settings,) = tmp_path.rglob("experiment.yaml")
    kept = yaml.safe_load(settings.read_text())
    assert len(kept["data"].pop("sha256")) == 64
    assert kept["data"] == {"_target_": "tests.suite.own.Rows", "length": 36}
    (record,) = tmp_path.rglob("run.json")
    assert json.loads(record.read_text())["dataset"]["train_images"] == 36


REFUSED = {
    "a misspelt argument": ("+data.lenth=3", "data.lenth is no argument of Rows: did you mean length?"),
    "more than a batch": ("batch_size=1000", "batch_size=1000: give 1 to 40, the number of training samples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_leaves_nothing(train, tmp_path, case):
    override, line = REFUSED[case]
    done = train("+experiment=split_conv", "data._target_=tests.suite.own.Rows", *OWN, override)
    assert_refused(done, f"error: {line}", tmp_path)


def test_a_kind_that_looks_into_images_refuses_others(train):
    done = train("+experiment=kinks", "data._target_=tests.suite.own.Rows")
    assert "is no set of images in memory, which kind=kinks takes" in done.errors[0]
