"""Every rewrite, on any Conv2d, against the conv itself: to the rounding bound, and with integers to the bit.

The bound is a priori (Higham, "Accuracy and Stability of Numerical Algorithms", ch. 3): a sum of K products,
added in any order, is off by at most gamma_K times the sum of their absolute values, so two orders differ by
at most twice that. The number of products and the sum of absolute values come from a naive conv, and from
its gradients.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.rewrites.grouped_conv import as_grouped, separate_groups
from models.rewrites.planted_bug import split_without_input_gradient
from models.rewrites.split_conv import sizes_for_groups, split_conv

# PyTorch says so about even kernels with padding="same", which are meant to be among the cases.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@st.composite
def convs(draw):
    """A float64 Conv2d and an input for it."""
    groups, kernel = draw(st.integers(1, 3)), draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    channels = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    padding = draw(st.sampled_from(["same", "valid"]) | st.tuples(st.integers(0, 2), st.integers(0, 2)))
    stride = 1 if padding == "same" else draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    conv = nn.Conv2d(
        *channels,
        kernel,
        stride,
        padding,
        dilation=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
        dtype=torch.float64,
    )
    shape = draw(
        st.tuples(st.integers(1, 2), st.just(conv.in_channels), st.integers(5, 8), st.integers(5, 8))
    )
    return conv, torch.zeros(shape, dtype=torch.float64)


@st.composite
def compositions(draw, total):
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def rewrites(draw, conv):
    """A right rewrite that fits ``conv``."""
    inputs, outputs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    kind = draw(st.sampled_from(["out", "in", "grouped"] + ["separate"] * (conv.groups > 1)))
    if kind == "out" and conv.groups == 1:
        sizes = draw(compositions(outputs))
        return lambda model: split_conv(model, sizes=sizes)
    if kind == "out":
        sizes = sizes_for_groups(conv.out_channels, conv.groups, draw(st.integers(1, conv.out_channels)))
        return lambda model: split_conv(model, sizes=sizes)
    if kind == "in":
        sizes = draw(compositions(inputs))
        return lambda model: split_conv(model, dim="in", sizes=sizes)
    if kind == "grouped":
        groups = draw(st.sampled_from([n for n in (1, 2, 3) if outputs % n == 0]))
        return lambda model: as_grouped(model, groups=groups)
    return separate_groups


def naive_conv(conv, x, weight, bias):
    """The conv as a sum over kernel positions: x [N, C, H, W] -> [N, out, H', W']."""
    (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
    x = F.pad(x, padding_of(conv), mode=conv.padding_mode.replace("zeros", "constant"))
    rows, columns = (x.shape[-2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[-1] - dw * (kw - 1) - 1) // sw + 1
    x, weight = x.unflatten(1, (conv.groups, -1)), weight.unflatten(0, (conv.groups, -1))
    total = 0
    for a in range(kh):
        for b in range(kw):
            seen = x[
                ..., a * dh : a * dh + (rows - 1) * sh + 1 : sh, b * dw : b * dw + (columns - 1) * sw + 1 : sw
            ]
            total = total + torch.einsum("ngihw,goi->ngohw", seen, weight[..., a, b])
    total = total.flatten(1, 2)
    return total if bias is None else total + bias[:, None, None]


def padding_of(conv):
    """Left, right, top, bottom."""
    if conv.padding == "valid":
        return 0, 0, 0, 0
    if conv.padding == "same":
        (h, w) = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
        return w // 2, w - w // 2, h // 2, h - h // 2
    return conv.padding[1], conv.padding[1], conv.padding[0], conv.padding[0]


def passes(function, x, parameters, output_gradient_of):
    """Output, input gradient and the gradients of the parameters, by name."""
    x = x.clone().requires_grad_()
    output = function(x)
    output.backward(output_gradient_of(output))
    return {"output": output.detach(), "input": x.grad} | {n: p.grad for n, p in parameters.items()}


def passes_of_naive(conv, change, output_gradient_of, x):
    """The same of the naive conv, every number changed first."""
    own = {n: change(p.detach()).requires_grad_() for n, p in conv.named_parameters()}
    run = lambda x: naive_conv(conv, x, own["weight"], own.get("bias"))  # noqa: E731
    return passes(run, change(x), own, lambda output: change(output_gradient_of(output)))


def both(conv, rewrite, x, output_gradient_of):
    candidate = rewrite(copy.deepcopy(conv))
    theirs = passes(conv, x, dict(conv.named_parameters()), output_gradient_of)
    mine = passes(candidate, x, dict(candidate.named_parameters()), output_gradient_of)
    return theirs, {k: mine[k] for k in ("output", "input")} | candidate.fold(
        {k: v for k, v in mine.items() if k not in ("output", "input")}
    )


def random_like(seed, low=None):
    """Standard normal numbers of a tensor's shape, or whole ones from low to -low."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor):
        if low is None:
            return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return torch.randint(low, 1 - low, tensor.shape, generator=generator).to(tensor.dtype)

    return draw


