"""The loop against naive loops: one network at a time, distances by hand."""

import copy
import dataclasses
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from driftlab import measures
from driftlab.arithmetic.kinks import kink_sides, sign_flips
from driftlab.lockstep.arm import grow
from driftlab.lockstep.checkpoint import read_checkpoint, save_checkpoint
from driftlab.lockstep.loop import FLUSH_EVERY, Lockstep
from driftlab.measures.loss import MEASURE as LOSS
from driftlab.record.seed_record import RecordError
from suite.running.building import LogSchedule

STEPS = 7


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 3, 6, 6, generator=generator), torch.randint(0, 4, (12,), generator=generator)


def network(dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(20, 4),
    )


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)


def lockstep(reference=None, candidate=None, horizons=None, **options):
    reference = reference or network()
    candidate = candidate or copy.deepcopy(reference)
    horizons = horizons or {"float32": STEPS, "float64": 4}
    longest = max(horizons.values())
    scheduler = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, longest)  # noqa: E731
    arms = grow(reference, candidate, optimizer=sgd, horizons=horizons, scheduler=scheduler)
    return Lockstep(arms, F.cross_entropy, **options)


def load_checkpoint(steps, folder):
    """Puts every arm back; the step to go on with."""
    checkpoint = read_checkpoint(folder)
    checkpoint.restore(steps)
    return checkpoint.next_step


def run(steps, start=0, stop=None):
    for step in range(start, steps.steps + 1 if stop is None else stop):
        steps.forward_backward(step, *batch(step))
        steps.update(step)
    steps.flush()
    return steps


def naive_curve(module, dtype, updates):
    """Weights before each update and losses of one network trained alone."""
    module = copy.deepcopy(module).to(dtype)
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses, weights, gradients = [], [], []
    for step in range(updates + 1):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs.to(dtype)), targets)
        loss.backward()
        losses.append(loss.item())
        weights.append(torch.cat([p.detach().double().flatten() for p in module.parameters()]))
        gradients.append(torch.cat([p.grad.double().flatten() for p in module.parameters()]))
        if step < updates:
            optimizer.step()
            scheduler.step()
    return losses, weights, gradients


def test_every_arm_trains_as_it_would_alone():
    steps = run(lockstep())
    for name, dtype, updates in (
        ("reference.float32", torch.float32, STEPS),
        ("reference.float64", torch.float64, 4),
    ):
        losses, _, _ = naive_curve(network(), dtype, updates)
        assert [steps.rows[s][f"loss/{name}"] for s in range(updates + 1)] == losses


def test_distances_are_those_of_networks_trained_alone():
    steps = run(lockstep())
    _, narrow, narrow_gradients = naive_curve(network(), torch.float32, STEPS)
    _, wide, wide_gradients = naive_curve(network(), torch.float64, 4)
    for s in range(5):
        weight = float((narrow[s] - wide[s]).norm() / wide[s].norm())
        gradient = float((narrow_gradients[s] - wide_gradients[s]).norm() / wide_gradients[s].norm())
        assert steps.rows[s]["weight_distance/reference.float32"] == pytest.approx(weight, rel=1e-12)
        assert steps.rows[s]["gradient_distance/reference.float32"] == pytest.approx(gradient, rel=1e-12)


def test_an_equal_candidate_is_at_distance_zero_and_the_control_is_not():
    rows = run(lockstep()).rows
    for row in rows.values():
        values = [v for c, v in row.items() if "/candidate" in c and not c.startswith(("loss", "accuracy"))]
        assert len(values) >= 4
        assert set(values) == {0.0}
    assert 0 < rows[0]["weight_distance/control.float32"] < 2**-23
    assert 0 < rows[0]["weight_distance/control.float64"] < 2**-52


def test_an_arm_ends_at_its_horizon_with_a_row_after_its_last_update():
    rows = run(lockstep()).rows
    assert max(s for s, row in rows.items() if "loss/reference.float64" in row) == 4
    assert sorted(rows) == list(range(STEPS + 1))
    assert "weight_distance/reference.float32" not in rows[5]
    assert "weight_distance/candidate.float32" in rows[5]


