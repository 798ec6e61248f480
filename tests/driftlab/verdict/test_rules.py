"""Verdicts on records made from a model of what the curves do, with the cause known."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.evidence import first_flip
from driftlab.verdict.outcomes import before_it_ran_away
from driftlab.verdict.rules import judge
from driftlab.verdict.statistics import mcnemar_exact
from driftlab.words import Verdict

STEPS, STEPS64 = 60, 20
ARMS = (
    "reference.float64",
    "candidate.float64",
    "control.float64",
    "reference.float32",
    "candidate.float32",
    "control.float32",
)
U = {"float32": 2.0**-24, "float64": 2.0**-53, "bf16-mixed": 2.0**-8}


def record(
    seed=0,
    *,
    size64=3.0,
    size32=3.0,
    late=None,
    blown=(),
    loss=lambda arm, s: 2.3 - 0.01 * s,
    arms=ARMS,
    evals=None,
):
    """Curves of one seed: distances in units of round-off, growing tenfold in ten steps up to 0.5."""

    def distance(arm, step):
        role, dtype = arm.split(".")
        size = {"control": 2.0, "reference": 5.0}.get(role, size64 if dtype == "float64" else size32)
        if late and role == "candidate" and step >= late[0]:
            return late[1]
        return min(0.5, size * U[dtype] * 10 ** (step / 10))

    rows = []
    for s in range(STEPS + 1):
        row = {"step": s, "epoch": 0}
        for arm in arms:
            if (arm.endswith("64") and s > STEPS64) or (arm in blown and s > 30):
                continue
            row[f"loss/{arm}"] = math.nan if arm in blown and s == 30 else loss(arm, s)
            if arm == "reference.float64" or (arm == "reference.float32" and s > STEPS64):
                continue
            for kind in ("weight_distance", "gradient_distance", "logit_distance"):
                row[f"{kind}/{arm}"] = distance(arm, s) if kind != "weight_distance" or s else 0.0
            row[f"sign_flips/{arm}"] = float(arm.endswith("32") and s > 4)
        rows.append(row)
    run = {"arms": {a: {"blown_up_at": 30 if a in blown else None, "against": a} for a in arms}}
    return SeedRecord(seed, rows, evals or [], run)


def verdict(*records, subject="candidate"):
    return judge(list(records), subject).verdict


def test_rounding_that_grows_as_the_control_does_is_round_off():
    assert verdict(*(record(s) for s in range(5))) is Verdict.ROUND_OFF


@given(st.floats(0.05, 300), st.floats(0.05, 60))
def test_a_rewrite_may_round_more_or_less_than_the_nudge(size64, size32):
    assert verdict(record(size64=size64, size32=size32)) is Verdict.ROUND_OFF


def test_no_difference_is_bit_identical():
    assert verdict(record(size64=0, size32=0)) is Verdict.BIT_IDENTICAL


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 1.0])
def test_a_difference_that_float64_keeps_is_a_bug_at_step_0(size):
    judgement = judge(
        [record(s, size64=size / U["float64"], size32=size / U["float32"] + 3) for s in range(3)]
    )
    assert judgement.verdict is Verdict.BUG
    assert (judgement.where.pass_, judgement.where.step) == ("forward", 0)


@pytest.mark.parametrize("step", [3, 11, 19])
def test_a_late_bug_is_found_at_its_step(step):
    judgement = judge([record(late=(step, 1e-4))])
    assert judgement.verdict is Verdict.BUG
    assert judgement.where.step == step


def test_one_seed_of_many_suffices_for_a_bug():
    assert verdict(record(0), record(1), record(2, late=(10, 1e-3))) is Verdict.BUG


def test_an_update_bug_is_placed_in_the_update_before_its_row():
    clean = record()
    for row in clean.curves[1:]:
        if "weight_distance/candidate.float64" in row:
            row["weight_distance/candidate.float64"] = 1e-5
    judgement = judge([clean])
    assert judgement.verdict is Verdict.BUG
    assert (judgement.where.pass_, judgement.where.step) == ("update", 0)


def test_a_nan_distance_is_no_agreement():
    broken = record()
    broken.curves[5]["logit_distance/candidate.float64"] = math.nan
    assert verdict(broken) is Verdict.BUG


@pytest.mark.parametrize(("kind", "pass_"), [("eval_logit_distance", "eval"), ("buffer_distance", "buffer")])
def test_a_difference_only_outside_training_is_a_bug_there(kind, pass_):
    evals = [{"step": STEPS64, f"{kind}/candidate.float64": 1e-4, f"{kind}/control.float64": 1e-14}]
    judgement = judge([record(evals=evals)])
    assert judgement.verdict is Verdict.BUG
    assert judgement.where.pass_ == pass_


def test_fewer_bits_in_float32_alone_is_reduced_precision():
    assert verdict(*(record(s, size32=2.0**13 * 3) for s in range(3))) is Verdict.REDUCED_PRECISION


def test_training_that_falls_over_in_the_control_too_is_unstable():
    records = [record(0), record(1, blown=("candidate.float32",)), record(2, blown=("control.float32",))]
    assert verdict(*records) is Verdict.UNSTABLE


def test_a_loss_that_ends_worse_than_it_began_has_fallen_over():
    worse = lambda arm, s: 2.3 * (1 + s) if arm.endswith("32") else 2.3  # noqa: E731
    assert verdict(record(loss=worse)) is Verdict.UNSTABLE


def test_a_candidate_that_falls_over_alone_is_not_decided():
    judgement = judge([record(s, blown=("candidate.float32",)) for s in range(3)])
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "seed=0..9" in judgement.headline


def test_a_candidate_that_always_falls_over_is_not_excused_by_one_control_that_did():
    records = [record(s, blown=("candidate.float32",)) for s in range(9)]
    records.append(record(9, blown=("candidate.float32", "control.float32")))
    assert verdict(*records) is Verdict.INCONCLUSIVE
    assert verdict(*records[6:]) is Verdict.UNSTABLE  # too few seeds to say more


def test_a_bug_is_a_bug_however_unstable_the_training():
    blown = ("candidate.float32", "reference.float32")
    assert verdict(record(size64=1e-3 / U["float64"], blown=blown)) is Verdict.BUG


def test_float32_alone_cannot_tell():
    judgement = judge([record(arms=[a for a in ARMS if a.endswith("32")])])
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "dtypes=[float32,float64]" in judgement.headline


LACKS = {
    "float64": ("candidate", ARMS[3:], "float32 alone .* dtypes=\\[float32,float64\\] \\(1 seed"),
    "float64 beside 16 bits": (
        "candidate",
        [*ARMS[3:], "reference.bf16-mixed"],
        "bf16-mixed and float32 alone .* dtypes=\\[float32,float64,bf16-mixed\\]",
    ),
    "a candidate in float64": ("candidate", [ARMS[0], *ARMS[2:]], "the candidate has no float64"),
    "a control of the candidate": ("candidate", ARMS[:2], "no control .*roles=\\[reference,candidate,c"),
    "float32 for the control": ("control", [ARMS[0], ARMS[2]], "^float64 alone .* dtypes=\\[float32,f"),
    "a control of the reference": ("reference", [ARMS[0], ARMS[3]], "there is no control"),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_is_missing_is_named_with_the_setting_that_gives_it(what):
    subject, arms, says = LACKS[what]
    judgement = judge([record(arms=arms)], subject)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert re.search(says, judgement.headline), judgement.headline


def test_a_nudge_that_shows_nowhere_is_said_and_no_dtype_that_is_set():
    hidden = record(arms=[a for a in ARMS if "candidate" not in a])
    for column in [c for c in hidden.curves[0] if "distance/control" in c]:
        hidden.curves[0][column] = 0.0
    judgement = judge([hidden], "control")
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert re.search(r"the nudge shows in no output .*seeds\.nudge=1", judgement.headline)
    assert "dtypes=" not in judgement.headline


def test_float64_alone_decides_beside_its_control():
    assert verdict(record(arms=[a for a in ARMS if a.endswith("64")])) is Verdict.ROUND_OFF
    assert verdict(record(arms=ARMS[:2])) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("subject", ["control", "reference"])
def test_the_control_and_the_precision_can_be_the_subject(subject):
    arms = [a for a in ARMS if "candidate" not in a]
    assert verdict(record(arms=arms), subject=subject) is Verdict.ROUND_OFF


@pytest.mark.parametrize("subject", ["candidate", "control", "reference"])
def test_flips_before_any_update_leave_the_logits_to_decide(subject):
    flipped = record()
    for column in [c for c in flipped.curves[0] if c.startswith("sign_flips") and c.endswith("32")]:
        flipped.curves[0][column] = 2.0
    assert verdict(flipped, subject=subject) is Verdict.ROUND_OFF


@pytest.mark.parametrize("subject", ["control", "reference"])
def test_a_reference_that_flips_before_any_update_is_no_yardstick_for_gradients(subject):
    flipped = record()
    flipped.curves[0]["sign_flips/reference.float32"] = 2.0
    assert verdict(flipped, subject=subject) is Verdict.ROUND_OFF


def test_no_record_is_inconclusive():
    assert judge([]).verdict is Verdict.INCONCLUSIVE


def test_every_piece_of_evidence_has_its_question_and_reading():
    for e in judge([record()]).evidence:
        assert e.question.endswith("?")
        assert e.reading
        assert e.measured is None or math.isfinite(e.measured)


def test_the_first_flip_is_the_first_row_with_one():
    assert first_flip(record(), "candidate.float32") == 5
    assert first_flip(record(), "candidate.float64") is None


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_mcnemar_against_summing_the_binomial(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    b, c = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1)) / 2**n
    assert mcnemar_exact(first, second) == pytest.approx(min(1.0, 2 * tail) if n else 1.0)


@pytest.mark.parametrize(("ends", "fell"), [(-9.0, False), (-3.0, False), (-0.1, False), (2.5, True)])
def test_a_loss_below_zero_falls_over_when_it_rises_not_when_it_falls(ends, fell):
    falling = record(loss=lambda arm, s: -2.0 + (ends + 2.0) * min(1.0, s / 30))
    judgement = judge([falling])
    assert judgement.outcomes["fell_over"]["reference.float32"] == {0: fell}


def test_nan_from_the_start_accuses_nobody():
    start = record(loss=lambda arm, s: math.nan)
    row = {k: math.nan if "distance/" in k else v for k, v in start.curves[0].items()}
    arms = {name: arm | {"blown_up_at": 0} for name, arm in start.run["arms"].items()}
    judgement = judge([SeedRecord(0, [row], [], {"arms": arms})])
    assert judgement.verdict == "inconclusive"
    assert "nothing finite to compare" in judgement.headline
    assert not any("nan" in e.reading for e in judgement.evidence)


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0, 7.6, 5.7, 1.7], None),  # it has learned
        ([2.0, 9.5, 4.4, 90.8, 1e20], 2),
        ([0.4, 320.0, 0.1], 0),
        ([2.0, 1.0, math.nan], 1),
        ([-3.0, -2.0, 23.0], None),
        ([-3.0, -2.0, 25.0], 1),
        ([0.0, 1e-9, 1e-8], None),
        ([], None),
    ],
)
def test_the_last_step_before_a_training_runs_away(losses, step):
    rows = [{"step": s, "loss/reference.float32": loss} for s, loss in enumerate(losses)]
    assert before_it_ran_away(SeedRecord(0, rows, [], {}), "reference.float32") == step