def filled(conv, x, fill):
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(fill(parameter))
    return fill(x)


@settings(deadline=None, max_examples=40)
@given(st.data(), convs(), st.integers(0, 2**31))
def test_within_the_rounding_bound(data, drawn, seed):
    conv, x = drawn
    x = filled(conv, x, random_like(seed))
    rewrite, gradient_of = data.draw(rewrites(conv)), lambda output: random_like(seed + 1)(output)
    theirs, mine = both(conv, rewrite, x, gradient_of)
    magnitude = passes_of_naive(conv, torch.abs, gradient_of, x)
    products = passes_of_naive(conv, torch.ones_like, gradient_of, x)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        k_u = products[name] * 2.0**-53
        assert (mine[name] - theirs[name]).abs().le(2 * k_u / (1 - k_u) * magnitude[name]).all(), name


@settings(deadline=None, max_examples=40)
@given(st.data(), convs(), st.integers(0, 2**31), st.sampled_from([torch.float64, torch.float32]))
def test_to_the_bit_with_integers(data, drawn, seed, dtype):
    conv, x = drawn[0].to(dtype), drawn[1].to(dtype)
    x = filled(conv, x, random_like(seed, low=-3))
    gradient_of = lambda output: random_like(seed + 1, low=-3)(output)  # noqa: E731
    theirs, mine = both(conv, data.draw(rewrites(conv)), x, gradient_of)
    naive = passes_of_naive(conv, lambda tensor: tensor, gradient_of, x)
    assert mine.keys() == theirs.keys() == naive.keys()
    for name in theirs:
        assert torch.equal(mine[name], theirs[name]), name
        assert torch.equal(mine[name], naive[name]), name


@settings(deadline=None, max_examples=20)
@given(st.data(), convs())
def test_fold_gives_back_the_weights_exactly(data, drawn):
    conv, _ = drawn
    candidate = data.draw(rewrites(conv))(copy.deepcopy(conv))
    folded = candidate.fold(candidate.state_dict())
    assert folded.keys() == conv.state_dict().keys()
    assert all(torch.equal(folded[name], tensor) for name, tensor in conv.state_dict().items())


@settings(deadline=None, max_examples=20)
@given(convs(), st.integers(0, 2**31))
def test_planted_bug_is_wrong_in_the_input_gradient_only(drawn, seed):
    conv, x = drawn
    if conv.out_channels == 1:
        conv = nn.Conv2d(conv.in_channels, 2, 1, dtype=torch.float64)
    x = filled(conv, x, random_like(seed, low=-3)).abs() + 1
    with torch.no_grad():
        conv.weight.abs_().add_(1)  # all positive, so that the missing half cannot cancel out
    sizes = sizes_for_groups(conv.out_channels, conv.groups, 2)
    _, right = both(conv, lambda model: split_conv(model, sizes=sizes), x, torch.ones_like)
    _, wrong = both(conv, split_without_input_gradient, x, torch.ones_like)
    assert all(torch.equal(right[name], wrong[name]) for name in right if name != "input")
    assert not torch.equal(right["input"], wrong["input"])


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("times", [2, 3])
def test_as_grouped_keeps_to_the_groups_there_are(groups, times):
    conv, x = nn.Conv2d(6, 36, 3, groups=groups), torch.zeros(2, 6, 5, 5)
    x = filled(conv, x, random_like(0, low=-3))
    gradient_of = lambda output: random_like(1, low=-3)(output)  # noqa: E731
    theirs, mine = both(conv, lambda model: as_grouped(model, groups=times), x, gradient_of)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("rewrite", [split_conv, as_grouped, lambda model: split_conv(model, dim="in")])
def test_takes_an_image_without_batch(rewrite):
    conv = nn.Conv2d(4, 4, 3, dtype=torch.float64)
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(rewrite(copy.deepcopy(conv))(x), conv(x))