def test_sign_flips_against_counting_one_by_one():
    reference = network()
    moved = copy.deepcopy(reference)
    with torch.no_grad():
        moved[0].weight[0] += 0.05
    inputs, _ = batch(0)
    flips, winners = 0, 0
    a, b = (m[1](m[0](inputs)) for m in (reference, moved))
    for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True):
        flips += (x > 0) != (y > 0)
    _, p = F.max_pool2d_with_indices(a.relu(), 2)
    _, q = F.max_pool2d_with_indices(b.relu(), 2)
    winners = int((p != q).sum())
    recorded = []
    for m in (reference, moved):
        recorded.append(kink_sides(m(inputs).sum()))
    assert flips + winners > 0
    assert float(sign_flips(*recorded)) == flips + winners


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (F.relu, torch.bool),
        (lambda x: x.relu(), torch.bool),
        (lambda x: (x * 1).relu_(), torch.bool),
        (lambda x: nn.ReLU(inplace=True)(x * 1), torch.bool),
        (F.leaky_relu, torch.bool),
        (F.relu6, torch.bool),
        (nn.PReLU(), torch.bool),
        (lambda x: F.threshold(x, 0.0, 0.0), torch.bool),
        (lambda x: F.max_pool2d(x, 2), torch.int64),
        (nn.MaxPool2d(2), torch.int64),
        (lambda x: F.max_pool1d(x[0], 2), torch.int64),
        (nn.AdaptiveMaxPool2d(1), torch.int64),
    ],
)
def test_kinks_are_seen_in_modules_and_functions_alike(call, dtype):
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sides = kink_sides(call(x).sum())
    if dtype == torch.bool:
        assert torch.equal(sides.signs, (x > 0).flatten())
    else:
        (winners,) = sides.winners
        assert winners.dtype == dtype


def test_a_smooth_network_has_no_kinks():
    smooth = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))
    sides = kink_sides(smooth(torch.randn(5, 3)).sum())
    assert sides.shapes == ()
    assert float(sign_flips(sides, sides)) == 0


def test_kinks_come_in_the_order_of_the_forward_pass():
    x = torch.randn(8, requires_grad=True)
    first = F.relu(x)
    second = F.relu(first - 0.5)
    sides = kink_sides(first.sum() + second.sum() * 2)
    assert torch.equal(sides.signs, torch.cat([x > 0, x > 0.5]))


@pytest.mark.parametrize("size", range(1, 20))
def test_flips_are_counted_exactly_whatever_the_size(size):
    generator = torch.Generator().manual_seed(size)
    x, y = (torch.randn(3, size, generator=generator, requires_grad=True) for _ in range(2))
    flips = sign_flips(*(kink_sides(F.relu(t).sum()) for t in (x, y)))
    assert float(flips) == int(((x > 0) != (y > 0)).sum())


def test_kinks_of_other_shapes_cannot_be_paired():
    x = torch.randn(2, 6, requires_grad=True)
    assert sign_flips(kink_sides(F.relu(x).sum()), kink_sides(F.relu(x[:, :3]).sum())) is None


