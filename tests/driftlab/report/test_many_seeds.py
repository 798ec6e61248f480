"""A page about more seeds than it can list: bands, notable seeds, and no more room than that takes."""

import math
import re

import pytest

from driftlab.report.series import bundle
from driftlab.report.tables import MOST_ROWS, notable
from tests.driftlab.report.test_report import EVERY_ARM, Tags, page

STEPS = range(0, 121, 40)
BLOWN = {"candidate.float32": 80}
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100"


@pytest.fixture(scope="module")
def many(tmp_path_factory, make_seed):
    """Three hundred seeds; of one in ten only the candidate blows up, of one in a hundred all arms do."""
    folder, fallen = tmp_path_factory.mktemp("many"), {0: dict.fromkeys(EVERY_ARM, 80)}
    blown = {s: fallen.get(s % 100, BLOWN if s % 10 == 7 else {}) for s in range(300)}
    return [make_seed(folder, s, blown=blown[s], steps=STEPS) for s in range(300)]


@pytest.fixture(scope="module")
def many_drawn(tmp_path_factory, many):
    """Their page."""
    return page(tmp_path_factory.mktemp("drawn"), many)


def test_bands_and_a_few_seeds_stand_for_all(many_drawn):
    assert "Of 300 seeds, thick: their median; dark band: from 5 % to 95 % of them" in many_drawn
    assert "Thin, as examples: seeds 0, 1, 2, 3, 4." in many_drawn
    assert {"range", "quantiles", *(f"seed={s}" for s in range(5))} == {
        part
        for part in re.findall(r'data-part="([^"]*)"', many_drawn)
        if part not in ("median", "flip", "end")
    }
    assert '<select id="pick">' not in many_drawn
    assert not Tags(many_drawn).open


def test_the_dark_band_holds_nine_tenths_of_the_seeds(many):
    drawn = bundle(many, "weight_distance", "candidate.float32")
    low, high = drawn.quantiles(0.05, 0.95)
    held = ((drawn.values >= low) & (drawn.values <= high)).mean(axis=0)
    assert (held >= 0.9).all()
    assert held[1:].min() < 0.96
    assert math.isinf(high[-1])  # more than one seed in twenty has blown up by then


def outcome_rows(text):
    section = text[text.index('aria-label="outcomes over seeds"') :]
    return [
        int(s) for s in re.findall(r'<tr><th scope="row">(\d+)</th>', section[: section.index("</table>")])
    ]


def test_the_table_holds_the_notable_seeds_and_says_which(many_drawn):
    shown = outcome_rows(many_drawn)
    assert shown == sorted(set(shown))
    assert {s for s in range(300) if s % 10 == 7} <= set(shown)
    assert len(shown) <= MOST_ROWS
    assert "An arm diverged in 33 of 300 seeds. Below are these, and those with" in many_drawn
    assert "267 of 300 finished" in many_drawn
    assert "297 of 300 finished" in many_drawn


def cell(bad=False, loss=1.0, accuracy=0.5, disagreement=0.1):
    measured = {"loss": loss, "accuracy": accuracy, "disagreement": disagreement}
    return {"arm": "candidate.float32", "word": "diverged" if bad else "finished", "bad": bad} | measured


def test_where_most_fell_over_those_are_shown_of_which_another_arm_did_not():
    rows = [{"seed": s, "arms": [cell(bad=True), cell(bad=s < 900)]} for s in range(1000)]
    found = notable(rows)
    assert len(found.rows) <= MOST_ROWS
    assert sum(row["seed"] >= 900 for row in found.rows) >= 40
    assert "An arm diverged in 1,000 of 1,000 seeds. Below are 40 of these, first those in which another" in (
        found.sentence
    )


def test_the_least_and_the_greatest_are_shown_and_the_spread_is_that_of_all():
    losses = [math.nan if s == 500 else float(s) for s in range(1001)]
    found = notable([{"seed": s, "arms": [cell(loss=loss)]} for s, loss in enumerate(losses)])
    assert {0, 1, 999, 1000} <= {row["seed"] for row in found.rows}
    spread = {label: cells[0]["loss"] for label, cells in found.spread}
    assert spread == {"least": 0.0, "5 %": 50.0, "median": 501.0, "95 %": 951.0, "greatest": math.inf}
    assert found.spread[2][1][0]["word"] == "1,001 of 1,001 finished"


def test_a_hundred_seeds_are_all_listed(tmp_path, many):
    assert outcome_rows(page(tmp_path, many[:100])) == list(range(100))


def test_where_all_fall_over_some_crosses_stand_for_all(tmp_path, make_seed):
    records = [make_seed(tmp_path, s, blown=BLOWN, steps=STEPS) for s in range(250)]
    text = page(tmp_path, records)
    assert "before a blow-up (of at most 100 seeds an arm), candidate.float32 in 250 of 250 seeds" in text
    assert len(re.findall(r"<use ", text)) < 600


def test_the_page_does_not_grow_with_the_seeds(tmp_path, many, many_drawn, make_seed):
    more = [make_seed(tmp_path, s, blown=BLOWN if s % 10 == 7 else {}, steps=STEPS) for s in range(300, 600)]
    assert len(page(tmp_path, many + more)) < 1.3 * len(many_drawn)


def test_nodes_that_differ_are_said_next_to_the_verdict(tmp_path, make_seed):
    records = [make_seed(tmp_path, s, steps=STEPS) for s in range(6)]
    assert 'id="environments"' not in page(tmp_path, records)
    for record in records:
        record.run["environment"] |= {"device": A100 if record.seed < 2 else H100}
    text = page(tmp_path, records)
    said = f"device: {A100} for seeds 0, 1; {H100} for seeds 2..5"
    assert text.index('id="verdict"') < text.index('id="environments"') < text.index(said)
    assert text.index(said) < text.index("not samples of one distribution") < text.index('id="comparison"')
    assert said in text[text.index('<section id="environment"') :]


def test_versions_that_no_sum_knows_are_said_with_the_environment_alone(tmp_path, make_seed):
    records = [make_seed(tmp_path, s, steps=STEPS) for s in range(2)]
    records[1].run["environment"] |= {"python": "3.11.9"}
    text = page(tmp_path, records)
    assert 'id="environments"' not in text
    assert "python: 3.11 for seed 0; 3.11.9 for seed 1" in text[text.index('<section id="environment"') :]


def test_markup_in_an_environment_is_text(tmp_path, make_seed):
    records = [make_seed(tmp_path, s, steps=STEPS) for s in range(2)]
    records[1].run["environment"] |= {"device": "<script>alert(1)</script>"}
    assert "<script>alert" not in page(tmp_path, records)
