"""Single operations on shadows: what they say, what they hold, in place and as bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic
from tests.driftlab.arithmetic.shadowing import Calling, assert_equal_in_shadow

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool]
NAMES = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    ">": lambda a, b: a > b,
    "where": lambda a, b: torch.where(b > 0, a, b),
    "maximum": torch.maximum,
    "sum": lambda a, b: (a + b).sum(),
    "mean": lambda a, b: (a * 1.0).mean() + b,
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "argmax": lambda a, b: (a + b * 1.0).argmax(),
    "to": lambda a, b: a.to(b.dtype),
    "type_as": lambda a, b: b.type_as(a) + 1,
    "python number": lambda a, b: 2 * a + 0.5,
    "sqrt of a count": lambda a, b: (a > 0).sum().sqrt() + b,
    "zeros": lambda a, b: torch.zeros(3) + a,
    "zeros_like": lambda a, b: torch.zeros_like(a) * b,
    "asked sum": lambda a, b: a.sum(dtype=torch.float64) + b,
    "complex": lambda a, b: (torch.complex(a.float(), a.float()) * 2).abs(),
    "fft": lambda a, b: torch.fft.fft(a.double().reshape(-1)).real,
}


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(NAMES)),
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    st.tuples(st.booleans(), st.booleans()),
)
def test_a_shadow_says_the_dtype_and_shape_that_the_plain_tensor_has(name, dtypes, scalar):
    a, b = (torch.ones(() if flat else (3,)).mul(1.5).to(d) for flat, d in zip(scalar, dtypes, strict=True))
    plain = NAMES[name](a, b)
    with shadow_arithmetic():
        found = NAMES[name](shadow(a), shadow(b))
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
    if plain.is_floating_point():
        assert held(found).dtype == torch.float64
        torch.testing.assert_close(held(found), plain.double(), rtol=2**-7, atol=0)


def rows():
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(1))]


def filled(x):
    out = torch.zeros(4, 6)
    out[:, ::2] = x[:, ::2] * 2
    out[1:3, 1::2] += x[1:3, 1::2]
    return out


def summed(x):
    out = torch.zeros(3, 6).index_add_(0, torch.tensor([0, 2, 2, 0]), x)
    return out.index_put_((torch.tensor([1]),), x[3:], accumulate=True)


def through_a_view(x):
    out = x.clone()
    out.view(-1)[2:5].mul_(3)
    out[0].copy_(x[1])
    return out * out


def narrow_buffer(x):
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    out[:] = x
    return out.float()


FUNCTIONS = {
    "written into zeros": (filled, None),
    "added into zeros": (summed, None),
    "written through a view": (through_a_view, None),
    "out of a full tensor": (lambda x: torch.full((4, 6), 2.0).sub_(x).mul_(x), None),
    "written into bfloat16": (narrow_buffer, lambda x: x * 1),
    "transposed in place": (lambda x: (2 * x).t_() @ x, None),
    "squeezed in place": (lambda x: (2 * x[:, None]).squeeze_(1) * x, None),
    "unsqueezed in place": (lambda x: (2 * x).unsqueeze_(1) + x, None),
    "axes swapped in place": (lambda x: (x * x).swapaxes_(0, 1).contiguous().view(4, 6), None),
    "spectrum": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=6), None),
    "complex product": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) ** 2),
        lambda x: torch.stack([x[:, ::2] ** 2 - x[:, 1::2] ** 2, 2 * x[:, ::2] * x[:, 1::2]], -1),
    ),
    "conjugate": (
        lambda x: (
            (torch.view_as_complex(x.view(4, 3, 2)) * torch.view_as_complex(x.view(4, 3, 2)).conj()).real
        ),
        lambda x: x.view(4, 3, 2).square().sum(-1),
    ),
    "imaginary part of a conjugate": (
        lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag * 1,
        lambda x: -x[:, 1::2],
    ),
    "float64 and back": (lambda x: (x.double() * 3).float(), lambda x: 3 * x),
    "float16 and back": (lambda x: x.half().to(torch.float32) * 3, lambda x: 3 * x),
    "bfloat16 throughout": (lambda x: (x.bfloat16() @ x.bfloat16().T).float(), lambda x: x @ x.T),
    "number taken out": (lambda x: x * x.abs().max().item(), None),
    "positions": (lambda x: x * (torch.arange(6) / 7), lambda x: x * (torch.arange(6.0) / 7)),
    "positions by linspace": (lambda x: x * torch.linspace(0, 1, 6), lambda x: x * torch.arange(6.0) / 5),
    "filled factor": (lambda x: x * torch.full((6,), 0.1), lambda x: x * 0.1),
    "divided by a count": (
        lambda x: x * (1 / ((x > 0).sum(1, keepdim=True) + 2)),
        lambda x: x / ((x > 0).sum(1, keepdim=True) + 2),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_in_shadow_equals_it_in_float64(name):
    function, reference = FUNCTIONS[name]
    assert_equal_in_shadow(Calling(function), rows(), Calling(reference or function))


def test_a_cast_is_a_tensor_of_its_own_and_a_view_is_not():
    x = shadow(torch.ones(3))
    with shadow_arithmetic():
        cast, view = x.bfloat16(), x.view(3, 1)
        cast.add_(1)
        view.mul_(5)
    assert held(cast).tolist() == [2, 2, 2]
    assert held(x).tolist() == [5, 5, 5]


WRITES = {
    "add_": lambda plain, x: plain.add_(x),
    "copy_": lambda plain, x: plain.copy_(x),
    "an entry": lambda plain, x: plain.__setitem__(0, x[1]),
    "a view": lambda plain, x: plain.view(3, 1)[1:].copy_(x[1:, None]),
    "an index": lambda plain, x: plain.index_copy_(0, torch.tensor([1]), x[:1]),
    "out": lambda plain, x: torch.add(x, 1, out=plain),
}


@pytest.mark.parametrize("nudged", [False, True], ids=["still", "nudged"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_a_plain_tensor_arrives(name, nudged):
    x, expected, plain = torch.tensor([0.5, 1.0, 4.0]), torch.full((3,), 2.0), torch.full((3,), 2.0)
    WRITES[name](expected, x)
    assert expected.tolist() != plain.tolist()
    with shadow_arithmetic(torch.Generator().manual_seed(0) if nudged else None):
        WRITES[name](plain, shadow(x))
    torch.testing.assert_close(plain, expected, rtol=2**-22, atol=0)


DRAWS = {
    "rand": lambda x: torch.rand(4, 6),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "dropout": lambda x: torch.dropout(torch.ones_like(x), 0.5, True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_that_the_float32_path_draws(name):
    (x,) = rows()
    torch.manual_seed(0)
    plain = DRAWS[name](x)
    torch.manual_seed(0)
    with shadow_arithmetic():
        found = held(DRAWS[name](shadow(x)))
    torch.testing.assert_close(found, plain.double(), rtol=0, atol=1e-6)
