"""The CIFAR ResNet18: its size, its shapes, its names, its refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import ResNet18


def test_has_the_known_number_of_parameters():
    assert sum(p.numel() for p in ResNet18().parameters()) == 11_173_962


def test_logits_for_a_batch_of_one():
    assert ResNet18(width=4, classes=7)(torch.randn(1, 3, 32, 32)).shape == (1, 7)


def test_stages_halve_the_image_but_for_the_first():
    sizes = {}
    model = ResNet18(width=4)
    for name in ("layer1", "layer2", "layer3", "layer4"):
        hook = lambda module, inputs, output, name=name: sizes.update({name: tuple(output.shape[1:])})  # noqa: E731
        getattr(model, name).register_forward_hook(hook)
    model(torch.randn(2, 3, 32, 32))
    assert sizes == {"layer1": (4, 32, 32), "layer2": (8, 16, 16), "layer3": (16, 8, 8), "layer4": (32, 4, 4)}


def test_standard_names():
    names = set(ResNet18(width=4).state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "fc.bias"} <= names
    assert {"layer2.0.shortcut.0.weight", "layer2.0.shortcut.1.num_batches_tracked"} <= names
    assert not any(name.startswith(("layer1.0.shortcut", "layer2.1.shortcut")) for name in names)


def test_groups_every_3x3_conv_but_the_stem():
    convs = {n: m for n, m in ResNet18(width=8, groups=4).named_modules() if isinstance(m, nn.Conv2d)}
    plain = {name for name, conv in convs.items() if conv.groups == 1}
    assert plain == {"conv1", "layer2.0.shortcut.0", "layer3.0.shortcut.0", "layer4.0.shortcut.0"}
    assert {conv.groups for name, conv in convs.items() if name not in plain} == {4}


@pytest.mark.parametrize(("name", "kind"), [("relu", nn.ReLU), ("silu", nn.SiLU)])
def test_every_activation_is_a_module_of_its_own(name, kind):
    assert sum(isinstance(m, kind) for m in ResNet18(width=4, activation=name).modules()) == 17


@pytest.mark.parametrize(
    ("name", "pooled"),
    [
        ("max", lambda x: F.max_pool2d(x, 3, stride=2, padding=1)),
        ("average", lambda x: F.avg_pool2d(x, 3, stride=2, padding=1)),
    ],
)
def test_a_pool_stands_behind_the_stem_and_changes_no_weight(name, pooled):
    torch.manual_seed(0)
    model = ResNet18(width=4, pool=name)
    torch.manual_seed(0)
    plain = ResNet18(width=4)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in plain.state_dict().items())
    seen = {}
    model.layer1.register_forward_pre_hook(lambda module, inputs: seen.update(first=inputs[0]))
    plain.layer1.register_forward_pre_hook(lambda module, inputs: seen.update(plain=inputs[0]))
    images = torch.randn(2, 3, 32, 32)
    assert model(images).shape == plain(images).shape
    assert seen["first"].shape == (2, 4, 16, 16)
    assert torch.equal(seen["first"], pooled(seen["plain"]))


def test_shrunk_images_are_averaged_before_anything_else():
    torch.manual_seed(0)
    model = ResNet18(width=4, shrink=2)
    torch.manual_seed(0)
    plain = ResNet18(width=4)
    images = torch.randn(2, 3, 32, 32)
    halves = images.reshape(2, 3, 16, 2, 16, 2).mean((3, 5))
    assert torch.allclose(model(images), plain(halves), atol=1e-5)


def test_without_a_pool_there_is_no_module_more():
    assert len(dict(ResNet18(width=4, pool="max").named_modules())) == 1 + len(
        dict(ResNet18(width=4).named_modules())
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 6, "groups": 4}, "width=6 is not a multiple of groups=4; write a width such as 4"),
        ({"activation": "gelu"}, "activation='gelu' is not known; write one of relu, silu"),
        ({"pool": "min"}, "pool='min' is not known; write one of max, average, or None"),
        ({"classes": 0}, "width=64, classes=0, groups=1 must all be 1 or more"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        ResNet18(**options)
