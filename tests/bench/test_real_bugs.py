"""The bench of real bugs: that it is what it says it is, and that the diagnosis is right on its quickest.

All of it takes half an hour: ``uv run --group bench scripts/calibrate.py --of real_bugs``.
"""

import copy
import importlib
import pkgutil
import re

import pytest
import torch

from bench import real_bugs, real_summary
from bench.case import REGISTERED
from bench.real_habits import HABITS, Seen, seen_of
from bench.run import Outcome, run_case

FILES = sorted(m.name for m in pkgutil.iter_modules(real_bugs.__path__) if m.name[0] != "_")
OUT_OF = {
    "right_transformers": "transformers",
    "right_ports": "transformers",
    "right_peft": "peft",
    "right_vision": "timm",
}
for name in FILES:
    if name not in OUT_OF:
        importlib.import_module(f"bench.real_bugs.{name}")
CASES = {name: case for (room, name), case in REGISTERED.items() if room == "bench.real_bugs"}
BUGS = [case for case in CASES.values() if case.kind == "real bug"]


def test_each_bug_says_where_it_was_published_and_what_was_wrong():
    thread = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+")
    assert len(BUGS) >= 40
    for case in BUGS:
        assert thread.fullmatch(case.source.link), case.name
        assert case.source.versions, case.name
        assert case.source.wrong.endswith("."), case.name
        assert CASES[f"{case.name}_mended"].source == case.source


@pytest.mark.parametrize("case", BUGS[::6], ids=lambda case: case.name)
def test_a_bug_leaves_the_reference_alone_and_has_a_place_in_it(case):
    reference = case.task.network()
    before = copy.deepcopy(reference.state_dict())
    case.rewrite(copy.deepcopy(reference))
    assert all(torch.equal(before[n], t) for n, t in reference.state_dict().items())
    assert set(case.modules) <= dict(reference.named_modules(remove_duplicate=False)).keys()


QUICK = (
    "average_without_the_buffers",
    "batch_norm_with_the_momentum_of_tensorflow",
    "first_row_taken_for_padding",
    "gradient_means_of_unequal_shards",
    "positions_counted_through_the_padding",
    "positions_counted_through_the_padding_mended",
    "scatter_without_a_gradient",
    "scatter_without_a_gradient_mended",
)


@pytest.mark.parametrize("name", QUICK)
def test_the_diagnosis_is_right(name):
    outcome = run_case(CASES[name])
    assert outcome.right, f"{outcome.label}, and it said {outcome.verdict}: {outcome.headline}"
    assert outcome.placed is not False, f"{CASES[name].modules}, and it said {outcome.where}"


@pytest.mark.parametrize(("file", "name"), [("right_peft", "ia3_of_our_own")])
def test_a_pair_out_of_a_library_is_right(file, name):
    pytest.importorskip(OUT_OF[file], reason="not in the environment: uv sync --group bench")
    importlib.import_module(f"bench.real_bugs.{file}")
    outcome = run_case(REGISTERED["bench.real_bugs", name])
    assert outcome.right, f"{outcome.label}, and it said {outcome.verdict}: {outcome.headline}"


def test_habits_see_what_they_look_at_and_no_more():
    def said(name):
        seen = seen_of(CASES[name])
        return {rule.key: rule.same(seen) for rule in HABITS}

    assert set(said("merged_bias_without_its_scale").values()) == {True}  # wrong in eval mode alone
    forgotten = said("group_never_handed_over")
    assert [forgotten[key] for key in ("outputs", "gradients", "two_updates")] == [True, True, False]


def judged(verdict, right, first):
    case = BUGS[0]
    where = {"module": case.modules[0], "pass": case.passes[0], "step": 0}
    outcome = Outcome(case.name, case.kind, "mlp", False, "bug", verdict, right, right, where, "why", 1.5)
    return real_summary.Judged(case, outcome, Seen(outputs=True), first)


def test_what_a_case_gave_at_first_sight_stays():
    then = real_summary.as_csv([judged("round_off", False, {})])
    now = judged("bug", True, real_summary.first_sights(then)[BUGS[0].name])
    row = now.as_row()
    assert (row["verdict at first sight"], row["verdict"]) == ("round_off", "bug")
    assert real_summary.first_sights(real_summary.as_csv([now])) == real_summary.first_sights(then)
    page = real_summary.as_markdown([now], "command")
    assert "| published bugs | 0 of 1 (0.0 %) |" in page
    assert "| assert_close of the first output | 0 of 1 (0.0 %) |" in page
