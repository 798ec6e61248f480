"""Where a difference arises, where the two networks have other names and another structure."""

import copy

import pytest
import torch
from torch import nn

from driftlab import Verdict, assert_equivalent, diagnose
from tests.driftlab.ported import batches, port, reference

torch.set_num_threads(1)


def test_a_right_port_is_right():
    old = reference()
    assert_equivalent(old, port(old), batches()[0][0])


@pytest.mark.parametrize(
    ("fault", "at", "module", "pass_", "candidate"),
    [
        ("scale", 1, "h.1.attn", "forward", "layers.1"),
        ("order", 0, "h.0.attn", "forward", "layers.0"),
        ("gelu", 1, "h.1.mlp.act", "forward", "layers.1"),
        ("epsilon", 0, "h.0.ln_1", "forward", "layers.0.first"),
        ("factor", 0, "h.0", "forward", "layers.0"),
        ("detached", 1, "h.1.attn", "input gradient", "layers.1"),
        ("embedding", 0, "", "forward", ""),
    ],
)
def test_a_fault_in_a_port_has_its_place_in_both_networks(fault, at, module, pass_, candidate):
    old = reference()
    found = diagnose(old, port(old, fault, at), batches())
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.pass_) == (module, pass_)
    assert found.where.candidate_module == candidate
    assert found.where["candidate_module"] == candidate
    named = f"{module} (the candidate's {candidate}), since step 0"
    assert not module or named in found.headline


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


@torch.no_grad()
def folded(network, epsilon):
    """Its norm folded into its convolution, as for inference."""
    new, norm = copy.deepcopy(network), network.norm
    scale = norm.weight / (norm.running_var + epsilon).sqrt()
    new.conv.weight.mul_(scale[:, None, None, None])
    new.conv.bias.copy_((new.conv.bias - norm.running_mean) * scale + norm.bias)
    new.norm = nn.Identity()
    return new


def test_a_module_far_more_wrong_than_its_parent_has_a_moved_border():
    network = Normed().eval().requires_grad_(False)
    network.fc.requires_grad_(True)
    x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_equivalent(network, folded(network, network.norm.eps), x)
    with pytest.raises(AssertionError, match="forward of norm") as wrong:
        assert_equivalent(network, folded(network, 3e-5), x)
    assert "conv is" not in str(wrong.value)


class OnesAtZero(nn.Module):
    def forward(self, x):
        return torch.where(x >= 0, x, torch.zeros_like(x))


class Kinked(nn.Module):
    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.act, self.out = nn.Linear(5, 6), activation, nn.Linear(6, 3)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.out(self.act(self.fc(x)))


def test_a_gradient_at_exact_zeros_is_no_tie():
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    x[::3] = 0
    assert_equivalent(Kinked(nn.ReLU()), Kinked(nn.Threshold(0.0, 0.0)), x)
    with pytest.raises(AssertionError, match="Where: input gradient of act"):
        assert_equivalent(Kinked(nn.ReLU()), Kinked(OnesAtZero()), x)


class Norms(nn.Module):
    def __init__(self, shared):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        self.fc, self.out = nn.Linear(5, 5), nn.Linear(5, 3)
        if shared:
            self.b.running_mean, self.b.running_var = self.a.running_mean, self.a.running_var

    def forward(self, x):
        return self.out(self.b(self.fc(self.a(x)).relu()))


def test_statistics_that_two_norms_share_are_named_and_no_module_is_called_wrong_by_itself():
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError, match=r"Where: buffer of [ab]\n") as wrong:
        assert_equivalent(Norms(False), Norms(True), x)
    assert "what arrives there is wrong" in str(wrong.value)


class Gates(nn.Module):
    """As many mixtures of the inputs' columns as there are gates, each a linear layer and a softmax."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gates = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Softmax(1)) for _ in range(3))

    def forward(self, x):
        return torch.stack([(gate(x) * x).sum(1) for gate in self.gates], 1)


class InOneWeight(nn.Module):
    """The same by one product; ``axis`` should be 2."""

    def __init__(self, gates, axis):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([gate[0].weight.detach().T for gate in gates.gates]))
        self.bias = nn.Parameter(torch.stack([gate[0].bias.detach() for gate in gates.gates]))
        self.axis = axis

    def forward(self, x):
        scores = torch.einsum("ni,gio->ngo", x, self.weight) + self.bias
        return (scores.softmax(self.axis) * x[:, None]).sum(2)


def test_of_several_in_a_list_that_part_the_first_is_named():
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    assert_equivalent(Gates(), InOneWeight(Gates(), 2), x)
    with pytest.raises(AssertionError, match=r"Where: forward of gates\.0\.1"):
        assert_equivalent(Gates(), InOneWeight(Gates(), 0), x)
