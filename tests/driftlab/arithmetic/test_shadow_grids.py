"""Rounding in shadow execution: grids and masked bits take nothing away, other changes of bits count."""

import pytest
import torch

from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic


def rows():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def in_shadow(function, x):
    with shadow_arithmetic():
        return held(function(shadow(x)))


def bits(change):
    return lambda x: change(x.view(torch.int32)).view(torch.float32)


LOST = {
    "round": torch.round,
    "round in place": lambda x: x.clone().round_(),
    "round to decimals": lambda x: torch.round(x, decimals=2),
    "fixed point": lambda x: torch.round(x * 256) / 256,
    "fake quantisation": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "fake quantisation by channel": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int32), 1, -128, 127
    ),
    "TF32 by truncation": bits(lambda b: b & -8192),
    "TF32 by rounding": bits(lambda b: (b + 4096) & -8192),
    "TF32 by shifts": bits(lambda b: (b >> 13) << 13),
    "stochastic rounding": bits(lambda b: (b + torch.randint(8192, b.shape, dtype=torch.int32)) & -8192),
    "half's own bits": lambda x: x.half().view(torch.int16).view(torch.float16).float(),
}


@pytest.mark.parametrize("name", LOST)
def test_rounding_to_a_grid_takes_nothing_away(name):
    x = rows()
    assert not torch.equal(LOST[name](x), x)
    torch.testing.assert_close(in_shadow(LOST[name], x), x.double(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (bits(lambda b: b & 0x7FFFFFFF), torch.abs),
        (bits(lambda b: b ^ -0x80000000), torch.neg),
        (lambda x: x * ((x.view(torch.int32) >> 31) + 1), torch.relu),
    ],
    ids=["abs", "neg", "relu"],
)
def test_bits_of_the_sign_are_no_rounding(change, expected):
    x = rows()
    assert torch.equal(change(x), expected(x))
    torch.testing.assert_close(in_shadow(change, x), expected(x.double()), rtol=0, atol=0)


def test_what_is_rounded_and_becomes_integers_is_rounded():
    x = 10 * rows()
    found = in_shadow(lambda x: x.round().long(), x)
    assert torch.equal(found, x.double().round().long())
    assert not torch.equal(found, x.long())


def test_what_was_written_into_since_is_rounded_no_more():
    def raised(x):
        whole = x.round()
        return whole.add_(0.25).int()

    x = 10 * rows()
    assert torch.equal(in_shadow(raised, x), (x.double() + 0.25).int())
