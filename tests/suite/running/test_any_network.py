"""Networks by their names: torchvision's and one's own, what each takes, and what is refused."""

import json

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from suite.command.errors import ConfigurationError
from suite.data import load
from suite.running.importing import class_count
from suite.running.networks import build_reference
from tests.suite import own


@pytest.fixture(scope="module")
def shapes():
    return load("shapes")


def built(images, **model):
    return build_reference(OmegaConf.create({"model": model}), images, 0)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_torchvisions_networks_take_small_images_and_have_as_many_classes_as_the_data(shapes, name):
    network = built(shapes, _target_=f"torchvision.models.{name}").eval()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_number_of_classes_goes_in_by_its_name_or_not_at_all(shapes):
    assert class_count(own.Net) == "n_classes"
    assert class_count(own.Pixels) is None
    assert built(shapes, _target_="tests.suite.own.Net").fc.out_features == 10
    assert built(shapes, _target_="tests.suite.own.Pixels").fc.out_features == 12
    assert built(shapes, _target_="tests.suite.own.any_keyword", length=7).fc.out_features == 7


def test_a_network_is_a_function_of_its_seed(shapes):
    one, same = (built(shapes, _target_="tests.suite.own.any_keyword") for _ in range(2))
    assert torch.equal(one.fc.weight, same.fc.weight)


def test_what_is_no_network_is_one_line(shapes):
    with pytest.raises(ConfigurationError, match="no_network made a dict: name a class of networks"):
        built(shapes, _target_="tests.suite.own.no_network")


def test_a_misspelt_argument_that_is_handed_on_has_its_nearest_name(shapes):
    with pytest.raises(ConfigurationError, match="did you mean zero_init_residual"):
        built(shapes, _target_="torchvision.models.resnet18", zero_init_residul=True)


def shown(done) -> dict:
    assert (done.status, done.err) == (0, "")
    return yaml.safe_load(done.out)


SHOW = ("--cfg", "job", "--resolve")


def test_the_arguments_of_the_files_fall_away(train):
    own_ones = [
        "model._target_=tests.suite.own.Net",
        "+model.hidden=3",
        "optimizer._target_=torch.optim.Adam",
    ]
    found = shown(train("+experiment=grouped_conv", *own_ones, "optimizer.lr=0.5", *SHOW))
    assert found["model"] == {"_target_": "tests.suite.own.Net", "hidden": 3}
    assert found["optimizer"] == {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.5}


def test_arguments_that_refer_to_a_size_of_the_experiment_fall_away(train):
    found = shown(train("+experiment=one_bit", "model._target_=tests.suite.own.Net", *SHOW))
    assert found["model"] == {"_target_": "tests.suite.own.Net"}


def test_what_the_same_target_is_given_stays(train):
    found = shown(train("+experiment=grouped_conv", "model._target_=models.resnet.ResNet18", *SHOW))
    assert found["model"]["groups"] == 2


def test_an_own_network_is_trained_and_its_file_is_part_of_the_experiment(train, tmp_path):
    asked = [
        "model._target_=tests.suite.own.Net",
        "roles=[reference,control]",
        "subject=control",
        "dtypes=[float32]",
    ]
    assert train("+experiment=control", *asked).status == 0
    (file,) = tmp_path.rglob("experiment.yaml")
    assert len(yaml.safe_load(file.read_text())["sources"]["model"]) == 12
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["verdict"]


def test_a_misspelt_argument_has_its_nearest_name(train):
    done = train("+experiment=control", "model._target_=tests.suite.own.Net", "+model.hiden=3")
    assert done.errors == ["error: model.hiden is no argument of Net: did you mean hidden?"]
