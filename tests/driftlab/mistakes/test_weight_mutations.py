"""Other weights and buffers: frequencies of another base."""

import torch
from torch import nn

from driftlab.mistakes.weight_mutations import other_frequencies, other_modes, weight_mutations


class Rotary(nn.Module):
    def __init__(self, base, size, first=1.0):
        super().__init__()
        self.register_buffer("inv_freq", first * base ** -(torch.arange(size, dtype=torch.float64) / size))


def others(network):
    before, found = network.inv_freq.clone(), {}
    for _, words, change in other_frequencies(network):
        change(network)
        found[words] = network.inv_freq.clone()
        network.inv_freq.copy_(before)
    return found


def test_frequencies_of_another_base_and_one_further_on_are_among_those_that_are_tried():
    found = others(Rotary(1e4, 6))
    for wanted in (Rotary(5e5, 6), Rotary(100.0, 6), Rotary(1e4, 6, first=1e4 ** (-1 / 6))):
        assert any(torch.allclose(wanted.inv_freq, one, rtol=1e-9) for one in found.values())


def test_what_is_no_geometric_row_is_left_alone():
    network = Rotary(1e4, 6)
    network.inv_freq.copy_(torch.linspace(1, 0.1, 6))
    assert not others(network)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(3))

    def noise(self):
        return self.p if self.training else 0 * self.p

    def forward(self, x):
        return x + self.noise()


def test_one_module_alone_is_in_the_other_mode_while_it_is_called():
    network = nn.Sequential(nn.Dropout(0.0), Noisy(), nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    found = {owner: change for owner, _, change in other_modes(network)}
    assert [*found] == ["1", "3"]
    found["1"](network)
    assert torch.equal(network[:2](torch.zeros(2, 3)), torch.ones(2, 3))
    assert not any(module.training for module in network.modules())


def test_a_mask_turned_over():
    network = nn.Module()
    network.register_buffer("mask", torch.tensor([1.0, 0.0, 0.0]))
    network.register_buffer("ones", torch.ones(3))
    found = {words: change for _, words, change in weight_mutations(network, {}) if "turned over" in words}
    assert [*found] == ["`mask` turned over"]
    found["`mask` turned over"](network)
    assert torch.equal(network.mask, torch.tensor([0.0, 1.0, 1.0]))
