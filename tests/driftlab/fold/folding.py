"""What the tests of the fold share."""

import torch
from torch import nn


class Bag(nn.Module):
    """Nothing but parameters."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def state(module):
    """Parameters and buffers, shared ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_folds(fold, candidate, reference):
    folded, expected = fold(state(candidate)), state(reference)
    assert folded.keys() == expected.keys()
    assert fold.unplaced == ()
    for name, tensor in expected.items():
        assert torch.equal(folded[name], tensor), name


def without_fold(model):
    del model.fold
    return model


def halves():
    reference = nn.Sequential(nn.Linear(3, 4))
    first, second = reference[0].weight.detach().split(2)
    candidate = Bag({"first": first, "second": second, "bias": reference[0].bias.detach()})
    return reference, candidate
