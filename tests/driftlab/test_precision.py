"""``assert_equivalent(precision=)``: right rewrites pass without a tolerance, faults below it do not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import DiagnoseError, assert_equivalent, diagnose, watching
from driftlab.arithmetic.units import unless_zero
from driftlab.precision import PRECISIONS
from tests.driftlab.watch.rewrites import OtherUnderAutocast

FEW_BITS = [name for name in PRECISIONS if name not in ("float64", "float32")]
WIDTH = 64


class RootMeanSquare(nn.Module):
    """[B, C] -> [B, C], scaled to a root mean square of 1, in float32 as kernels do it."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight, self.eps, self.factor = nn.Parameter(torch.rand(WIDTH) + 0.5), eps, 1.0

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight * self.factor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = RootMeanSquare(), nn.Linear(WIDTH, 128), nn.Linear(128, 32)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Halves(nn.Module):
    """A linear layer in two along its outputs."""

    def __init__(self, whole):
        super().__init__()
        size = whole.out_features // 2
        self.one, self.other = (nn.Linear(whole.in_features, size).to(whole.weight.dtype) for _ in range(2))
        with torch.no_grad():
            for part, weight, bias in zip(
                (self.one, self.other), whole.weight.split(size), whole.bias.split(size), strict=True
            ):
                part.weight.copy_(weight)
                part.bias.copy_(bias)

    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], -1)


class Loop(nn.Module):
    """A linear layer that adds up its inputs one by one, in the dtype of its output."""

    def __init__(self, whole):
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias

    def forward(self, x):
        few = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        x, weight = x.to(few), self.weight.to(few)
        total = self.bias.to(few).expand(len(x), -1)
        for i in range(x.shape[1]):
            total = total + x[:, i, None] * weight[:, i]
        return total


def with_factor(model, factor):
    model.norm.factor = factor
    return model


def halved(model):
    model.up = Halves(model.up)
    return model


def wrong_backward(model):
    model.up.register_forward_hook(lambda _, __, out: out * 0.5 + (out * 0.5).detach())
    return model


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


def batch(rows=32):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("precision", FEW_BITS)
def test_a_right_rewrite_passes(block, precision):
    before = copy.deepcopy(block.state_dict())
    assert_equivalent(block, halved, batch(), precision=precision)
    assert all(torch.equal(t, before[n]) and t.dtype == torch.float32 for n, t in block.state_dict().items())


@pytest.mark.parametrize("precision", FEW_BITS)
@pytest.mark.parametrize("off", [1e-1, 1e-3, 1e-5])
def test_a_factor_far_below_rounding_is_named(block, precision, off):
    with pytest.raises(AssertionError, match="the forward of norm"):
        assert_equivalent(block, lambda model: with_factor(model, 1 + off), batch(), precision=precision)


@pytest.mark.parametrize("precision", FEW_BITS)
def test_half_of_a_gradient_is_missed(block, precision):
    with pytest.raises(AssertionError, match="not the same function"):
        assert_equivalent(block, wrong_backward, batch(), precision=precision)


@pytest.mark.parametrize("precision", FEW_BITS)
def test_a_sum_kept_in_few_bits(precision):
    torch.manual_seed(0)
    long = nn.Linear(256, 16)
    inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="fewer bits than the reference") as raised:
        assert_equivalent(long, Loop, inputs, precision=precision)
    assert f"keeps in {precision}" in str(raised.value)
    assert_equivalent(Loop(long), lambda model: long, inputs, precision=precision)  # more exact is not wrong


def test_a_network_in_bfloat16_stays_what_it_is(block):
    seen = []
    block.up.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    assert_equivalent(block.bfloat16(), halved, batch())
    assert torch.bfloat16 in seen
    assert torch.float32 not in seen


@pytest.mark.parametrize("precision", ["bf16", "float64", 16, ["bf16-mixed"]])
def test_what_is_no_precision_is_one_line(block, precision):
    with pytest.raises(DiagnoseError, match="give one of float32, bf16-mixed, 16-mixed") as raised:
        assert_equivalent(block, halved, batch(), precision=precision)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("few", [torch.bfloat16, torch.float16])
def test_a_move_by_one_unit_is_one_of_what_is_computed_with(few):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[::10] = 0
    moved = unless_zero(values, torch.Generator().manual_seed(0), few)
    before, after = values.to(few), moved.to(few)
    assert torch.equal(moved[::10], values[::10])
    numbers = before != 0
    up, down = (torch.nextafter(before, torch.full_like(before, s * torch.inf)) for s in (1, -1))
    assert bool(((after == up) | (after == down))[numbers].all())
    assert moved.dtype == torch.float32


def batches(count=4):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(16, WIDTH, generator=generator), torch.randint(32, (16,), generator=generator))
        for _ in range(count)
    ]