class Exploding(nn.Module):
    """Answers NaN from its third training call on."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += self.training
        return self.inner(x) * (torch.nan if self.calls > 2 else 1.0)


def test_an_arm_that_blows_up_stops_and_the_others_go_on():
    candidate = Exploding(network())
    arms = grow(
        network(),
        candidate,
        optimizer=sgd,
        horizons={"float32": STEPS},
        fold=lambda t: {k.removeprefix("inner."): v for k, v in t.items()},
    )
    steps = run(Lockstep(arms, F.cross_entropy))
    blown = {arm.name: arm.blown_up_at for arm in steps.arms}
    assert blown == {"reference.float32": None, "candidate.float32": 2, "control.float32": None}
    assert math.isnan(steps.rows[2]["loss/candidate.float32"])
    assert "loss/candidate.float32" not in steps.rows[3]
    assert math.isfinite(steps.rows[STEPS]["loss/control.float32"])
    weights = next(a for a in steps.arms if a.role == "candidate").module.parameters()
    assert all(torch.isfinite(p).all() for p in weights)


def test_the_record_does_not_depend_on_when_the_device_is_waited_for(monkeypatch):
    def rows(flush_every):
        monkeypatch.setitem(FLUSH_EVERY, "cpu", flush_every)
        arms = grow(Exploding(network()), network(), optimizer=sgd, horizons={"float32": STEPS}, controls=())
        arms[1].fold = lambda t: {f"inner.{k}": v for k, v in t.items()}
        return run(Lockstep(arms, F.cross_entropy)).rows

    at_once, late = rows(1), rows(100)
    assert at_once.keys() == late.keys()
    for step, row in at_once.items():
        assert row.keys() == late[step].keys()
        assert all(
            a == b or (a != a and b != b) for a, b in zip(row.values(), late[step].values(), strict=True)
        )


class Waits(TorchDispatchMode):
    """Lists what a GPU would be waited for."""

    calls = torch.ops.aten
    waiting = (calls._local_scalar_dense.default, calls.equal.default, calls.nonzero.default)

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if call in self.waiting:
            self.seen.append(str(call))
        return call(*args, **(kwargs or {}))


def test_a_steady_step_waits_for_no_device(monkeypatch):
    monkeypatch.setitem(FLUSH_EVERY, "cpu", 100)
    steps = lockstep(network(dropout=0.5))
    for step in range(2):
        steps.forward_backward(step, *batch(step))
        steps.update(step)
    with Waits() as waits:
        steps.forward_backward(2, *batch(2))
    assert waits.seen == []
    with waits:
        steps.evaluate(3, [batch(3)])
    assert waits.seen


def test_random_layers_draw_the_same_masks_in_every_arm():
    rows = run(lockstep(network(dropout=0.5), horizons={"float32": STEPS})).rows
    assert all(row["logit_distance/candidate.float32"] == 0 for row in rows.values())
    assert rows[0]["logit_distance/control.float32"] < 1e-5


@pytest.mark.parametrize("cut", [1, 3, 5, 7])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path, cut, dropout):
    whole = run(lockstep(network(dropout)))
    first = run(lockstep(network(dropout)), stop=cut)
    save_checkpoint(first, cut, tmp_path)
    second = lockstep(network(dropout))
    assert load_checkpoint(second, tmp_path) == cut
    run(second, start=cut)
    assert first.rows | second.rows == whole.rows
    for a, b in zip(whole.arms, second.arms, strict=True):
        for x, y in zip(a.module.state_dict().values(), b.module.state_dict().values(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_other_optimizers_resume_too(tmp_path, make):
    def steps():
        arms = grow(
            network(), None, optimizer=lambda m: make(m.parameters(), lr=1e-2), horizons={"float32": 6}
        )
        return Lockstep(arms, F.cross_entropy)

    whole, first, second = run(steps()), run(steps(), stop=3), steps()
    save_checkpoint(first, 3, tmp_path)
    run(second, start=load_checkpoint(second, tmp_path))
    assert whole.rows[6] == second.rows[6]


def test_a_damaged_checkpoint_is_named(tmp_path):
    steps = run(lockstep(), stop=2)
    save_checkpoint(steps, 2, tmp_path)
    file = tmp_path / "state.safetensors"
    data = file.read_bytes()
    for damaged in (data[: len(data) // 2], b"", b"\0" * 100, data[:8] + b"x" + data[9:]):
        file.write_bytes(damaged)
        with pytest.raises(RecordError, match=r"state\.safetensors is damaged"):
            load_checkpoint(lockstep(), tmp_path)


def test_a_checkpoint_of_other_arms_is_refused(tmp_path):
    save_checkpoint(run(lockstep(), stop=2), 2, tmp_path)
    other = lockstep(horizons={"float32": STEPS})
    with pytest.raises(RecordError, match="not those of this experiment"):
        load_checkpoint(other, tmp_path)


def test_the_log_schedule_is_dense_then_even_in_the_logarithm():
    schedule = LogSchedule(dense=200, per_decade=200)
    logged = [s for s in range(80_001) if schedule(s)]
    assert logged[:200] == list(range(200))
    assert 650 < len(logged) < 800
    gaps = [math.log10(b / a) for a, b in pairwise(logged[300:])]
    assert max(gaps) < 3 / 200
    assert all(LogSchedule(dense=10**9)(s) for s in (0, 1, 12345))


def test_thinned_rows_equal_the_dense_ones():
    dense = run(lockstep())
    thin = run(lockstep(logged=LogSchedule(dense=2, per_decade=3)))
    assert set(thin.rows) < set(dense.rows)
    assert {0, 1, 4, STEPS} <= set(thin.rows)
    assert all(dense.rows[s] == row for s, row in thin.rows.items())


def test_an_evaluation_is_what_each_network_says_alone_in_eval_mode():
    candidate = network()
    with torch.no_grad():
        candidate[-1].weight[0] += 0.5
    steps = lockstep(network(), candidate)
    before = copy.deepcopy([arm.module.state_dict() for arm in steps.arms])
    images = [batch(100), batch(101)]
    row = steps.evaluate(0, images)
    inputs, targets = (torch.cat(parts) for parts in zip(*images, strict=True))
    mine, theirs = (m.eval()(inputs).detach().double() for m in (candidate, network()))
    apart = float((mine.argmax(1) != theirs.argmax(1)).double().mean())
    assert apart > 0
    assert row["disagreement/candidate.float32"] == apart
    assert row["test_accuracy/candidate.float32"] == float((mine.argmax(1) == targets).double().mean())
    distance = float((mine - theirs).norm() / theirs.norm())
    assert row["eval_logit_distance/candidate.float32"] == pytest.approx(distance, rel=1e-6)
    assert row["buffer_distance/candidate.float32"] == 0
    assert "disagreement/reference.float64" not in row
    for arm, state in zip(steps.arms, before, strict=True):
        assert arm.module.training
        assert all(torch.equal(t, state[n]) for n, t in arm.module.state_dict().items())


def test_without_targets_an_evaluation_holds_distances_alone():
    row = lockstep().evaluate(0, [(batch(0)[0], None)])
    assert {column.split("/")[0] for column in row} == {"eval_logit_distance", "buffer_distance"}


def test_two_measures_of_one_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "again.py").write_text("from driftlab.measures.loss import MEASURE")
    monkeypatch.setattr(measures, "__path__", [*measures.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match="declared twice among the measures: loss"):
        measures.every_measure.__wrapped__()


@pytest.mark.parametrize("layout", ["tokens", "pixels", "scores of no class"])
def test_classes_are_told_of_tokens_and_pixels_too(layout):
    """Scores [N, T, classes] and [N, classes, H, W]; a target of -100 does not count."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 5)

        def forward(self, x):  # [12, 3, 6, 6]
            scores = self.head(x)
            return scores.movedim(-1, 1) if layout == "pixels" else scores.flatten(1, 2)

    def loss(outputs, targets):
        return F.cross_entropy(
            outputs if layout == "pixels" else outputs.flatten(0, 1),
            targets.flatten(0, 0 if layout == "pixels" else 1),
        )

    torch.manual_seed(0)
    reference, candidate = Head(), Head()
    targets = torch.randint(0, 5, (12, 3, 6) if layout == "pixels" else (12, 18))
    targets[0] = -100
    if layout == "scores of no class":
        loss, targets = (lambda outputs, targets: outputs.square().mean()), torch.zeros(12, dtype=torch.long)
    steps = Lockstep(grow(reference, candidate, optimizer=sgd, horizons={"float32": 1}), loss)
    inputs = batch(0)[0]
    steps.forward_backward(0, inputs, targets)
    row = steps.evaluate(0, [(inputs, targets)])
    steps.flush()
    if layout == "scores of no class":
        assert "accuracy/reference.float32" not in steps.rows[0]
        assert "disagreement/candidate.float32" not in row
        return
    mine, other = (m(inputs).argmax(1 if layout == "pixels" else 2) for m in (reference, candidate))
    right = sum(int(a == b) for a, b in zip(mine.flatten(), targets.flatten(), strict=True) if b != -100)
    apart = sum(
        int(a != b)
        for a, b, t in zip(mine.flatten(), other.flatten(), targets.flatten(), strict=True)
        if t != -100
    )
    counted = int((targets != -100).sum())
    assert steps.rows[0]["accuracy/reference.float32"] == right / counted
    assert row["test_accuracy/reference.float32"] == right / counted
    assert row["disagreement/candidate.float32"] == apart / counted


def test_a_measure_that_no_dashboard_would_show_is_refused():
    with pytest.raises(ValueError, match="loss: there is no section 'Elsewhere'"):
        dataclasses.replace(LOSS, section="Elsewhere")
