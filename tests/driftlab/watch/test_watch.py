"""Watching a loop of one's own: late faults are found, right rewrites are not accused, nothing changes."""

import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from driftlab import DiagnoseError, Verdict, watching
from tests.driftlab.watch.rewrites import counting, network, rewritten

MUCH = 1e9  # every look that is due is paid


def train(updates, optimizer, watch=None, at=lambda step: None):
    """Batches from a generator, dropout and shuffling from torch's, NumPy's and Python's random states."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    model, seen = network(), []
    steps = optimizer(model.parameters())
    with watch(model, steps) if watch else _nothing() as watched:
        for step in range(updates):
            at(step)
            x = torch.randn(16, 20) + np.random.rand() + random.random()
            y = torch.randint(5, (16,))
            if watched:
                watched.step(x, y)
            steps.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            steps.step()
            seen.append(loss.item())
    return watched, seen, [p.detach().clone() for p in model.parameters()]


class _nothing:  # noqa: N801
    def __enter__(self):
        return None

    def __exit__(self, *error):
        return None


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_an_update_gathers_the_gradients_of_several_batches():
    torch.manual_seed(1)
    model = network().eval()  # without dropout
    steps, losses = sgd(model.parameters()), []
    batches = [(torch.randn(16, 20), torch.randint(5, (16,))) for _ in range(12)]
    with watching(model, rewritten(), steps, budget=MUCH, updates=1, accumulate=3) as watched:
        for number, (x, y) in enumerate(batches):
            looked = watched.step(x, y)
            assert not (looked and number % 3)  # before the first batch of an update
            loss = F.cross_entropy(model(x), y)
            (loss / 3).backward()
            losses.append(loss.item())
            if number % 3 == 2:
                last = [F.cross_entropy(model(x), y).item() for x, y in batches[number - 2 : number + 1]]
                steps.step(), steps.zero_grad()
    assert [look.step for look in watched.looks] == [0, 1, 2, 3, 4]
    assert watched.steps == 4
    assert watched.diagnosis.verdict is Verdict.ROUND_OFF
    # the look at the end is on the last batches, with the weights after the last update
    expected = sum(F.cross_entropy(model(x), y).item() for x, y in batches[-3:]) / 3
    assert watched.looks[-1].diagnosis.curves[0]["loss/reference.float32"] == pytest.approx(expected)
    assert sum(last) / 3 != pytest.approx(expected)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_the_training_is_the_same_to_the_last_bit(optimizer):
    watch = lambda model, steps: watching(model, rewritten(), steps, budget=MUCH, updates=2)  # noqa: E731
    watched, losses, weights = train(12, optimizer, watch)
    assert len(watched.looks) >= 4
    _, alone, expected = train(12, optimizer)
    assert losses == alone
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_right_rewrite_is_right_wherever_the_training_is():
    watch = lambda model, steps: watching(model, rewritten(), steps, budget=MUCH, updates=3)  # noqa: E731
    watched, *_ = train(40, adamw, watch)
    assert {look.diagnosis.verdict for look in watched.looks} <= {Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL}
    assert watched.diagnosis.verdict is Verdict.ROUND_OFF
    assert watched.looks[-1].step == 40
    assert f"{len(watched.looks)} from 0 to 40" in watched.diagnosis.headline


@pytest.mark.parametrize("how", ["attribute", "buffer", "overflow", "neither"])
def test_a_fault_that_waits_for_the_candidates_own_count(how):
    late = counting(how, 23)
    watch = lambda model, steps: watching(model, late, steps, budget=MUCH, updates=2)  # noqa: E731
    watched, *_ = train(40, sgd, watch)
    found = watched.diagnosis
    assert "taken as counted since step 0: 0.calls, 0.seen, 0.total" in found.headline
    if how == "neither":
        assert found.verdict is Verdict.ROUND_OFF
        return
    assert found.verdict is Verdict.BUG
    assert found.where.module == "0"
    first = next(look.step for look in watched.looks if look.step + 2 >= 23)  # a look follows two updates
    assert next(k.step for k in watched.looks if k.diagnosis.verdict is Verdict.BUG) == first


def test_a_training_that_goes_on_is_counted_from_where_it_began():
    watch = lambda model, steps: watching(model, counting("buffer", 23), steps, budget=MUCH, begins=30)  # noqa: E731
    watched, *_ = train(2, sgd, watch)
    assert watched.looks[0].step == 30
    assert watched.looks[0].diagnosis.verdict is Verdict.BUG


@pytest.mark.parametrize(("clip", "moves"), [(None, True), (1e-12, False)])
def test_a_look_clips_as_it_is_told(clip, moves):
    watch = lambda model, steps: watching(model, rewritten(), steps, budget=MUCH, clip=clip)  # noqa: E731
    watched, *_ = train(1, lambda parameters: torch.optim.SGD(parameters, lr=0.1), watch)
    losses = [row["loss/reference.float64"] for row in watched.looks[0].diagnosis.curves]
    assert (losses[-1] < losses[0] - 1e-3) == moves


@pytest.mark.parametrize("sets_in", [7, 23])
def test_a_late_fault_is_found_at_the_first_look_after_it(sets_in):
    now = [0]
    late = rewritten(lambda: now[0] >= sets_in)
    watch = lambda model, steps: watching(model, late, steps, budget=MUCH, updates=2)  # noqa: E731
    watched, *_ = train(30, sgd, watch, at=lambda step: now.__setitem__(0, step))
    found = watched.diagnosis
    assert found.verdict is Verdict.BUG
    looked = [look.step for look in watched.looks]
    first = next(step for step in looked if step >= sets_in)
    assert (found.where.module, found.where.pass_, found.where.step) == ("0", "forward", first)
    before = max(step for step in looked if step < sets_in)
    assert f"found at step {first}, and not yet at step {before}" in found.headline
    assert f"since step {first}" in found.headline
    told = [found.headline.partition(";")[0], *(e.text for e in found.evidence)]
    assert all(int(step) >= first for text in told for step in re.findall(r"\bstep (\d+)", text))


def test_looks_keep_to_their_share():
    def watch(model, steps):
        watched = watching(model, rewritten(), steps, budget=0.05, updates=2)
        watched._began -= 30 * 60  # as if the training had run for half an hour
        return watched

    watched, *_ = train(10, sgd, watch)
    assert len(watched.looks) > 1
    assert watched.seconds <= 0.05 * 31 * 60
    unpaid, *_ = train(10, sgd, lambda m, s: watching(m, rewritten(), s, budget=1e-6, updates=2))
    assert [look.step for look in unpaid.looks] == [0]
    assert "nothing is known of the rest of 10" in unpaid.diagnosis.headline
    assert "nothing is known" not in watched.diagnosis.headline


def test_before_the_first_step_there_is_nothing():
    model = network()
    assert watching(model, rewritten(), sgd(model.parameters())).diagnosis is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"candidate": network()}, "candidate is a Sequential: give the function"),
        ({"optimizer": 3}, "optimizer is a int: give the model's"),
        ({"budget": 0}, "budget is 0: give a share"),
        ({"updates": "many"}, "updates=.many.: give a whole number"),
    ],
)
def test_what_is_no_argument_is_one_line(change, said):
    model = network()
    options = {"candidate": rewritten(), "optimizer": sgd(model.parameters())} | change
    with pytest.raises(DiagnoseError, match=said):
        watching(model, options.pop("candidate"), options.pop("optimizer"), **options)


def test_a_look_that_fails_costs_no_training_and_is_no_good_verdict():
    made = []

    def rewrite(model):
        made.append(1)
        if len(made) > 4:
            raise ValueError("not twice")
        return rewritten()(model)

    watch = lambda model, steps: watching(model, rewrite, steps, budget=MUCH, updates=2)  # noqa: E731
    with pytest.warns(UserWarning, match="not twice"):
        watched, losses, _ = train(8, sgd, watch)
    assert len(losses) == 8
    assert watched.diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "not twice" in watched.diagnosis.headline

    def at_once(model):
        raise ValueError("never")

    with pytest.raises(DiagnoseError, match="never"):
        train(2, sgd, lambda model, steps: watching(model, at_once, steps))


def test_an_error_of_the_training_is_its_own():
    model = network()
    with pytest.raises(ZeroDivisionError), watching(model, rewritten(), sgd(model.parameters())):
        raise ZeroDivisionError


class Drawn(torch.nn.Module):
    """The size of its outputs is drawn at each call, over three decades."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x) * 10 ** (3 * torch.rand(()).to(x))


def drawn(model):
    model.net = rewritten()(model.net)
    return model


def test_a_look_at_noisy_losses_is_no_training_that_falls_over():
    torch.manual_seed(1)
    model = Drawn()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with watching(model, drawn, optimizer, budget=MUCH, updates=3) as watched:
        for _ in range(5):
            watched.step(torch.randn(16, 20), torch.randint(5, (16,)))
    losses = [[row["loss/reference.float32"] for row in k.diagnosis.curves] for k in watched.looks]
    assert any(one[-1] > 2 * one[0] for one in losses)
    assert {k.diagnosis.verdict for k in watched.looks} == {Verdict.ROUND_OFF}
