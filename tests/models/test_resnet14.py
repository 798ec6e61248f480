"""The CIFAR ResNet14: its size, its shapes, its start, what never learns, its refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.resnet14 import PaddedShortcut, PlainBlock, ResNet14


def trained(model, steps=5):
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for _ in range(steps):
        images = torch.randn(8, 3, 32, 32, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images), torch.randint(0, 10, (8,), generator=generator)).backward()
        optimizer.step()
    return model


def test_has_the_parameters_of_the_published_code():
    """Counted from its definition: 13 convs without bias, 13 norms and two in shortcuts, a linear layer."""
    widths = [16, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64]  # output channels of the convs
    inputs = [3, 16, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64]
    convs = sum(9 * i * o for i, o in zip(inputs, widths, strict=True))
    norms = 2 * (sum(widths) + 16 + 32)
    assert sum(p.numel() for p in ResNet14().parameters()) == convs + norms + 65 * 10 == 172_602


def test_stages_halve_the_image_but_for_the_first():
    sizes = {}
    model = ResNet14(width=4, classes=7)
    for name in ("layer1", "layer2", "layer3"):
        hook = lambda module, inputs, output, name=name: sizes.update({name: tuple(output.shape[1:])})  # noqa: E731
        getattr(model, name).register_forward_hook(hook)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert sizes == {"layer1": (4, 32, 32), "layer2": (8, 16, 16), "layer3": (16, 8, 8)}


def test_the_shortcut_is_a_pool_of_one_pixel_a_norm_and_zeros():
    shortcut, x = PaddedShortcut(3).eval(), torch.randn(2, 3, 8, 8)
    shortcut.bn.running_mean.uniform_()
    kept = shortcut.bn(nn.AvgPool2d(1, stride=2)(x))
    found = shortcut(x)
    torch.testing.assert_close(found[:, :3], kept)
    assert found.shape == (2, 6, 4, 4)
    assert not found[:, 3:].any()


def test_a_block_starts_as_its_shortcut():
    x = torch.randn(2, 4, 8, 8).relu()
    assert torch.equal(ResNet14(width=4).layer1[0](x), x)
    assert not torch.equal(ResNet14(width=4, zero_scale=False).layer1[0](x), x)


def test_with_the_scales_at_0_the_added_channels_never_learn():
    for zero_scale in (True, False):
        model = trained(ResNet14(width=4, zero_scale=zero_scale))
        for stage, alive in ((model.layer2, 8), (model.layer3, 16)):
            for block in stage:
                moved = block.bn2.weight.ne(0).sum().item()
                assert moved == (4 if zero_scale else alive)


def test_convs_start_as_normal_numbers_of_their_fan_out():
    torch.manual_seed(0)
    weight = ResNet14(width=64).layer3[1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.01)


def test_every_activation_is_a_module_of_its_own():
    assert sum(isinstance(m, nn.ReLU) for m in ResNet14(width=4).modules()) == 13
    assert sum(isinstance(m, PlainBlock) for m in ResNet14(width=4).modules()) == 6


@pytest.mark.parametrize("options", [{"width": 0}, {"classes": 0}])
def test_refuses(options):
    with pytest.raises(ValueError, match="must both be 1 or more"):
        ResNet14(**options)