def cast_twice(model):
    model.up = OtherUnderAutocast(model.up)
    return model


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_diagnosis_asks_of_the_code_under_autocast(block, precision):
    assert diagnose(block, halved, batches(), steps=2, precision=precision).verdict == "round_off"
    found = diagnose(block, cast_twice, batches(), steps=2, precision=precision)
    assert (found.verdict, found.where.module) == ("bug", "up")
    assert diagnose(block, cast_twice, batches(), steps=2).verdict != "bug"  # in float32 there is none


def in_bfloat16(model):
    return model.bfloat16(), [(x.bfloat16(), y) for x, y in batches()]


def evidence(found, probe):
    return next(e for e in found.evidence if e.probe == probe)


def test_a_network_in_bfloat16_is_diagnosed_as_what_it_is(block):
    model, given = in_bfloat16(block)
    found = diagnose(model, halved, given, steps=3)
    assert found.verdict == "round_off"
    assert "bf16-true path" in evidence(found, "function").reading
    assert evidence(found, "bf16-true_pair").supports == "round_off"
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    by_name = diagnose(Block().float(), halved, batches(), steps=2, precision="bf16-true")
    assert by_name.verdict == "round_off"
    in_float32 = diagnose(model, halved, given, steps=2, precision="float32")
    assert "bf16-true_pair" not in {e.probe for e in in_float32.evidence}


def test_a_network_in_bfloat16_has_its_faults_named(block):
    model, given = in_bfloat16(block)
    found = diagnose(model, lambda m: with_factor(m, 1 + 1e-5), given, steps=2)
    assert (found.verdict, found.where.module) == ("bug", "norm")

    def few(m):
        m.down = Loop(m.down)
        return m

    found = diagnose(model, few, given, steps=2)
    assert (found.verdict, found.where.module) == ("reduced_precision", "down")


class KeepsItsNorm(nn.Module):
    """Weights of bfloat16 around a norm whose weights, and arithmetic, are float32."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 128), nn.LayerNorm(128), nn.Linear(128, 32)

    def forward(self, x):
        h = self.up(x)
        return self.down(self.norm(h.to(self.norm.weight.dtype)).to(h.dtype))


def test_a_norm_of_float32_stays_one_among_weights_of_bfloat16():
    torch.manual_seed(0)
    model, seen = KeepsItsNorm().bfloat16(), []
    model.norm.float()
    model.norm.register_forward_pre_hook(lambda m, args: seen.append((m.weight.dtype, args[0].dtype)))
    found = diagnose(model, halved, [(x.bfloat16(), y) for x, y in batches()], steps=2)
    assert found.verdict in ("round_off", "bit_identical")
    assert set(seen) == {(torch.float32,) * 2, (torch.float64,) * 2}


def test_no_training_is_in_float16(block):
    for given in ("16-true", 16):
        with pytest.raises(DiagnoseError, match="give one of float32, bf16-mixed, 16-mixed, bf16-true"):
            diagnose(block, halved, batches(), steps=2, precision=given)
    for judge in (
        lambda: diagnose(block.half(), halved, batches(), steps=2),
        lambda: watching(block.half(), halved, torch.optim.SGD(block.parameters(), 0.1)),
    ):
        with pytest.raises(DiagnoseError, match='hand it over in float32 with precision="16-mixed"'):
            judge()


class Rotary(nn.Module):
    """[B, T, C] rotated by angles that are made at each call, or looked up; ``few``: made in bfloat16."""

    def __init__(self, stored=False, few=False):
        super().__init__()
        self.project, self.few = nn.Linear(32, 32), few
        if stored:
            self.register_buffer("table", self.angles(16))
        self.stored = stored

    def angles(self, length):
        dtype = torch.bfloat16 if self.few else torch.float32
        inverse = 1 / 10000 ** (torch.arange(0, 32, 2).to(dtype) / 32)
        angles = (torch.arange(length).to(dtype)[:, None] * inverse).repeat(1, 2)
        return torch.stack([angles.cos(), angles.sin()])

    def forward(self, x):
        h = self.project(x)
        cos, sin = (self.table if self.stored else self.angles(x.shape[1])).to(h.dtype)
        one, other = h.chunk(2, -1)
        return h * cos + torch.cat([-other, one], -1) * sin


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "bf16-mixed"])
def test_a_table_that_is_rounded_with_the_network_is_rounding(precision):
    torch.manual_seed(0)
    made, stored = Rotary(), Rotary(stored=True)
    stored.project = copy.deepcopy(made.project)
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    assert_equivalent(made, stored, x, precision=precision)
    assert_equivalent(stored, made, x, precision=precision)


def test_angles_in_bfloat16_are_fewer_bits():
    torch.manual_seed(0)
    made, few = Rotary(), Rotary(few=True)
    few.project = copy.deepcopy(made.project)
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="fewer bits than the reference"):
        assert_equivalent(made, few, x, precision="16-true")
