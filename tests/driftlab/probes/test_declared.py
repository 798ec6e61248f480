"""Probes as declared objects: one list, the kinds of answers, and mistakes that are told apart."""

from pathlib import Path

import pytest
import torch
from torch import nn

import driftlab.probes
from driftlab import DiagnoseError, Verdict, assert_equivalent, diagnose
from driftlab.probes import every_probe, function
from driftlab.probes.__main__ import as_markdown
from driftlab.words import Evidence, Finding, Place, Status, settled_by, standing

ROOT = Path(__file__).resolve().parents[3]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator))
        for _ in range(3)
    ]


class Halves(nn.Module):
    def __init__(self, linear):
        super().__init__()
        parts = zip(linear.weight.detach().split(4), linear.bias.detach().split(4), strict=True)
        self.parts = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        for part, (weight, bias) in zip(self.parts, parts, strict=True):
            part.weight.data, part.bias.data = weight.clone(), bias.clone()

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], -1)


def halved(model):
    model[0] = Halves(model[0])
    return model


def of(diagnosis, probe):
    return next(e for e in diagnosis.evidence if e.probe == probe)


def mistaken(*_, **__):
    return no_such_name  # noqa: F821


def test_every_probe_says_what_it_asks_and_why_its_threshold_stands_there():
    probes = every_probe()
    assert len({p.name for p in probes}) == len(probes) >= 12
    assert [p.order for p in probes] == sorted({p.order for p in probes})
    for probe in probes:
        assert probe.question.endswith("?")
        assert probe.sees
        assert probe.threshold is None or probe.reason


def test_the_table_in_the_docs_is_the_list_of_probes():
    assert as_markdown() in (ROOT / "docs" / "verdict.md").read_text(), "python -m driftlab.probes prints it"


def test_every_probe_of_the_list_stands_in_a_diagnosis():
    seen = {e.probe for e in diagnose(network(), halved, batches(), steps=3).evidence}
    asked = {p.name for p in every_probe() if p.ask is not None}
    assert asked <= seen


def test_a_mistake_of_our_own_is_said_and_acquits_nobody(monkeypatch):
    monkeypatch.setattr(function, "_same", mistaken)
    found = diagnose(network(), halved, batches(), steps=3)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert of(found, "function").status is Status.FAILED
    for text in (found.headline, of(found, "function").reading, str(found)):
        assert "driftlab's own" in text
    assert "no_such_name" in found.headline


def test_a_mistake_of_our_own_is_none_in_arithmetic_either(monkeypatch):
    monkeypatch.setattr("driftlab.arithmetic.beyond_inputs.other_values", mistaken)
    found = diagnose(network(), halved, batches(), steps=3)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert of(found, "rewritten_modules").status is Status.FAILED


def test_a_look_on_the_spot_that_fails_leaves_no_verdict(monkeypatch):
    monkeypatch.setattr("driftlab.inquiry.ask_last_step", mistaken)
    assert diagnose(network(), halved, batches(), steps=3).verdict is Verdict.INCONCLUSIVE


def test_a_failed_probe_does_not_cover_a_bug(monkeypatch):
    monkeypatch.setattr("driftlab.probes.update.wrong_update", mistaken)

    def wrong(model):
        model[2].bias.data += 0.1
        return model

    assert diagnose(network(), wrong, batches(), steps=3).verdict is Verdict.BUG


def test_an_assertion_does_not_hold_where_a_probe_failed(monkeypatch):
    monkeypatch.setattr(function, "_same", mistaken)
    with pytest.raises(DiagnoseError, match=r"driftlab's own code.*no_such_name"):
        assert_equivalent(network(), halved, torch.randn(4, 6))


class Picky(torch.optim.SGD):
    """Whoever steps it by itself gets an error of its own."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].dtype == torch.float64 and torch.is_grad_enabled():
            raise TypeError("no double, please")
        return super().step(closure)


def test_what_the_pairs_own_code_raises_is_told_with_its_place():
    with pytest.raises(DiagnoseError, match="no double, please"):
        diagnose(network(), halved, batches(), steps=2, optimizer=lambda p: Picky(p, lr=0.1))


def test_a_loss_that_does_not_take_the_outputs_is_the_users():
    with pytest.raises(DiagnoseError, match="does not run on the first batch"):
        diagnose(network(), halved, batches(), loss=lambda outputs: outputs.sum())


def test_a_new_file_is_asked_and_a_mistake_in_it_is_seen_at_once(tmp_path, monkeypatch):
    text = (
        "from driftlab.probes.probe import Probe\n\n\n"
        "def ask(found):\n    yield PROBE.finding(COUNT, None, 'as many')\n\n\n"
        "PROBE = Probe('numbers', 'Do both train equally many numbers?', order=45, ask=ask, sees='that')\n"
    )
    monkeypatch.setattr(driftlab.probes, "__path__", [*driftlab.probes.__path__, str(tmp_path)])
    (tmp_path / "numbers_right.py").write_text(text.replace("COUNT", "1.0"))
    every_probe.cache_clear()
    try:
        found = diagnose(network(), halved, batches(), steps=2)
        assert of(found, "numbers").measured == 1.0
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        (tmp_path / "numbers_right.py").unlink()
        (tmp_path / "numbers_wrong.py").write_text(text)
        every_probe.cache_clear()
        found = diagnose(network(), halved, batches(), steps=2)
        assert of(found, "numbers").status is Status.FAILED
        assert found.verdict is Verdict.INCONCLUSIVE
    finally:
        every_probe.cache_clear()


def finding(probe, supports=None, **options):
    return Finding(Evidence(probe, "?", 1.0, 0.0, supports, "so"), **options)


def test_a_finding_takes_the_place_of_another_by_saying_so():
    first, second = (
        finding("function", Verdict.BUG),
        finding("function", Verdict.ROUND_OFF, supersedes=("function",)),
    )
    assert standing([first, second]) == [second]
    assert standing([second, first]) == [second, first]
    assert settled_by([first, second]) is None
    assert settled_by([finding("repeat", Verdict.NONDETERMINISTIC), first])[0] is Verdict.BUG


def test_what_is_stored_reads_back_and_so_does_what_was_stored_before():
    place = Place("conv", "forward", 0)
    full = function.PROBE.finding(2.0, Verdict.BUG, "{place}: off", place)
    assert Finding.from_dict(full.as_dict()) == full
    both = full.naming({"conv": "layer.conv"})
    assert both.evidence.reading == "the forward of conv (the candidate's layer.conv), since step 0: off"
    assert Finding.from_dict(both.as_dict()) == both
    older = ("place", "probe", "question", "measured", "threshold", "supports", "reading")
    old = {k: v for k, v in full.as_dict().items() if k in older}
    del old["place"]["candidate_module"]
    read = Finding.from_dict(old | {"probe": "update"})
    assert read.off_path
    assert read.at_step(7).evidence.reading == "the forward of conv, since step 7: off"
    assert read.at_step(7).place.step == 7


def test_a_place_is_not_taken_for_the_beginning_of_a_later_one():
    place = Place("conv (1)", "forward", 1)
    said = f"{place}; so is {Place('conv (1)', 'forward', 12)}, and {place}"
    assert place.taken_out_of(said) == "{place}; so is the forward of conv (1), since step 12, and {place}"
    old = finding("function", Verdict.BUG, place=place).as_dict() | {"reading": said}
    del old["says"]
    assert Finding.from_dict(old).at_step(3).evidence.reading == (
        "the forward of conv (1), since step 3; so is the forward of conv (1), since step 12, "
        "and the forward of conv (1), since step 3"
    )
