"""Arms in 16 bits against plain loops as torch's documentation writes them; their control and verdict."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.lockstep.arm import grow
from driftlab.lockstep.checkpoint import save_checkpoint
from driftlab.lockstep.control import computed_one_unit_off
from driftlab.lockstep.loop import Lockstep
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.rules import judge
from models.rewrites.under_autocast import Clamp
from tests.driftlab.lockstep.test_lockstep import load_checkpoint

STEPS = 5
MIXED = ("bf16-mixed", "16-mixed")
ALL = (*MIXED, "bf16-true")
FEW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": torch.bfloat16}
LARGE = 30.0  # times a loss: at the scale of 2^16 some gradient is beyond float16


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def large_loss(outputs, targets):
    return LARGE * F.cross_entropy(outputs, targets)


def by_hand(precision, loss):
    """Losses, weights at the end and skipped updates of a training as torch's AMP recipes write it."""
    module = network().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    optimizer, losses, skipped = adam(module), [], 0
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    for step in range(STEPS + 1):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", FEW[precision], enabled=precision in MIXED):
            value = loss(module(inputs.to(next(module.parameters()).dtype)), targets)
        losses.append(value.item())
        if step == STEPS:
            break
        scaler.scale(value).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    return losses, [p.detach() for p in module.parameters()], skipped


def trained(dtypes, candidate=None, loss=F.cross_entropy, steps=STEPS, network=network):
    reference = network()
    arms = grow(
        reference,
        candidate or copy.deepcopy(reference),
        optimizer=adam,
        horizons=dict.fromkeys(dtypes, steps),
    )
    return walked(Lockstep(arms, loss))


def walked(lockstep, start=0, stop=None):
    for step in range(start, lockstep.steps + 1 if stop is None else stop):
        lockstep.forward_backward(step, *batch(step))
        lockstep.update(step)
    lockstep.flush()
    return lockstep


def record(lockstep, seed=0):
    arms = {
        a.name: {"blown_up_at": a.blown_up_at, "against": a.against and a.against.name} for a in lockstep.arms
    }
    return SeedRecord(
        seed, [{"step": s, **row} for s, row in sorted(lockstep.rows.items())], [], {"arms": arms}
    )


def arm(lockstep, name):
    return next(a for a in lockstep.arms if a.name == name)


@pytest.mark.parametrize("precision", ALL)
@pytest.mark.parametrize("loss", [F.cross_entropy, large_loss])
def test_an_arm_is_the_training_that_a_plain_loop_makes(precision, loss):
    lockstep = trained(["float32", precision], loss=loss)
    losses, weights, skipped = by_hand(precision, loss)
    mine = arm(lockstep, f"reference.{precision}")
    column = f"loss/reference.{precision}"
    assert [lockstep.rows[s][column] for s in range(STEPS + 1)] == losses
    for own, other in zip(mine.module.parameters(), weights, strict=True):
        assert own.dtype == other.dtype
        assert torch.equal(own, other)
    assert mine.skipped == skipped
    if precision == "16-mixed":
        counted = [lockstep.rows[s][f"skipped_updates/reference.{precision}"] for s in range(STEPS + 1)]
        assert counted[0] == 0
        assert counted[-1] == skipped
        assert (skipped > 0) == (loss is large_loss)


def test_the_gradients_that_are_measured_and_clipped_are_those_of_the_loss():
    norms = []
    arms = grow(
        network(),
        None,
        optimizer=adam,
        horizons={"float32": 1, "16-mixed": 1},
        controls=(),
        clip=lambda module: norms.append(nn.utils.clip_grad_norm_(module.parameters(), 1e9)),
    )
    walked(Lockstep(arms, F.cross_entropy))
    wide, few = norms
    assert float(few) == pytest.approx(float(wide), rel=0.01)


def test_each_reference_stands_against_the_next_wider_one():
    lockstep = trained(["float32", "float64", *ALL], steps=1)
    against = {a.name: a.against and a.against.name for a in lockstep.arms}
    assert against["reference.float64"] is None
    assert against["reference.float32"] == "reference.float64"
    for precision in ALL:
        assert against[f"reference.{precision}"] == "reference.float32"
        assert against[f"candidate.{precision}"] == f"reference.{precision}"
        assert against[f"control.{precision}"] == f"reference.{precision}"


@pytest.mark.parametrize("precision", ALL)
def test_the_control_computes_otherwise_and_holds_the_reference(precision):
    lockstep = trained(["float32", precision], steps=3)
    first, last = lockstep.rows[0], lockstep.rows[3]
    assert first[f"weight_distance/control.{precision}"] == 0
    assert first[f"logit_distance/control.{precision}"] > torch.finfo(FEW[precision]).eps / 8
    assert last[f"weight_distance/control.{precision}"] > 0


