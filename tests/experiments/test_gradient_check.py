"""``+experiment=gradient_check``: the literal ratios, other cases, planted faults, verdicts, what it says."""

import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas
from omegaconf import OmegaConf
from torch import nn

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import PAPER, as_csv, as_files, shown
from driftlab.words import Evidence, Finding, Verdict
from experiments.gradient_check import QUESTION, about, measure
from experiments.gradient_check.answer import answer, judged
from experiments.gradient_check.case import build_case
from experiments.gradient_check.measures import Elements, drawn_indices
from experiments.gradient_check.series import laws, ratios
from suite.command.errors import ConfigurationError
from tests.suite.conftest import ROOT, set_anew

torch.set_num_threads(1)
HERE = "tests.experiments.test_gradient_check"


def configured(*overrides, scale="small", faults=False):
    config = OmegaConf.load(ROOT / "conf/experiment/gradient_check.yaml")
    config.merge_with({"device": "cpu", "scale": {"name": scale}, "faults": faults})
    if any(o.startswith("case.target=") for o in overrides):
        config.case.options = {}
    config.merge_with_dotlist(list(overrides))
    return config


def asked(*overrides, seeds=(0,), **options):
    """Settings, values as they come back from the disk, and the records."""
    config = configured(*overrides, **options)
    found = {seed: measure(config, seed) for seed in seeds}
    values = {seed: json.loads(json.dumps(one.values)) for seed, one in found.items()}
    return config, values, [one.record for one in found.values()]


@pytest.fixture(scope="module")
def thread():
    return asked("curve.decades=10", "curve.per_decade=2", "case.points=60", seeds=(0, 1, 2))


def table(found, name):
    return next(t for t in found.tables if t.name == name)


# Cases by their names, as somebody else's project has them.
class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class Wrong(nn.Module):
    def forward(self, x):
        return Tripled.apply(x)


def wrong():
    return Wrong(), torch.randn(30), lambda o: o.square().sum()


def linear():
    return nn.Identity(), torch.randn(20), torch.sum


def network():
    return (
        nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)),
        torch.randn(8, 5),
        lambda o: o.exp().mean(),
    )


def logarithm():
    return nn.Identity(), 1e-3 * torch.rand(50) + 1e-6, lambda o: o.log().sum()


def cancelling():
    return nn.Identity(), torch.randn(300), lambda o: ((o + 1e5) - 1e5).square().sum()


def half_dead():
    return nn.ReLU(inplace=True), torch.randn(50), lambda o: o.square().sum()


def transposed():
    return nn.Identity(), torch.randn(5, 6, requires_grad=True).t(), lambda o: o.square().sum()


def dropout():
    return nn.Dropout(), torch.randn(30), torch.sum


def vector():
    return nn.Identity(), torch.randn(3), lambda o: o


def flat():
    return nn.Identity(), torch.ones(4), lambda o: (o - 1).square().sum()


def no_module():
    return torch.sin, torch.randn(3), torch.sum


def unweighted():
    target = torch.zeros(30)
    return nn.Identity(), torch.randn(30), lambda o: nn.functional.huber_loss(o, target)


def test_the_threads_ratios(thread):
    _, values, _ = thread
    wide, narrow = (ratios(values, dtype) for dtype in ("float64", "float32"))
    assert len(wide) == len(narrow) == 180
    low, high = np.quantile(wide, [0.05, 0.95])
    assert 0.995 < low < 0.9999
    assert 1.0001 < high < 1.005
    # 0, or off by half and more
    assert np.mean(narrow == 0) > 0.2
    assert np.mean(np.abs(narrow - 1) < 0.01) < 0.05
    assert narrow.max() > 1.58


def test_float32_takes_steps_of_the_spacing_of_the_loss(thread):
    _, values, _ = thread
    for v in values.values():
        literal = v["literal"]["float32"]
        gap = np.spacing(np.float32(literal["loss"])) / 1e-3
        assert literal["quantum"] == pytest.approx(gap)
        steps = np.array(literal["numeric"]) / gap
        assert np.abs(steps - steps.round()).max() < 1e-3


def test_float64_is_off_by_its_truncation(thread):
    """L'' = 1/2 for each element, so eps / 4 everywhere."""
    _, values, _ = thread
    for v in values.values():
        assert v["literal"]["curvature"] == pytest.approx([0.5] * 60, rel=1e-3)
        literal = v["literal"]["float64"]
        off = np.array(literal["numeric"]) - np.array(literal["autograd"])
        assert off == pytest.approx([2.5e-4] * 60, rel=1e-3)


