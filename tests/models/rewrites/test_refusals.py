"""What the rewrites refuse, and that they say so in one line."""

import pytest
from torch import nn
from torch.nn.utils import parametrizations, prune

from models import ResNet18
from models.rewrites.grouped_conv import as_grouped, separate_groups
from models.rewrites.planted_bug import split_without_input_gradient
from models.rewrites.split_conv import split_conv
from models.rewrites.swap import RewriteError


def sequential(**options):
    return nn.Sequential(nn.ReLU(), nn.Conv2d(6, 6, 3, **options))


def pruned():
    model = sequential()
    prune.l1_unstructured(model[1], "weight", amount=1)
    return model


def hooked():
    model = sequential()
    model[1].register_forward_hook(lambda module, inputs, output: output)
    return model


def tied():
    model = nn.Sequential(nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3))
    model[1].weight = model[0].weight
    return model


def fold_in_the_way():
    model = nn.Sequential(nn.Conv2d(1, 2, 1))
    model.fold = nn.Fold(2, 1)
    return model


REFUSALS = [
    (
        lambda: split_conv(sequential(), match="1x"),
        "match='1x' names no nn.Conv2d; the model has, for example, 1$",
    ),
    (lambda: split_conv(ResNet18(width=4), match="layer1.0.conv3"), "example, layer1.0.conv[12], layer1"),
    (lambda: split_conv(sequential(), match=[]), r"match=\[\] names no conv"),
    (lambda: split_conv(nn.Linear(2, 2)), r"the model \(Linear\) has no nn.Conv2d"),
    (lambda: split_conv(sequential(), dim="both"), "dim='both' is neither 'out' nor 'in'"),
    (lambda: split_conv(sequential(), parts=0), "parts=0 must be a whole number, 1 or more"),
    (
        lambda: split_conv(sequential(), parts=7),
        "1 has 6 output channels, too few for parts=7; write parts=6 or",
    ),
    (
        lambda: split_conv(sequential(groups=3), dim="in", parts=3),
        "1 has 2 input channels per group, too few",
    ),
    (
        lambda: split_conv(sequential(), sizes=[2, 3]),
        r"1 has 6 output channels, which sizes=\[2, 3\] do not add up",
    ),
    (
        lambda: split_conv(sequential(), sizes=[6, -1]),
        r"1 has 6 output channels, which sizes=\[6, -1\] do not add",
    ),
    (lambda: split_conv(sequential(), sizes=[0, 6]), r"sizes=\[0, 6\] must be whole numbers of 1 or more"),
    (lambda: split_conv(sequential(), sizes=[-2, 8]), r"sizes=\[-2, 8\] must be whole numbers of 1 or more"),
    (lambda: split_conv(sequential(), sizes=[-1, -1, 2]), "at most one -1 for the rest"),
    (lambda: split_conv(sequential(groups=3)), r"1 has 3 groups of 2 output channels.* sizes=\[4, 2\]$"),
    (
        lambda: separate_groups(sequential()),
        "separate_groups: 1 has groups=1; match a conv with 2 groups or more",
    ),
    (
        lambda: as_grouped(sequential(), groups=4),
        r"1 has 6 .* groups=4 does not divide; write one of \[1, 2, 3, 6\]",
    ),
    (lambda: as_grouped(sequential(), groups=0), "as_grouped: groups=0 must be a whole number, 1 or more"),
    (lambda: split_without_input_gradient(nn.Conv2d(3, 1, 1)), "the model itself has 1 output channel"),
    (
        lambda: split_conv(parametrizations.weight_norm(nn.Conv2d(2, 2, 1)), match="*"),
        "itself is a Parametrized",
    ),
    (
        lambda: split_conv(nn.Sequential(nn.LazyConv2d(2, 1))),
        "0 is a LazyConv2d, whose own behaviour would be lost",
    ),
    (lambda: split_conv(pruned()), "1 computes its weight from weight_orig, weight_mask"),
    (lambda: split_conv(hooked(), match="1"), "1 has forward hooks, which would be lost"),
    (lambda: split_conv(tied(), match="0"), "0 shares its weight with 1, and the two would come apart"),
    (
        lambda: split_conv(fold_in_the_way()),
        "submodule 'fold' stands where a rewrite leaves its map; rename it",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_refuses_in_one_line(call, message):
    with pytest.raises(RewriteError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_refused_model_is_unchanged():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1))
    with pytest.raises(RewriteError):
        split_conv(model, match="*")
    assert [type(module) for module in model] == [nn.Conv2d, nn.Conv2d]
    assert not hasattr(model, "fold")
