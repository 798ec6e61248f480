"""The page of a long run: what is said of a training on its way, and how often that is right."""

import pytest

from driftlab.probes.local_windows import PROBE
from driftlab.record.seed_record import SeedRecord
from driftlab.words import Place, Verdict
from scripts.long_run_parts.answer import answer
from scripts.long_run_parts.rules import RULES, Network, free_pair_stays, until
from scripts.long_run_parts.words import scores
from suite.reading.judging import write_shown

BEGINS, STEPS, WINDOWS = 50, 400, (10, 100, 380)
SAYS = {rule.key: rule.same for rule in RULES}
ARMS = {
    f"{role}.{dtype}": {"blown_up_at": None, "against": against and f"{against}.{dtype}", "horizon": STEPS}
    for dtype in ("float64", "float32")
    for role, against in (("reference", None), ("candidate", "reference"), ("control", "reference"))
}


def distances(step, wrong):
    """A control that drifts by 1e-16 a step; the candidate leaves it for good once it is ``wrong``."""
    row = {}
    for kind in ("weight_distance", "gradient_distance", "logit_distance"):
        row |= {f"{kind}/control.float64": 1e-16 * (step + 1), f"{kind}/control.float32": 1e-7 * (step + 1)}
        row |= {f"{kind}/candidate.float64": 1e-4 if wrong else 5e-17 * (step + 1)}
        row |= {f"{kind}/candidate.float32": 1e-7 * (step + 1)}
    return row | {"sign_flips/candidate.float32": 0}


def record(begins=None, seed=0, loss_off=0.0):
    """A training of ``STEPS`` updates whose candidate computes something else from the step ``begins`` on."""
    wrong = begins is not None
    rows = [{"step": s, "epoch": 0, **distances(s, wrong and s > begins)} for s in range(STEPS + 1)]
    for row in rows:
        row |= {f"loss/{arm}": 2.0 * (1 + (loss_off if arm.startswith("candidate") else 0)) for arm in ARMS}
    accuracy = {f"test_accuracy/{role}.float32": 0.5 for role in ("reference", "candidate", "control")}
    apart = {f"disagreement/{role}.float32": 0.1 for role in ("candidate", "control")}
    looks = [{"step": s, "epoch": 0, **accuracy, **apart} for s in (300, STEPS)]
    local = [
        {"step": b + k, "epoch": 0, "updates": k, **distances(k, wrong and b + k > begins)}
        for b in WINDOWS
        for k in range(7)
    ]
    place = Place("conv", "forward", step=begins) if wrong else None
    found = PROBE.finding(1.0, Verdict.BUG if wrong else Verdict.ROUND_OFF, "as was found", place)
    return SeedRecord(seed, rows, looks, {"arms": ARMS, "probes": [found.as_dict()]}, local=local)


def test_what_came_later_is_gone():
    early = until(record(BEGINS), 40)
    assert max(row["step"] for row in early.curves) == 40
    assert early.evaluations == []
    assert {row["step"] - row["updates"] for row in early.local} == {10}
    (found,) = early.found()
    assert found.evidence.supports is Verdict.ROUND_OFF
    (found,) = until(record(BEGINS), 200).found()
    assert found.evidence.supports is Verdict.BUG
    assert until(record(BEGINS), 5).found() == []


@pytest.mark.parametrize(("off", "same"), [(0.009, True), (-0.009, True), (0.011, False)])
def test_losses_are_compared_within_one_percent(off, same):
    late = record(loss_off=off)
    assert SAYS["loss"](late, 300) is same
    assert SAYS["tail"](late, 300) is same
    assert SAYS["double"](late, 300) is False
    assert SAYS["loss"](late, STEPS + 1) is None
    assert SAYS["tail"](late, STEPS + 1) is None  # one of its steps was not logged


def test_the_last_tenth_is_that_of_the_steps():
    late = record()
    for row in late.curves:
        row["loss/candidate.float32"] *= 2 if row["step"] <= 270 else 1
    assert SAYS["tail"](late, 300) is True
    late.curves[271]["loss/candidate.float32"] *= 2  # 1 of 30: 3 % more
    assert SAYS["tail"](late, 300) is False


def test_the_accuracy_is_asked_where_it_was_measured():
    assert [SAYS["accuracy"](record(), step) for step in (30, 300)] == [None, True]


def test_the_free_pair_and_the_windows_say_it_from_the_step_on():
    late = record(BEGINS)
    assert [free_pair_stays(late, step) for step in (BEGINS, BEGINS + 1, STEPS)] == [True, False, False]
    assert [SAYS["local"](late, step) for step in (15, 40, 105, 106)] == [None, True, True, False]


def test_a_fault_counts_once_it_has_set_in():
    networks = [Network("right", None, [record()]), Network("fault", BEGINS, [record(BEGINS)])]
    before, after = (scores(networks, step)["pair"] for step in (30, 300))
    assert (before.same, before.wrong, before.right) == (2, 0, 2)
    assert (after.same, after.wrong, after.right) == (1, 1, 2)


def test_the_page_says_where_each_ends(tmp_path):
    networks = [
        Network("right rewrite: convs split", None, [record(seed=s) for s in range(2)]),
        Network("fault: a conv", BEGINS, [record(BEGINS, seed=s) for s in range(2)]),
    ]
    shown = write_shown(tmp_path, answer(networks, STEPS))
    assert "The fault (a conv) ends as `bug` in 2 of 2 seeds, which it puts at step 50" in shown["sentence"]
    assert "the free-running float64 pair leaves its control in 2 of 2" in shown["sentence"]
    assert "The float64 control stays within 0.001 of the weights to its last step" in shown["sentence"]
    assert "1.28 times an update at step 10" in shown["sentence"]  # (7 / 2) ** (1 / 5) and rounding
    assert "It grows faster" not in shown["sentence"]
    assert (tmp_path / "figures" / "long_run.png").read_bytes().startswith(b"\x89PNG")
    ends = (tmp_path / "tables" / "ends.csv").read_text()
    assert "fault: a conv,2,bug 2" in ends
