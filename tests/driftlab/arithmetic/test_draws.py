"""Random numbers of float64 networks: float32's, and what is computed with them is computed in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from driftlab.arithmetic.draws import DRAWING, Draws, Float32Draws
from driftlab.arithmetic.passes import Recorded, run
from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic
from driftlab.lockstep.arm import grow
from driftlab.lockstep.loop import Lockstep
from tests.driftlab.arithmetic.shadowing import Calling, Watching


def stochastic_depth(x):
    return x * torch.bernoulli(torch.full_like(x[:, :1], 0.5))


def by_hand(x):
    return x * (torch.rand_like(x) >= 0.3) / 0.7


LAYERS = {
    "dropout": F.dropout,
    "dropout as on a GPU": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout2d": lambda x: F.dropout2d(x[..., None, None])[..., 0, 0],
    "alpha dropout": lambda x: F.alpha_dropout(x, training=True),
    "stochastic depth": stochastic_depth,
    "stochastic depth, in place": lambda x: x * torch.empty_like(x).bernoulli_(torch.full_like(x, 0.5)),
    "dropout by hand": by_hand,
    "Gumbel softmax": F.gumbel_softmax,
    "RReLU": lambda x: F.rrelu(x, training=True),
    "RReLU, in place": lambda x: F.rrelu(x + 0, training=True, inplace=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a size": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "noise around a mean": lambda x: torch.normal(x, x.abs()),
    "noise of one width": lambda x: torch.normal(x, 0.5),
    "noise around zero": lambda x: torch.normal(0.0, x.abs()) * x,
    "uniform noise": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


class WideDraws(Watching):
    """Lists what draws in float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, out))
        wide = any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in leaves)
        if wide and torch.Tag.nondeterministic_seeded in func.tags:
            self.seen.append(str(func))
        return out


@pytest.mark.parametrize("name", LAYERS)
def test_a_float64_arm_draws_the_masks_of_float32(name):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 40), Calling(LAYERS[name]), nn.Linear(40, 3))
    arms = grow(
        network,
        None,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.0),
        horizons={"float32": 3, "float64": 3},
    )
    steps = Lockstep(arms, lambda outputs, _: outputs.sin().sum())
    x = torch.randn(8, 6)
    with WideDraws() as wide:
        for step in range(3):
            steps.forward_backward(step, x, None)
    assert wide.seen == []
    for row in steps.rows.values():
        assert 0 < row["logit_distance/reference.float32"] < 1e-6
        assert row["gradient_distance/reference.float32"] < 1e-5


@pytest.mark.parametrize("arithmetic", ["float64", "shadow", "shadow64"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_other_arithmetics_draw_what_float32_draws(name, arithmetic):
    torch.manual_seed(0)
    layer, call = Calling(LAYERS[name]), Recorded((torch.randn(8, 40, requires_grad=True),))
    with WideDraws() as wide:
        found, narrow = (run(layer, call, a).tensors["forward"][""] for a in (arithmetic, "float32"))
    assert wide.seen == []
    torch.testing.assert_close(found, narrow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_computed_with_them_is_float64(name):
    """Two inputs that float32 cannot tell apart: the outputs differ by as little, and not by nothing."""
    x = torch.randn(8, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def output(inputs):
        torch.manual_seed(1)
        with Float32Draws():
            return LAYERS[name](inputs)

    off = (output(x * (1 + 2.0**-40)) - output(x)).norm() / output(x).norm()
    assert 0 < off < 2.0**-36


def drawing_operations():
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operation = name.partition("::")
        packet, _, overload = operation.partition(".")
        if space == "aten" and "out" not in overload:
            found = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in found.tags:
                yield found


ELSEWHERE = {
    "draw alike in every dtype": {"_standard_gamma", "_sample_dirichlet"},
    "made of others, or draw nothing that is seen": {
        *("dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_"),
        *("feature_alpha_dropout", "feature_alpha_dropout_", "rrelu", "rrelu_", "lstm", "gru", "rnn_tanh"),
        *("rnn_relu", "scaled_dot_product_attention", "_scaled_dot_product_attention_math"),
        *("_fused_sdp_choice", "_nested_tensor_softmax_with_shape"),
    },
    "not reached from eager code": {"_fused_dropout", "rrelu_with_noise_functional"},
}
FUSED = ("attention", "_rnn", "_lstm_mps", "_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask_")


def test_every_operation_that_draws_is_known():
    """By torch's own tag: a torch that learns to draw otherwise shows here."""
    elsewhere = set().union(*ELSEWHERE.values())
    names = {f for f in drawing_operations() if f not in DRAWING}
    unknown = {str(f) for f in names if f._opname not in elsewhere and not any(p in f._opname for p in FUSED)}
    assert unknown == set()
    assert all(torch.Tag.nondeterministic_seeded in f.tags for f in DRAWING)


def test_one_that_draws_nothing_is_let_alone_until_it_does():
    draws, like = Draws(), torch.zeros(40, dtype=torch.float64)
    with draws.as_float32():
        like + 1
    drawn = []
    for _ in range(3):
        torch.manual_seed(0)
        with draws.as_float32():
            drawn.append(torch.rand_like(like))
    torch.manual_seed(0)
    expected = torch.rand_like(like, dtype=torch.float32).double()
    assert [torch.equal(d, expected) for d in drawn] == [False, True, True]


def test_what_asks_for_float32_keeps_it():
    like = torch.zeros(40, dtype=torch.float64)
    with Float32Draws():
        assert torch.rand(3).dtype == torch.rand_like(like, dtype=torch.float32).dtype == torch.float32
        assert torch.randint(9, (3,)).dtype == torch.multinomial(like + 1, 2).dtype == torch.int64
        assert torch.poisson(like).dtype == torch.rand(3, dtype=torch.float64).dtype == torch.float64


def test_shadow_execution_draws_as_the_code_says():
    x = torch.rand(8, 40)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.manual_seed(0)
        expected = by_hand(x.to(dtype)) != 0
        torch.manual_seed(0)
        with shadow_arithmetic():
            assert torch.equal(held(by_hand(shadow(x.to(dtype)))) != 0, expected)