def test_differences_are_those_of_a_loop():
    config = configured("case.options.rows=3", "case.options.columns=4", "case.points=12")
    case = build_case(config, 5)
    indices = drawn_indices(5, 12, 12)
    assert sorted(indices) == list(range(12))
    elements = Elements(case, "float64", torch.device("cpu"), indices)
    x, t = case.inputs.double().reshape(-1), case.loss.targets.double().reshape(-1)

    def loss(moved):
        return float((((moved + 1) / 2 - t) ** 2).sum())

    for i, one, two, slope in zip(
        indices, elements.one_sided(1e-3), elements.central(1e-3), elements.gradient(), strict=True
    ):
        ahead, behind = x.clone(), x.clone()
        ahead[i] += 1e-3
        behind[i] -= 1e-3
        assert one == pytest.approx((loss(ahead) - loss(x)) / 1e-3, abs=1e-9)
        assert two == pytest.approx((loss(ahead) - loss(behind)) / 2e-3, abs=1e-9)
        assert slope == pytest.approx(float((x[i] + 1) / 2 - t[i]), abs=1e-12)
    assert elements.third() == [0.0] * 12


def test_the_law_of_the_answer_has_the_numbers_of_the_case(thread):
    _, values, _ = thread
    law = laws(values, "float32", 1)
    assert law.curvature == pytest.approx(0.5, rel=1e-3)
    assert law.loss == pytest.approx(1.5 * 140 * 120, rel=0.05)  # E((x + 1) / 2 - t)^2 = 1.5
    assert laws(values, "float64", 2).curvature == 0


def test_the_answer_to_the_thread(thread):
    config, values, records = thread
    found = answer(config, values)
    assert found.sentence.startswith("The gradient is right")
    assert "training is not affected" in found.sentence
    assert "expected" in table(found, "literal").columns
    for t in found.tables:
        assert t.conclusion
        assert all(set(t.columns) <= set(row) for row in t.rows)
        assert shown(t).rows
        assert as_csv(t)
    for figure in found.figures:
        figure.draw(Canvas(), PAPER)
    by_name = {r["what"]: r["error"] for r in table(found, "remedies").rows}
    assert by_name["everything in float64"] < 0.1 < by_name["the loss as it is"]
    assert judged(records).verdict == "round_off"


@pytest.mark.parametrize(
    "overrides",
    [
        ("case.options.reduction=mean",),
        ("case.options.rows=1", "case.options.columns=2"),
        ("case.eps=1e-12",),
        ("case.eps=1",),
        ("case.options.rows=20", "curve.decades=1", "curve.points=1"),
        *((f"case.target={HERE}.{name}",) for name in ("linear", "network", "half_dead", "transposed")),
        (f"case.target={HERE}.logarithm",),
    ],
)
def test_other_cases_are_answered_as_themselves(overrides):
    config, values, records = asked("case.points=15", "curve.per_decade=1", *overrides, seeds=(0, 1))
    found = answer(config, values)
    literal = table(found, "literal")
    assert "expected" not in literal.columns  # those numbers are the thread's
    assert "thread" not in literal.title
    count = sum(len(v["literal"]["float64"]["numeric"]) for v in values.values())
    assert f"at {count} random points" in found.figures[0].caption
    assert not {"nan", "inf", "None"} & set(found.sentence.replace(",", " ").split())
    assert judged(records).verdict == "round_off"
    for figure in found.figures:
        as_files(figure)


def test_points_are_never_counted_twice():
    _, values, _ = asked("case.options.rows=2", "case.options.columns=3", "case.points=100")
    assert len(values[0]["literal"]["float64"]["numeric"]) == 6


def test_where_float32_is_good_enough_it_is_not_blamed():
    config, values, _ = asked("case.eps=1")
    found = answer(config, values)
    assert "Use float64" not in found.sentence
    assert "truncation outweighs rounding" in found.sentence


def test_a_network_that_loses_digits_itself_is_not_cleared_for_training():
    config, values, _ = asked(f"case.target={HERE}.cancelling", "curve.decades=2")
    assert "training is not affected" not in answer(config, values).sentence
    assert "loses digits in float32" in answer(config, values).sentence


