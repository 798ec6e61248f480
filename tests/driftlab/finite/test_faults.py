"""Planted faults in gradients: each is a fail whose suspect is the leaf that the fault was planted in."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import gradient_check
from tests.driftlab.finite.kinds import Net, squares

torch.set_num_threads(1)


class Spoiled(torch.autograd.Function):
    """The identity, whose gradient ``spoil`` acts on."""

    @staticmethod
    def forward(ctx, x, spoil):
        ctx.spoil = spoil
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.spoil(g), None


def spoiled(x, spoil):
    return Spoiled.apply(x, spoil)


def own_gradient(value, *gradients):
    """A function of as many tensors as there are ``gradients``, each of (output gradient, *tensors)."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return value(*tensors)

        @staticmethod
        def backward(ctx, g):
            return tuple(of(g, *ctx.saved_tensors) for of in gradients)

    return Own.apply


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hidden(spoil):
    """Two hidden layers; what flows back behind the second is spoiled."""
    torch.manual_seed(0)
    first, second = nn.Linear(5, 12), nn.Linear(12, 12)

    def forward(net, x):
        return net.last(spoil(torch.tanh(net.second(torch.tanh(net.first(x))))))

    return Net(forward, first=first, second=second, last=nn.Linear(12, 3))


# Each gives (module, inputs, the leaf to be suspected).
FAULTS = {}


def fault(make):
    FAULTS[make.__name__] = make
    return make


@fault
def a_cut_branch():
    torch.manual_seed(0)
    net = Net(lambda s, x: s.main(x) + s.branch(x).detach(), branch=nn.Linear(5, 3), main=nn.Linear(5, 3))
    return net, drawn(8, 5), "branch.bias"


@fault
def a_transposed_weight_gradient():
    linear = own_gradient(lambda x, w: x @ w.T, lambda g, x, w: g @ w, lambda g, x, w: x.T @ g)
    return Net(lambda s, x: linear(x, s.w), w=drawn(6, 6)), drawn(9, 6, seed=1), "w"


@fault
def a_mean_over_the_batch_in_place_of_the_sum():
    add = own_gradient(lambda x, b: x + b, lambda g, x, b: g, lambda g, x, b: g.mean(0))
    return Net(lambda s, x: add(x, s.b), b=drawn(6)), drawn(9, 6, seed=1), "b"


@fault
def a_reduction_over_the_wrong_dimension():
    scale = own_gradient(lambda x, w: x * w, lambda g, x, w: g * w, lambda g, x, w: (g * x).sum(1))
    return Net(lambda s, x: scale(x, s.w), w=drawn(6)), drawn(6, 6, seed=1), "w"


@fault
def batch_norm_with_detached_statistics():
    torch.manual_seed(0)

    def forward(net, x):
        y = net.first(x)
        normed = (y - y.mean(0).detach()) / (y.var(0, correction=0).detach() + 1e-5).sqrt()
        return net.last(torch.tanh(normed))

    return Net(forward, first=nn.Linear(5, 7), last=nn.Linear(7, 3)), drawn(9, 5), "first.bias"


@fault
def softmax_without_its_rank_one_part():
    softmax = own_gradient(lambda x: x.softmax(1), lambda g, x: x.softmax(1) * g)
    return Net(lambda s, x: softmax(s.first(x)), first=nn.Linear(5, 7)), drawn(9, 5), "first.bias"


@fault
def a_relu_whose_derivative_starts_elsewhere():
    relu = own_gradient(F.relu, lambda g, x: g * (x > 0.1))
    torch.manual_seed(0)
    return Net(lambda s, x: relu(s.first(x)), first=nn.Linear(5, 30)), drawn(20, 5), "first.bias"


@fault
def a_max_pool_that_pays_the_wrong_winner():
    def pays_the_first(g, x):
        back = torch.zeros_like(x)
        back[:, ::2] = g
        return back

    pool = own_gradient(lambda x: x.unflatten(1, (-1, 2)).amax(2), pays_the_first)
    return Net(lambda s, x: pool(x)), drawn(5, 8), "input"


@fault
def an_overwritten_saved_tensor():
    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.y = torch.tanh(x)  # unseen by autograd's version counter
            return ctx.y.view_as(ctx.y)

        @staticmethod
        def backward(ctx, g):
            return g * (1 - ctx.y**2)

    def forward(net, x):
        y = Tanh.apply(net.first(x))
        y.data.mul_(2)
        return y

    torch.manual_seed(0)
    return Net(forward, first=nn.Linear(5, 7)), drawn(9, 5), "first.bias"


@fault
def a_padding_whose_gradient_is_dropped():
    pad = own_gradient(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), lambda g, x: g[..., 1:-1, 1:-1])
    torch.manual_seed(0)
    net = Net(lambda s, x: s.conv(pad(x)).tanh(), conv=nn.Conv2d(2, 3, 3))
    return net, drawn(2, 2, 6, 6), "input"


