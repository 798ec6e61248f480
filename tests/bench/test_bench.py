"""The labelled bench: that it is what it says it is, and that the diagnosis is right on a share of it.

All of it takes a quarter of an hour: ``python scripts/calibrate.py``.
"""

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.run import Outcome, all_cases, confusion, run_case
from bench.summary import as_csv, as_markdown, rates, read_csv
from tests.kernels import need_channels_last

ROOT = Path(__file__).resolve().parents[2]
CASES = {case.name: case for case in all_cases()}


def first_of_each_file():
    """One case a file, on quick networks, of those that the published page does not show as wrong."""
    published = read_csv((ROOT / "results/published/calibration/cases.csv").read_text())
    wrong = {o.name for o in published if not o.right or o.placed is False}
    chosen = {}
    for case in CASES.values():
        if case.task.name != "resnet" and case.name not in wrong:
            chosen.setdefault(case.file, case.name)
    return sorted(chosen.values())


def test_there_are_enough_cases_of_each_kind():
    labels = Counter(str(case.labels[0]) for case in CASES.values())
    assert labels["round_off"] + labels["bit_identical"] >= 30
    assert labels["bug"] >= 30
    assert len({case.kind for case in CASES.values() if case.labels[0] == "bug"}) >= 20
    assert labels["reduced_precision"] >= 10
    assert labels["unstable"] + labels["nondeterministic"] >= 10


@pytest.mark.parametrize("name", [c.name for c in CASES.values() if c.modules and c.labels[0] == "bug"][::7])
def test_the_place_of_a_bug_is_a_module_of_its_reference(name):
    case = CASES[name]
    modules = dict(case.task.network().named_modules(remove_duplicate=False))
    assert set(case.modules) <= modules.keys()


@pytest.mark.parametrize("name", list(CASES)[::9])
def test_a_rewrite_leaves_the_reference_alone_and_runs(name):
    case = CASES[name]
    reference = case.task.network()
    before = copy.deepcopy(reference.state_dict())
    candidate = case.rewrite(copy.deepcopy(reference))
    assert isinstance(candidate, torch.nn.Module)
    assert all(torch.equal(before[n], t) for n, t in reference.state_dict().items())


@pytest.mark.slow
@pytest.mark.drawn(24)
@pytest.mark.parametrize("name", first_of_each_file())
def test_the_diagnosis_is_right(name):
    if name.startswith("channels_last"):
        need_channels_last()
    outcome = run_case(CASES[name])
    assert outcome.right, f"{outcome.label}, and it said {outcome.verdict}: {outcome.headline}"
    assert outcome.placed is not False, f"{CASES[name].modules}, and it said {outcome.where}"


def outcome(name, label, verdict, right, placed=None, held_out=False):
    return Outcome(name, "kind", "mlp", held_out, label, verdict, right, placed, None, f"it is {name}", 1.5)


def test_what_was_wrong_is_counted_and_shown():
    outcomes = [
        outcome("right", "bug", "bug", True, True),
        outcome("misplaced", "bug", "bug", True, False),
        outcome("missed", "bug", "round_off", False, held_out=True),
        outcome("accused", "round_off", "bug", False),
        outcome("either", "round_off", "bit_identical", True),
    ]
    assert confusion(outcomes) == {"bug": {"bug": 2, "round_off": 1}, "round_off": {"bug": 1, "round_off": 1}}
    page = as_markdown(outcomes, "python scripts/calibrate.py", "bench.cases")
    half = "1 of 2 (50.0 %; 1.3 to 98.7)"  # the interval as tables of it have it
    row = f"3 of 5 (60.0 %; 14.7 to 94.7) | {half} | {half} | 1 of 3 (33.3 %; 0.8 to 90.6)"
    assert f"| all cases | {row} |" in page
    wrong = page[page.index("## Wrong") : page.index("## How")]
    assert all(name in wrong for name in ("misplaced", "missed", "accused"))
    assert "either" not in wrong
    assert as_csv(outcomes).count("\n") == 6
    assert sorted(o.name for o in read_csv(as_csv(outcomes))) == sorted(o.name for o in outcomes)


def test_an_output_that_is_named_by_brackets_is_no_link():
    page = as_markdown([outcome("of [1][0]", "bug", "round_off", False)], "command", "bench.cases")
    assert "it is of \\[1]\\[0]" in page  # else the site looks for a page of that name


def test_what_the_held_out_cases_gave_at_first_sight_stays_on_the_page():
    first = [outcome("unseen", "bug", "round_off", False, held_out=True)]
    page = as_markdown(
        [outcome("right", "bug", "bug", True, True)], "command", "bench.cases", read_csv(as_csv(first))
    )
    missed = "1 of 1 (100.0 %; 2.5 to 100.0)"
    assert f"| all cases | 0 of 1 (0.0 %; 0.0 to 97.5) | 0 of 0 | 0 of 0 | {missed} |" in page


def test_places_are_counted_by_what_told_them():
    told = ["one change", "one change", "the flow of values", None]
    outcomes = [
        replace(
            outcome(str(k), "bug", "bug", True, k != 2),
            where={"module": "fc1", **({"told_by": t} if t else {})},
        )
        for k, t in enumerate(told)
    ]
    counted = {r.measure: (r.count, r.n) for r in rates(outcomes) if "told by" in r.measure}
    assert counted == {
        "right place, told by one change": (2, 2),
        "right place, told by the flow of values": (0, 1),
    }
    page = as_markdown(outcomes, "command", "bench.cases")
    assert "| one change | 2 of 2 (100.0 %; 15.8 to 100.0) |  |" in page
    assert "| all cases | 4 of 4 (100.0 %; 39.8 to 100.0) | 3 of 4 (75.0 %; 19.4 to 99.4) |" in page
