"""The policy network: the code that was asked about, under its names, bit for bit; and row by row."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.policy_net import PolicyNet
from models.rewrites.row_by_row import row_by_row

torch.set_num_threads(1)


class ConvBlock(nn.Module):
    def __init__(self, n_input_channels, n_conv_filters):
        super().__init__()
        self.conv = nn.Conv2d(
            n_input_channels, n_conv_filters, kernel_size=3, stride=1, padding=1, bias=False
        )
        self.batch = nn.BatchNorm2d(n_conv_filters)

    def forward(self, x):
        return F.relu(self.batch(self.conv(x)))


class ResBlock(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.conv1 = nn.Conv2d(n, n, kernel_size=3, stride=1, padding=1, bias=False)
        self.batch1 = nn.BatchNorm2d(n)
        self.conv2 = nn.Conv2d(n, n, kernel_size=3, stride=1, padding=1, bias=False)
        self.batch2 = nn.BatchNorm2d(n)

    def forward(self, x):
        identity = x
        out = F.relu(self.batch1(self.conv1(x)))
        out = self.batch2(self.conv2(out))
        out += identity
        return F.relu(out)


class PolicyHead(nn.Module):
    def __init__(self, n_input_channels):
        super().__init__()
        self.conv = nn.Conv2d(n_input_channels, 2, kernel_size=1, stride=1, bias=False)
        self.batch = nn.BatchNorm2d(2)
        self.linear = nn.Linear(84, 7)

    def forward(self, x):
        return self.linear(F.relu(self.batch(self.conv(x))).view(-1, 84))


class Net(nn.Module):
    """As it stands in the thread."""

    def __init__(self, n_res_blocks=19, n_conv_filters=64):
        super().__init__()
        self.conv_block = ConvBlock(2, n_conv_filters)
        self.res_blocks = nn.ModuleList([ResBlock(n_conv_filters) for _ in range(n_res_blocks)])
        self.policy_head = PolicyHead(n_conv_filters)

    def forward(self, x):
        x = self.conv_block(x)
        for block in self.res_blocks:
            x = block(x)
        return (self.policy_head(x),)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("blocks", [0, 3])
def test_is_the_network_of_the_thread(blocks, mode):
    torch.manual_seed(0)
    theirs = Net(blocks)
    torch.manual_seed(0)
    ours = PolicyNet(blocks)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(t, ours.state_dict()[n]) for n, t in theirs.state_dict().items())
    x = torch.rand(5, 2, 7, 6)
    for network in (theirs, ours):
        network.train(mode == "train")
    assert torch.equal(theirs(x)[0], ours(x))


def test_has_all_its_parameters():
    assert sum(p.numel() for p in PolicyNet().parameters()) == sum(p.numel() for p in Net().parameters())


def test_identity_takes_the_place_of_every_norm_and_changes_no_weight():
    torch.manual_seed(0)
    plain = PolicyNet(2, norm="identity")
    assert not any(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    torch.manual_seed(0)
    convs = {n: p for n, p in PolicyNet(2).named_parameters() if "batch" not in n}
    assert all(torch.equal(p, convs[n]) for n, p in plain.named_parameters())


def test_other_sizes():
    network = PolicyNet(1, filters=3, planes=4, board=(5, 2), moves=6)
    assert network(torch.rand(2, 4, 5, 2)).shape == (2, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": -1}, "blocks=-1 must be 0 or more"),
        ({"filters": 0}, "filters=0, planes=2, .* must all be 1 or more"),
        ({"norm": "layer"}, "norm='layer' is not known; write one of batch, identity"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyNet(**options)


def test_row_by_row_gives_each_row_what_it_has_alone():
    network = PolicyNet(1, filters=4).eval()
    x = torch.rand(3, 2, 7, 6)
    rows = row_by_row(network)
    assert not rows.training
    assert torch.equal(rows(x), torch.cat([network(x[i : i + 1]) for i in range(3)]))


def test_row_by_row_keeps_the_mode_of_each_part():
    network = PolicyNet(1, filters=4).train()
    network.conv_block.batch.eval()
    assert row_by_row(network).training
    assert not network.conv_block.batch.training
    assert network.res_blocks[0].batch1.training


def test_row_by_row_folds_back_to_the_names_of_the_network():
    network = PolicyNet(0, filters=4)
    rows = row_by_row(network)
    assert rows.fold(dict(rows.named_parameters())).keys() == dict(network.named_parameters()).keys()