@fault
def one_input_of_three():
    def forward(net, a, b, c):
        return a * spoiled(b, lambda g: 0.9 * g) * c

    return Net(forward), (drawn(9), drawn(9, seed=1), drawn(9, seed=2)), "input.1"


@fault
def one_step_in_time_cut():
    def forward(net, x):
        state = x.new_zeros(x.shape[1], 6)
        for time, row in enumerate(x):
            state = net.cell(row, state.detach() if time == 3 else state)
        return net.last(state)

    torch.manual_seed(0)
    return Net(forward, cell=nn.GRUCell(4, 6), last=nn.Linear(6, 2)), drawn(6, 3, 4), "cell.bias_hh"


@fault
def a_gradient_clipped_by_a_hook():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    net[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return net, drawn(9, 5), "0.weight"


@fault
def a_gradient_halved_after_it_was_accumulated():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def halved(parameter):
        parameter.grad.mul_(0.5)

    net[2].weight.register_post_accumulate_grad_hook(halved)
    return net, drawn(9, 5), "2.weight"


@fault
def an_input_gradient_doubled_by_a_module_hook():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    net[1].register_full_backward_hook(lambda module, back, given: (2 * back[0],))
    return net, drawn(9, 5), "0.bias"


@fault
def a_gradient_that_is_none():
    linear = own_gradient(lambda x, w: x @ w.T, lambda g, x, w: g @ w, lambda g, x, w: None)
    return Net(lambda s, x: linear(x, s.w), w=drawn(4, 6)), drawn(9, 6, seed=1), "w"


@fault
def a_straight_through_estimator():
    def forward(net, x):
        y = net.first(x)
        return net.last(y + ((4 * y).round() / 4 - y).detach())

    torch.manual_seed(0)
    return Net(forward, first=nn.Linear(5, 7), last=nn.Linear(7, 3)), drawn(9, 5), "first.bias"


@fault
def tied_weights_counted_twice():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 6), nn.Tanh(), nn.Linear(6, 12))
    net[2].weight = net[0].weight
    net[0].weight.register_hook(lambda g: 2 * g)
    return net, torch.arange(12).view(4, 3), "0.weight"


@fault
def tied_weights_counted_once():
    torch.manual_seed(0)
    net = Net(lambda s, i: F.embedding(i, s.w.detach()).tanh() @ s.w.T, w=drawn(12, 6))
    return net, torch.arange(12).view(4, 3), "w"


@fault
def a_forgotten_conjugate():
    product = own_gradient(lambda z, w: z * w, lambda g, z, w: g * w.conj(), lambda g, z, w: g * z)
    z, w = (torch.complex(drawn(9, seed=s), drawn(9, seed=s + 1)) for s in (0, 5))
    return Net(lambda s, z: product(z, s.w).abs(), w=w), z, "w"


@fault
def a_dropout_whose_mask_is_not_applied_backwards():
    def forward(net, x):
        y = net.first(x)
        return net.last(y + (F.dropout(y, 0.5, training=True) - y).detach())

    torch.manual_seed(0)
    return Net(forward, first=nn.Linear(5, 7), last=nn.Linear(7, 3)), drawn(9, 5), "first.bias"


@fault
def an_accumulation_forgotten():
    twice = own_gradient(lambda x: x.sin() + x.cos(), lambda g, x: g * x.cos())
    return Net(lambda s, x: twice(s.first(x)), first=nn.Linear(5, 7)), drawn(9, 5), "first.bias"


@fault
def an_attention_whose_mask_is_not_applied_backwards():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()

    def forward(net, x):
        q, k, v = net.qkv(x).chunk(3, -1)
        weight = (q @ k.mT).masked_fill(~mask, -1e9).softmax(-1)
        plain = (q @ k.mT).softmax(-1)
        return (plain + (weight - plain).detach()) @ v

    torch.manual_seed(0)
    return Net(forward, qkv=nn.Linear(5, 15)), drawn(2, 6, 5), "qkv.bias"


@fault
def a_sparse_gradient_of_which_one_row_is_dropped():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 6, sparse=True), nn.Tanh())

    def without_row_three(g):
        dense = g.to_dense()
        dense[3] = 0
        return dense.to_sparse(1)

    net[0].weight.register_hook(without_row_three)
    return net, torch.arange(12), "0.weight"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_leaf(name):
    module, inputs, leaf = FAULTS[name]()
    found = gradient_check(module, inputs, squares)
    assert (found.outcome, found.suspect.leaf) == ("fail", leaf), found
    assert not found
    assert f"the gradient of {found.suspect} is wrong" in found.reading
