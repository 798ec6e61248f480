"""What a reader of the page is shown first: one line, curves beside their control, evidence on one scale."""

import math
import re

import pytest

from driftlab.words import Evidence, Judgement, Status, Verdict
from tests.driftlab.report.test_report import drawn, page


@pytest.fixture(scope="module")
def ten(tmp_path_factory, make_seed):
    folder = tmp_path_factory.mktemp("ten")
    return [make_seed(folder, s, blown={"candidate.float32": 57} if s == 3 else None) for s in range(10)]


def test_the_loss_is_drawn_beside_the_control(tmp_path, ten):
    arms = {"reference.float32", "candidate.float32", "control.float32"}
    assert set(drawn(page(tmp_path, ten), "loss")["arms"]) == arms


@pytest.mark.parametrize(("last", "logarithmic"), [(10, False), (12, True), (10**6, True)])
def test_the_first_ten_steps_have_room(tmp_path, make_seed, last, logarithmic):
    steps = [*range(11), last] if last > 10 else range(11)
    text = page(tmp_path, [make_seed(tmp_path, 0, steps=steps, horizons={"float32": last})])
    assert ("logarithmic above 10" in text) == logarithmic
    data = drawn(text, "loss")
    left, right = data["box"][:2]
    assert data["place"][data["at"].index(10)] > left + (right - left) / 9


def test_the_heights_of_a_figure_are_told_to_its_zoom(tmp_path, ten):
    text = page(tmp_path, ten)
    for name, stretches in {"weight-distance": 1, "sign-flips": 2, "loss": 1}.items():
        data = drawn(text, name)
        values, heights = zip(*data["scale"]["anchors"], strict=True)
        assert len(values) == stretches + 1
        assert list(values) == sorted(values)
        assert [heights[-1], heights[0]] == pytest.approx(data["box"][2:], abs=0.2)
    assert drawn(text, "weight-distance")["scale"]["zero"] > 0
    assert drawn(text, "loss")["scale"]["zero"] is None


def evidence_rows(text):
    section = re.search(r'<section id="evidence">.*?</section>', text, re.DOTALL)[0]
    return re.findall(r"<tr><th scope=.row.*?</tr>", section, re.DOTALL)


@pytest.mark.parametrize(
    ("measured", "threshold", "says", "width"),
    [
        (2e4, 2.0, ("1e+04", "above the threshold"), 83.3),
        (2.0, 2.0, ("1", "at the threshold"), 50.0),
        (2e-9, 2.0, ("1e-09", "below the threshold"), 0.0),
        (math.inf, 2.0, ("inf", "above the threshold"), 100.0),
        (0.0, 0.0, (None, "at the threshold"), 0.0),
        (3.0, 0.0, (None, "above the threshold"), 100.0),
        (math.nan, 2.0, (None, "not a number"), None),
        (None, 2.0, (None, "—"), None),
    ],
)
def test_evidence_stands_on_one_scale(tmp_path, measured, threshold, says, width):
    evidence = Evidence("p", "?", measured, threshold, None, "so it is", unit="ulps", reason="because")
    text = page(tmp_path, [], Judgement(Verdict.ROUND_OFF, "h", [evidence]))
    (row,) = evidence_rows(text)
    times, word = says
    assert re.findall("<b>(.*) \N{MULTIPLICATION SIGN}</b>", row) == ([times] if times else [])
    assert f"<small>{word}</small>" in row
    assert re.findall(r"width: ([\d.]+)%", row) == ([str(width)] if width is not None else [])
    assert "because" in text
    assert ("ulps" in row) == (measured is not None)


def test_every_probe_leads_to_what_it_means(tmp_path, ten):
    text = page(tmp_path, ten)
    for row in evidence_rows(text):
        meaning = re.search(r'href="#(meaning-\d+)"><code>(\w+)<', row)
        assert f'<div id="{meaning[1]}"><dt><code>{meaning[2]}</code>' in text
    assert "Measured: times the controls&#39; distance." in text


def test_what_was_not_answered_is_said_in_a_word(tmp_path):
    evidence = Evidence("p", "?", None, 2.0, None, "no kinks", Status.NOT_APPLICABLE)
    (row,) = evidence_rows(page(tmp_path, [], Judgement(Verdict.ROUND_OFF, "h", [evidence])))
    assert "does not arise" in row


@pytest.mark.parametrize(
    ("headline", "line", "rest"),
    [
        ("the same function: only rounding (2 seeds)", "the same function", "only rounding (2 seeds)"),
        ("equal bits (2 seeds)", "equal bits (2 seeds)", None),
        (f"{'long ' * 20}: tail", None, f"{'long ' * 20}: tail"),
    ],
)
def test_the_headline_is_one_line_and_loses_nothing(tmp_path, headline, line, rest):
    text = page(tmp_path, [], Judgement(Verdict.ROUND_OFF, headline, []))
    assert re.findall(r'class="headline">(.*?)<', text) == ([line] if line else [])
    assert re.findall(r'class="rest">(.*?)<', text) == ([rest] if rest else [])
