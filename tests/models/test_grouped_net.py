"""The network whose grouped convs were asked about: sizes, names, refusals; its interleaved rewrite."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.grouped_net import GroupedNet, pooled_size
from models.rewrites.interleave_groups import interleave_groups
from models.rewrites.swap import RewriteError

THIN = {"tile": (53, 35), "channels": (4, 8, 8, 8, 8), "features": (5, 6)}
STATE = {
    "conv.conv1_s1": (96, 3, 25, 7),
    "conv.conv2_s1": (192, 48, 3, 3),
    "conv.conv3_s1": (256, 192, 3, 3),
    "conv.conv4_s1": (256, 128, 3, 3),
    "conv.conv5_s1": (192, 128, 3, 3),
    "fc6.fc6_s1": (512, 6336),
    "fc7.fc7": (256, 2048),
    "classifier.fc8": (24, 256),
}


def test_has_the_state_dict_that_was_asked_about():
    with torch.device("meta"):
        state = GroupedNet().state_dict()
    wanted = {f"{n}.weight": s for n, s in STATE.items()} | {f"{n}.bias": s[:1] for n, s in STATE.items()}
    assert {name: tuple(t.shape) for name, t in state.items()} == wanted
    assert sum(t.numel() for t in state.values()) == 4_868_056


def test_scores_of_literal_puzzles():
    with torch.device("meta"):
        assert GroupedNet()(torch.empty(2, 4, 3, 213, 67)).shape == (2, 24)
    assert pooled_size((213, 67)) == (11, 3)


@settings(max_examples=15, deadline=None)
@given(st.integers(53, 120), st.integers(35, 80))
def test_pooled_size_is_what_the_layers_leave(height, width):
    net = GroupedNet(tile=(height, width), channels=(1, 1, 1, 1, 1), features=(1, 1), groups=1)
    left = net.through(torch.zeros(1, 3, height, width), net.conv)
    assert tuple(left.shape[2:]) == pooled_size((height, width))


def test_each_puzzle_is_scored_by_itself_and_the_order_of_its_tiles_counts():
    torch.manual_seed(1)  # of one in twelve so thin networks, as of 0, all units of a layer are dead
    net, puzzles = GroupedNet(**THIN).double(), torch.randn(3, 4, 3, 53, 35).double()
    scores = net(puzzles)
    assert torch.allclose(scores[1:2], net(puzzles[1:2]))
    assert not torch.allclose(scores, net(puzzles.flip(1)))


def test_groups_are_those_of_the_second_fourth_and_fifth_conv():
    net = GroupedNet(groups=4, **THIN)
    assert [conv.groups for conv in net.conv.values()] == [1, 4, 1, 4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, r"groups=3 does not divide .*channels=\[96, 192, 255, 255, 192\]"),
        ({"tile": (52, 67)}, r"nothing is left of tile=\[52, 67\]"),
        ({"features": (0, 1)}, "must all be 1 or more"),
        ({"channels": (96, 192)}, "must be two, five and two numbers"),
        ({"tile": (213,)}, "must be two, five and two numbers"),
    ],
)
def test_refuses(options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        GroupedNet(**options)


def test_interleaved_groups_read_every_gth_channel():
    conv = nn.Conv2d(12, 6, 3, padding=1, groups=3).double()
    x = torch.randn(2, 12, 5, 4).double()
    parts = [
        F.conv2d(x[:, g::3], conv.weight[2 * g : 2 * g + 2], conv.bias[2 * g : 2 * g + 2], padding=1)
        for g in range(3)
    ]
    rewritten = interleave_groups(conv)
    assert torch.allclose(rewritten(x), torch.cat(parts, 1))
    assert torch.allclose(rewritten(x[0]), torch.cat(parts, 1)[0])
    assert not torch.allclose(rewritten(x), conv(x))


def test_interleaving_keeps_the_weights_and_refuses_a_plain_conv():
    net = GroupedNet(**THIN)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    rewritten = interleave_groups(net)
    folded = rewritten.fold(rewritten.state_dict())
    assert all(torch.equal(folded[name], tensor) for name, tensor in before.items())
    with pytest.raises(RewriteError, match="has groups=1"):
        interleave_groups(nn.Conv2d(4, 4, 1), match="*")