@pytest.mark.parametrize("few", [torch.bfloat16, torch.float16])
def test_inside_every_weight_is_one_unit_off_and_behind_it_what_it_was(few):
    module, before = network(), network().state_dict()
    with computed_one_unit_off(module, few, seed=1):
        for name, parameter in module.named_parameters():
            own, moved = before[name].to(few), parameter.detach().to(few)
            numbers = own != 0
            next_to = [torch.nextafter(own, torch.full_like(own, s * math.inf)) for s in (1, -1)]
            assert bool(((moved == next_to[0]) | (moved == next_to[1]))[numbers].all())
            assert torch.equal(parameter.detach()[~numbers], before[name][~numbers])
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("precision", ALL)
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path, precision):
    whole = trained(["float32", precision], loss=large_loss)
    half = walked(fresh(precision), stop=2)
    save_checkpoint(half, 2, tmp_path)
    resumed = fresh(precision)
    walked(resumed, start=load_checkpoint(resumed, tmp_path))
    rest = {s: whole.rows[s] for s in range(2, STEPS + 1)}
    assert repr(rest) == repr(resumed.rows)  # NaN, where scaled gradients overflowed, is no number's equal
    for own, other in zip(whole.arms, resumed.arms, strict=True):
        assert own.skipped == other.skipped
        for mine, theirs in zip(own.module.parameters(), other.module.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def fresh(precision, device="cpu"):
    reference = network()
    options = {"optimizer": adam, "horizons": {"float32": STEPS, precision: STEPS}, "device": device}
    return Lockstep(grow(reference, copy.deepcopy(reference), **options), large_loss)


class Hooked(nn.Module):
    """A layer whose output, or its gradient, is changed in 16 bits alone."""

    def __init__(self, layer, change, device="cpu"):
        super().__init__()
        self.layer, self.change, self.device = layer, change, device

    def forward(self, x):
        out = self.layer(x)
        in_16_bits = torch.is_autocast_enabled(self.device) or self.layer.weight.dtype is torch.bfloat16
        return self.change(out) if in_16_bits else out


class InChunks(nn.Linear):
    """The same layer, each half of the inputs by itself, the two sums rounded before they meet."""

    def forward(self, x):
        half = self.in_features // 2
        halves = (x[:, :half] @ self.weight[:, :half].T) + (x[:, half:] @ self.weight[:, half:].T)
        return halves + self.bias


def rewritten(change, device="cpu"):
    module = network()
    module[0] = Hooked(module[0], change, device)
    return module


def in_chunks():
    module = network()
    module[3].__class__ = InChunks
    return module


def evidence(lockstep, probe):
    return next(e for e in judge([record(lockstep)]).evidence if e.probe == probe)


@pytest.mark.parametrize("precision", ALL)
def test_a_right_rewrite_stays_with_the_control_and_a_wrong_one_does_not(precision):
    right = evidence(trained(["float32", "float64", precision], in_chunks()), f"{precision}_pair")
    assert right.supports == "round_off"
    assert right.measured < 2
    if precision in MIXED:
        wrong = trained(
            ["float32", "float64", precision], rewritten(lambda out: out.flip(-1)), network=unfolded
        )
        assert judge([record(wrong)]).verdict == "bug"
        assert judge([record(wrong)]).headline.startswith("not the same function in 16 bits")


def unfolded():
    return rewritten(lambda out: out)


def test_a_candidate_that_overflows_float16_skips_updates():
    grows = trained(
        ["float32", "float64", "16-mixed"],
        rewritten(lambda out: Grown.apply(out)),
        network=unfolded,
    )
    found = evidence(grows, "16-mixed_skipped")
    assert (found.supports, found.measured) == ("bug", STEPS)
    assert found.reading.endswith(f"candidate {STEPS}, reference 0, control 0")


class Grown(torch.autograd.Function):
    """The identity; on its way back a number beyond float16 is come by."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full_like(gradient, 60000.0) * 60000.0 / 60000.0**2


def test_a_clamp_that_only_a_scaled_loss_reaches_is_found_with_its_layer():
    batches = [batch(step) for step in range(4)]
    wrong = rewritten(Clamp.apply)
    plain = diagnose(unfolded(), wrong, batches, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), steps=2)
    assert plain.verdict == "bit_identical"
    found = diagnose(unfolded(), wrong, batches, steps=2, precision="16-mixed")
    assert (found.verdict, found.where.module) == ("bug", "0")
    assert next(e for e in found.evidence if e.probe == "scaled_loss").measured > 0.1
    assert diagnose(unfolded(), unfolded(), batches, steps=2, precision="16-mixed").verdict == "bit_identical"


def test_one_update_more_that_overflows_is_no_difference():
    lockstep = trained(["float32", "float64", "16-mixed"])
    found = record(lockstep)
    for row in found.curves[1:]:
        row["skipped_updates/candidate.16-mixed"] = 1.0
    found.curves[0]["gradient_distance/candidate.16-mixed"] = math.nan
    judgement = judge([found])
    assert judgement.verdict in ("round_off", "bit_identical")
    (skipped,) = (e for e in judgement.evidence if e.probe == "16-mixed_skipped")
    assert (skipped.measured, skipped.supports) == (1.0, "round_off")
