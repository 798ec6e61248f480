"""float64 convolutions of a few images at a time: what torch's own give, and nobody else's business."""

import threading
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftlab.process import float64_convolutions
from driftlab.process.float64_convolutions import computing, faster, is_wanted
from driftlab.record.environment import environment

UNIT_ROUND_OFF = 2.0**-53

SHAPES = st.fixed_dictionaries(
    {
        "n": st.integers(1, 5),
        "groups": st.sampled_from([1, 1, 2]),
        "channels": st.integers(1, 12),
        "out": st.integers(1, 5),
        "height": st.integers(5, 20),
        "width": st.integers(5, 21),
        "kernel": st.tuples(st.integers(1, 5), st.integers(1, 5)),
        "padding": st.tuples(st.integers(0, 3), st.integers(0, 3)),
        "stride": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "bias": st.booleans(),
        "seed": st.integers(0, 2**20),
        "at_a_time": st.integers(1, 60_000),
    }
)


LARGE = {"n": 5, "groups": 1, "channels": 8, "out": 2, "height": 16, "width": 16, "kernel": (3, 3)}
LARGE |= {"padding": (1, 1), "bias": True, "seed": 0}


@pytest.fixture(autouse=True)
def two_of_them_at_a_time(monkeypatch):
    """Of ``LARGE``, whose images unfold to 144 KiB each."""
    monkeypatch.setattr(float64_convolutions, "AT_A_TIME", 300 * 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def integers(generator, *shape):
    return torch.randint(-4, 5, shape, generator=generator).double().requires_grad_()


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def tensors(case, draw):
    generator, groups = torch.Generator().manual_seed(case["seed"]), case["groups"]
    images = draw(generator, case["n"], groups * case["channels"], case["height"], case["width"])
    weight = draw(generator, groups * case["out"], case["channels"], *case["kernel"])
    return images, weight, draw(generator, groups * case["out"]) if case["bias"] else None


def passes(inputs, fast, back=None, **options):
    """The result, and the gradients of all inputs."""
    with faster(fast), computing():
        result = F.conv2d(*inputs, **options)
        leaves = [t for t in inputs if t is not None]
        back = torch.ones_like(result) if back is None else back
        return [result.detach(), *torch.autograd.grad(result, leaves, back)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SHAPES)
def test_integers_come_out_exactly_as_torchs_own_do(case):
    """Each sum is exact in float64, in any order: forward pass and all gradients, to the last bit."""
    inputs, options = tensors(case, integers), {o: case[o] for o in ("padding", "stride", "groups")}
    shape = F.conv2d(*inputs, **options).shape
    back = integers(torch.Generator().manual_seed(case["seed"] + 1), *shape).detach()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(float64_convolutions, "AT_A_TIME", case["at_a_time"])
        own, other = (passes(inputs, fast, back, **options) for fast in (False, True))
    for a, b in zip(own, other, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_an_images_result_and_gradient_are_torchs_own_bits():
    images, weight, bias = tensors(LARGE, normal)
    fast, own = (passes((images, weight, bias), wanted, padding=1) for wanted in (True, False))
    assert torch.equal(fast[0], own[0])
    assert torch.equal(fast[1], own[1])


def naive(images, weight, padding):
    """In 64 bits of significand, term by term; and the sum of the terms' sizes."""
    images, weight = (t.detach().numpy().astype(np.longdouble) for t in (images, weight))
    images = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    height, width = (images.shape[2 + d] - weight.shape[2 + d] + 1 for d in (0, 1))
    result = np.zeros((len(images), len(weight), height, width), np.longdouble)
    sizes = np.zeros_like(result)
    for i, j in product(*map(range, weight.shape[2:])):
        shifted, of_shift = images[:, :, i : i + height, j : j + width], weight[:, :, i, j]
        result += np.einsum("nchw,oc->nohw", shifted, of_shift)
        sizes += np.einsum("nchw,oc->nohw", abs(shifted), abs(of_shift))
    return result, sizes


@pytest.mark.parametrize("channels", [8, 24])
def test_it_rounds_no_more_than_a_sum_of_so_many_terms_may(channels):
    """|error| <= k u / (1 - k u) times the sum of the terms' sizes (Higham, Accuracy and Stability, 3.1)."""
    generator = torch.Generator().manual_seed(channels)
    images, weight = normal(generator, 4, channels, 16, 16), normal(generator, 6, channels, 3, 3)
    exact, sizes = naive(images, weight, 1)
    terms = channels * 9
    bound = terms * UNIT_ROUND_OFF / (1 - terms * UNIT_ROUND_OFF) * sizes
    off = [abs(passes((images, weight, None), fast, padding=1)[0].numpy() - exact) for fast in (False, True)]
    assert (off[1] <= bound).all()
    assert np.linalg.norm(off[1]) <= 2 * np.linalg.norm(off[0])  # beside torch's own


def test_its_gradients_are_those_of_the_function():
    generator = torch.Generator().manual_seed(0)
    inputs = normal(generator, 5, 8, 16, 16), normal(generator, 2, 8, 3, 3), normal(generator, 2)
    with faster(True), computing():
        assert torch.autograd.gradcheck(lambda *given: F.conv2d(*given, padding=1), inputs, fast_mode=True)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_gradients_that_nobody_asks_for_are_left_out(frozen):
    inputs = tensors(LARGE, normal)
    whole = passes(inputs, True)
    inputs[frozen].requires_grad_(False)
    with faster(True), computing():
        result = F.conv2d(*inputs)
        asked = [t for t in inputs if t.requires_grad]
        found = torch.autograd.grad(result, asked, torch.ones_like(result))
    expected = [g for place, g in enumerate(whole[1:]) if place != frozen]
    assert all(map(torch.equal, found, expected))


def counted(monkeypatch):
    """How many images at a time, whenever that was asked."""
    calls, own = [], float64_convolutions.images_at_a_time

    def asked(*given):
        calls.append(own(*given))
        return calls[-1]

    monkeypatch.setattr(float64_convolutions, "images_at_a_time", asked)
    return calls


def test_float32_stays_as_it_is(monkeypatch):
    calls = counted(monkeypatch)
    inputs = [t.detach().float().requires_grad_() for t in tensors(LARGE, normal)]
    with torch.backends.mkldnn.flags(enabled=False):  # which comes to the same kernel of torch's
        assert all(map(torch.equal, passes(inputs, True), passes(inputs, False)))
    assert set(calls) == {0}


def test_it_works_only_where_it_is_wanted_and_in_its_own_thread(monkeypatch):
    calls, inputs = counted(monkeypatch), tensors(LARGE, normal)
    with faster(True):
        F.conv2d(*inputs)
        with computing():
            thread = threading.Thread(target=F.conv2d, args=inputs)
            thread.start()
            thread.join()
            assert calls == []
            F.conv2d(*inputs)
            assert calls == [2]
            with faster(False), computing():
                F.conv2d(*inputs)
            assert calls == [2]
            F.conv2d(*inputs)
    with computing():
        F.conv2d(*inputs)
    assert calls == [2, 2]


def test_a_torch_that_does_not_let_its_kernels_be_replaced_keeps_them(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with faster(True):
        assert not is_wanted()
        assert environment(torch.device("cpu"))["float64_convolutions"] == "torch's"
    monkeypatch.undo()
    with faster(True):
        assert environment(torch.device("cpu"))["float64_convolutions"] == "driftlab's"
