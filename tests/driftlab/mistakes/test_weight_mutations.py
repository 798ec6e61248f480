"""Other weights and buffers: frequencies of another base."""

import torch
from torch import nn

from driftlab.mistakes.weight_mutations import other_frequencies


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