def test_a_wrong_gradient_is_a_bug():
    config, values, records = asked(f"case.target={HERE}.wrong", "curve.decades=2", seeds=(0, 1))
    judgement = judged(records)
    assert judgement.verdict == "bug"
    assert "3 times the derivative" in judgement.headline
    assert "(2 seeds)" in judgement.headline
    sentence = answer(config, values).sentence
    assert sentence.startswith("The gradient itself is not cleared (fail, 2 of 2 seeds)")
    assert "training is not affected" not in sentence


def record(seed, *supports):
    names = ("gradient_check", "float32_difference")
    found = [
        Finding(Evidence(n, "?", 0.5, 1.0, s, f"{n} of {seed}")) for n, s in zip(names, supports, strict=True)
    ]
    return SeedRecord(seed, [], [], {"arms": {}, "probes": [f.as_dict() for f in found]})


@pytest.mark.parametrize(
    ("supports", "verdict"),
    [
        ([(Verdict.ROUND_OFF, Verdict.ROUND_OFF)] * 2, "round_off"),
        ([(Verdict.ROUND_OFF, Verdict.ROUND_OFF), (Verdict.BUG, Verdict.ROUND_OFF)], "bug"),
        ([(Verdict.ROUND_OFF, Verdict.ROUND_OFF), (None, Verdict.ROUND_OFF)], "inconclusive"),
        ([(Verdict.ROUND_OFF, None)], "inconclusive"),
        ([(None, Verdict.ROUND_OFF), (Verdict.BUG, None)], "bug"),
        ([], "inconclusive"),
    ],
)
def test_one_seed_decides_against_and_all_decide_for(supports, verdict):
    records = [record(seed, *s) for seed, s in enumerate(supports)]
    judgement = judged(records)
    assert judgement.verdict == verdict
    if supports:
        assert {e.probe for e in judgement.evidence} == {"gradient_check", "float32_difference"}
        odd = [s for s, pair in enumerate(supports) if Verdict.BUG in pair or None in pair]
        shown_first = {e.supports for e in judgement.evidence}
        assert not odd or shown_first != {Verdict.ROUND_OFF}  # the seed that decides is the one shown


def test_planted_faults_are_told_from_right_networks():
    config, values, _ = asked("case.points=5", "curve.decades=1", scale="smoke", faults=True)
    planted = table(answer(config, values), "planted")
    assert {r["truth"] for r in planted.rows} == {"right", "wrong"}
    assert all(r["ours"] == "1 of 1" for r in planted.rows)
    assert any(r["theirs"] == "0 of 1" for r in planted.rows)
    wrong = [r for r in planted.rows if r["truth"] == "wrong"]
    assert all(r["suspect"] for r in wrong)
    assert not any(r["suspect"] for r in planted.rows if r["truth"] == "right")
    assert f"caught {len(wrong)} of {len(wrong)} faults" in planted.conclusion


def test_what_is_announced_is_what_is_measured():
    config, values, _ = asked("curve.decades=1", scale="smoke")
    assert f"at {len(values[0]['literal']['float64']['numeric'])} points" in about(config)


REFUSED = {
    "a vector": ("case.target=HERE.vector", "not one number"),
    "dropout": ("case.target=HERE.dropout", "changes from call to call"),
    "no slope anywhere": ("case.target=HERE.flat", "derivative is 0 at every point"),
    "no module": ("case.target=HERE.no_module", "must be a torch.nn.Module"),
    "targets in float32": ("case.target=HERE.unweighted", "in float64: RuntimeError"),
    "no reduction": ("case.options.reduction=none", "not one number"),
    "no numbers": ("case.options.rows=0", "not empty"),
    "a step that float32 does not know": ("case.eps=1e-300", "no difference is finite"),
}


@pytest.mark.parametrize(("override", "says"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_cannot_be_measured_in_one_line(override, says):
    with pytest.raises(ConfigurationError, match=says) as refusal:
        measure(configured(override.replace("HERE", HERE)), 0)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("case.points=0", "whole number"),
        ("curve.largest=inf", "finite number"),
        ("+case.option=3", "did you mean case.options?"),
    ],
)
def test_refuses_settings_in_one_line(override, says):
    with pytest.raises(ConfigurationError, match=says):
        set_anew("gradient_check", override)


def test_refuses_options_that_the_case_does_not_take():
    settings = set_anew("gradient_check", "+case.options.row=3")
    with pytest.raises(ConfigurationError, match="row is no argument of halved: did you mean rows"):
        QUESTION.check(settings, 0)
