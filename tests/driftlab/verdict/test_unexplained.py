"""A number above its threshold never passes for rounding, unless something says why it stands there."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.probes.probe import Probe
from driftlab.verdict.rules import judge
from driftlab.words import FUNCTION
from tests.driftlab.verdict.test_rules import record

ASKED = Probe("numbers", "How many?", threshold=1.0)


def judged(*findings, **options):
    return judge([replace(record(**options), findings=list(findings))])


def test_a_probe_above_its_threshold_without_a_reason_leaves_the_verdict_open():
    found = judged(ASKED.finding(2e6, None, "many"))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.headline.startswith("numbers measures 2e+06, above 1")


@pytest.mark.parametrize(
    "finding",
    [
        ASKED.finding(1.0, None, "as many"),
        ASKED.finding(2e6, Verdict.ROUND_OFF, "many, and why"),
        ASKED.not_applicable("there is none"),
        replace(ASKED, decides=False).finding(2e6, None, "many, by the way"),
    ],
    ids=["within", "explained", "not asked", "beside the verdict"],
)
def test_what_is_explained_within_or_beside_the_verdict_leaves_it_alone(finding):
    assert judged(finding).verdict is Verdict.ROUND_OFF


def test_what_one_seed_leaves_open_stays_open_over_many():
    within, above = ASKED.finding(1.0, None, "one"), ASKED.finding(9.0, None, "nine")
    records = [replace(record(s), findings=[f]) for s, f in enumerate((within, above, within))]
    assert judge(records).verdict is Verdict.INCONCLUSIVE


def test_drift_that_a_probe_of_the_function_explains_says_so():
    probe = Probe(FUNCTION, "Same?", threshold=2.0**14.5)
    far = record()
    for row in far.curves:
        row["weight_distance/control.float32"] /= 1e4
    found = judge([replace(far, findings=[probe.finding(1.0, Verdict.ROUND_OFF, "they do")])])
    drift = next(e for e in found.evidence if e.probe == "drift")
    assert drift.measured > drift.threshold
    assert drift.supports is Verdict.ROUND_OFF
    assert "function, which asks it of one step" in drift.reading


class OnePass(nn.LayerNorm):
    """Its variance in one pass: right, and cancels where a large mean stands on a small spread."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        spread = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp_min(0)
        return (x - mean) / (spread + self.eps).sqrt() * self.weight + self.bias


def one_pass(model):
    norm = OnePass(12)
    norm.load_state_dict(model[0].state_dict())
    model[0] = norm
    return model


def halved(model):
    class Halves(nn.Linear):
        def forward(self, x):
            return F.linear(x[:, :6], self.weight[:, :6]) + F.linear(x[:, 6:], self.weight[:, 6:], self.bias)

    halves = Halves(12, 3)
    halves.load_state_dict(model[1].state_dict())
    model[1] = halves
    return model


@pytest.mark.parametrize(("rewrite", "mean"), [(one_pass, 0.0), (one_pass, 60.0), (halved, 60.0)])
def test_no_pair_is_acquitted_beside_a_number_that_nothing_explains(rewrite, mean):
    torch.manual_seed(0)
    network = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 3))
    batches = [(torch.randn(16, 12) + mean, torch.randint(3, (16,))) for _ in range(2)]
    found = diagnose(network, rewrite, batches, steps=3)
    assert found.verdict is Verdict.ROUND_OFF
    beside = ("same_bits", "rounding_bound")  # that they differ at all; evidence only
    above = [e for e in found.evidence if None not in (e.measured, e.threshold) and e.measured > e.threshold]
    assert {e.supports for e in above if e.probe not in beside} <= {Verdict.ROUND_OFF}
