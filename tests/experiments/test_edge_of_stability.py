"""``+experiment=edge_of_stability``: what a seed gives, the exact statistics, the verdict, what is said."""

import copy
import json
import math
from functools import partial
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import as_csv, as_files, shown
from driftlab.verdict.outcomes import fell_over
from driftlab.words import Evidence, Finding, Verdict
from experiments.edge_of_stability import QUESTION
from experiments.edge_of_stability import outcomes as over
from experiments.edge_of_stability.answer import answer
from experiments.edge_of_stability.judged import judged, outcome_findings
from experiments.edge_of_stability.measure import about
from models.rewrites.split_conv import split_conv
from suite.command.errors import ConfigurationError
from suite.data import load_images
from suite.running.building import make_batches, own_seeds
from suite.running.networks import build_reference
from tests.suite.conftest import resolved, set_anew
from tests.suite.programs import ONE_BLOCK

torch.set_num_threads(1)


configured = partial(resolved, "edge_of_stability")


@pytest.fixture(scope="module")
def measured():
    """Settings, images, and what one seed left, as it comes back from the disk."""
    settings = configured(ONE_BLOCK, "steps=12", "learning_rates=[1000,0.1]", "eval_images=40")
    images = load_images(settings, lambda line: None)
    found = QUESTION.measure(settings, 3, images)
    return settings, images, json.loads(json.dumps(found.values)), found.record


def run_of(values, arm, rate):
    (run,) = [r for r in values["runs"] if (r["arm"], r["rate"]) == (arm, rate)]
    return run


def test_a_seed_leaves_a_run_of_each_arm_at_each_rate(measured):
    _, _, values, _ = measured
    found = [(r["rate"], r["arm"]) for r in values["runs"]]
    assert found == [(rate, arm) for rate in (0.1, 1000.0) for arm in over.ARMS]
    low = [run_of(values, arm, 0.1) for arm in over.ARMS]
    assert not any(over.fell(r) for r in low)
    assert all(0 <= r["accuracy"] <= 1 for r in low)
    assert all(over.fell(run_of(values, arm, 1000.0)) for arm in over.ARMS)


@pytest.mark.parametrize("arm", ["reference", "candidate"])
def test_an_arm_is_trained_as_a_plain_loop_trains_it(measured, arm):
    settings, images, values, _ = measured
    seeds = own_seeds(settings, 3)
    batches = make_batches(settings, images, seeds)
    network = build_reference(settings, images, seeds["init"])
    network = split_conv(network, dim="out", parts=2) if arm == "candidate" else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    losses = []
    for step in range(settings.steps + 1):
        inputs, targets = batches.batch(step)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        optimizer.zero_grad()
        loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    run = run_of(values, arm, 0.1)
    assert (run["first"], run["tail"]) == (losses[0], losses[-1:])


def test_control_and_candidate_start_as_the_reference_and_come_apart(measured):
    _, _, values, _ = measured
    reference, control, candidate = (run_of(values, arm, 0.1) for arm in over.ARMS[:3])
    assert control["first"] == pytest.approx(reference["first"], rel=1e-5)
    assert candidate["first"] == pytest.approx(reference["first"], rel=1e-5)
    # a last loss has 24 bits, in which two of them may be equal on one CPU and not on another
    runs = [[run_of(values, arm, rate) for rate in (0.1, 1000.0)] for arm in over.ARMS[:3]]
    assert len({tuple((r["tail"][-1], r["accuracy"]) for r in both) for both in runs}) == 3


def test_the_probes_accuse_the_bug_and_not_the_candidate(measured):
    _, _, values, record = measured
    assert values["probes"]["candidate"]["verdict"] is None
    assert values["probes"]["bug"]["verdict"] == "bug"
    assert "fc" in values["probes"]["bug"]["reading"]
    function = [Finding.from_dict(f).evidence for f in record.run["probes"] if f["probe"] == "function"]
    assert [e.supports for e in function] == [Verdict.ROUND_OFF]


def test_the_answer_to_what_was_measured(measured):
    settings, _, values, record = measured
    found = answer(settings, {3: values})
    assert "at every learning rate reference and control end alike (1 seed)" in found.sentence
    assert "call the bug a bug in 1 of 1 seed, the candidate in 0" in found.sentence
    assert judged([record]).verdict is Verdict.UNSTABLE
    assert "end differently" not in judged([record]).headline


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rates=[]", "learning_rates=.. is empty: name one at least"),
        ("learning_rates=[0.1,fast]", "learning_rates=fast must be a finite number"),
        ("learning_rates=3", "must be a list: write learning_rates=.3."),
        ("learning_rates=[1,-1]", "above 0"),
        ("learning_rates=[1,1]", "write each once"),
        ("learning_rates=[inf]", "finite"),
        ("bug.target=null", "bug.target"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused_in_a_line(override, message):
    with pytest.raises(ConfigurationError, match=message):
        set_anew("edge_of_stability", override)


def test_the_plan_names_the_rates():
    assert about(configured("learning_rates=[5,0.1]")) == "4 arms at 2 learning rates from 0.1 to 5"


SETTINGS = OmegaConf.create({"rewrite": {"target": "a.b.halved"}, "bug": {"target": "a.b.doubled"}})


def ran(arm, rate, fallen=False, blown=None, end=1.5):
    """A run that began at a loss of 2."""
    tail = [] if blown is not None else [90.0 if fallen else end] * 3
    return {"rate": rate, "arm": arm, "blown_up_at": blown, "first": 2.0, "tail": tail, "accuracy": 0.5}


def seeds_that(*outcomes, rates=(1.0,), bug="bug", candidate=None):
    """A seed for each string: which arms diverged at each rate, by the arms' initials, b for the bug."""
    initials = dict(zip(over.ARMS, "rkcb", strict=True))
    probes = {
        "candidate": {"verdict": candidate, "reading": None},
        "bug": {"verdict": bug, "reading": None},
    }
    return {
        seed: {
            "runs": [ran(arm, rate, initials[arm] in fallen) for rate in rates for arm in over.ARMS],
            "probes": probes,
        }
        for seed, fallen in enumerate(outcomes)
    }


def test_who_fell_over_is_the_rule_of_the_verdict():
    for losses in ([2.0, 1.0, 4.1], [2.0, 9.0, 3.9], [2.0, 1.0, 4.0]):
        rows = [{"step": i, "loss/reference.float32": x} for i, x in enumerate(losses)]
        record = SeedRecord(0, rows, [], {"arms": {"reference.float32": {"blown_up_at": None}}})
        run = ran("reference", 1.0) | {"first": losses[0], "tail": losses[-1:]}
        assert over.fell(run) is fell_over(record, "reference.float32")
    assert over.fell(ran("bug", 1.0, blown=0))


def test_pairs_are_counted_by_hand():
    values = seeds_that("", "r", "c", "c", "rc", "rc")
    pairs = over.paired(values, "candidate", 1.0)
    assert (pairs.neither, pairs.only_reference, pairs.only_arm, pairs.both) == (1, 1, 2, 2)
    assert (pairs.n, pairs.differing, pairs.fallen, pairs.reference_fallen) == (6, 3, 4, 3)
    assert over.net(values, "candidate") == [0, -1, 1, 1, 0, 0]
    assert over.edge(values) == [1.0]  # the control never diverged


def test_the_rate_in_the_middle_is_chosen_by_the_reference_alone():
    values = {
        seed: {
            "runs": [
                ran(arm, rate, arm == "reference" and seed < count)
                for rate, count in ((1.0, 0), (2.0, 3), (3.0, 4))
                for arm in over.ARMS
            ]
        }
        for seed in range(4)
    }
    assert over.middle(values) == 2.0


def test_losses_are_medians_over_those_that_did_not_blow_up():
    values = {0: {"runs": [ran("bug", 1.0, blown=4)]}, 1: {"runs": [ran("bug", 1.0, end=1.0)]}}
    assert over.at_end(values, "bug", 1.0, over.final_loss) == median([1.0])
    assert over.learned(values, "bug", 1.0) == 1
    assert over.at_end({0: values[0]}, "bug", 1.0, over.final_loss) is None


def test_an_edge_and_a_bug_are_said():
    values = seeds_that("rb", "kb", "cb", *["b"] * 15, "rkb", "rcb")
    said = answer(SETTINGS, values).sentence
    assert "unstable at learning rate 1: there" in said
    assert "end differently in 3 of 20 seeds" in said
    assert "the candidate (halved) is not told from the reference (p = 1)" in said
    assert "between the two in 3 of 20 cases (15 %, 95 % interval 3 % to 38 %)" in said
    assert "and between reference and control in 3" in said
    assert "The bug (doubled) is told (p = 4.6e-05): at 1 it diverges in 20 of 20, the reference in 3" in said


def test_no_edge_and_a_bug_that_is_not_told():
    said = answer(SETTINGS, seeds_that("", "", bug=None)).sentence
    assert "No edge was met: at every learning rate reference and control end alike (2 seeds)" in said
    assert (
        "The bug (doubled) is not told by its outcomes (p = 1, 2 seeds); at 1 it ends with a loss of 1.50"
        in said
    )
    assert "call the bug a bug in 0 of 2 seeds, the candidate in 0" in said


def test_a_candidate_that_is_told():
    values = seeds_that(*["c"] * 12)
    said = answer(SETTINGS, values).sentence
    assert "the candidate (halved) diverges unlike the reference (p = 0.0015)" in said
    found = answer(SETTINGS, values)
    assert "p below 0.01: candidate at 1." in found.tables[0].conclusion


def test_where_every_run_blew_up_no_loss_is_said():
    values = seeds_that("rkcb")
    for run in values[0]["runs"]:
        run |= {"blown_up_at": 2, "tail": [], "accuracy": None}
    found = answer(SETTINGS, values)
    assert "The bug (doubled) is not told by its outcomes (p = 1, 1 seed). Probes" in found.sentence
    assert found.tables[1].rows[0]["loss"] is None
    as_files(found.figures[0])


def test_the_tables_hold_every_rate_and_arm():
    by_rate, by_arm = answer(SETTINGS, seeds_that("r", "kb", "cb", rates=(0.5, 2.0))).tables
    assert [r["rate"] for r in by_rate.rows] == ["0.5", "2"]
    row = by_rate.rows[0]
    assert [row[k] for k in ("learned", *over.ARMS)] == [2, 1, 1, 1, 2]
    assert row["bug_pairs"] == "1 / 2 (p = 1)"
    assert [r["arm"] for r in by_arm.rows] == ["reference", "control", "candidate (halved)", "bug (doubled)"]
    assert [r.get("sides") for r in by_arm.rows] == [None, "1 / 1", "1 / 1", "2 / 1"]
    assert [r["fallen"] for r in by_arm.rows] == ["2 of 6", "2 of 6", "2 of 6", "4 of 6"]
    for table in (by_rate, by_arm):
        assert all(len(row) == len(table.columns) for row in shown(table).rows)
        assert as_csv(table).count("\n") == len(table.rows) + 1


def test_that_nobody_learned_at_the_edge_is_said():
    values = seeds_that("r", "k", "")
    assert "that did not" not in answer(SETTINGS, values).tables[0].conclusion
    values[1]["runs"][0]["tail"] = [2.1]
    said = answer(SETTINGS, values).tables[0].conclusion
    assert said.endswith("Of the reference's 2 runs at 1 that did not diverge, 1 learned.")


def test_the_figure_promises_no_more_than_it_shows():
    drawn = [answer(SETTINGS, v).figures[0] for v in (seeds_that("rk", "c", "k"), seeds_that("", ""))]
    assert drawn[0].title == "Networks of the same function diverge in different seeds"
    assert drawn[1].title == "Which runs diverge, by learning rate"
    accused = answer(SETTINGS, seeds_that("rk", "c", "k", candidate="bug")).figures[0]
    assert accused.title == drawn[1].title
    assert len({as_files(f)["svg"] for f in drawn}) == 2


FUNCTION = Evidence("function", "?", 0.0, 1.0, Verdict.ROUND_OFF, "they do")


def records(values, *evidence):
    """Of seeds whose probes found ``evidence``."""
    probes = [Finding(e).as_dict() for e in evidence]
    return [
        SeedRecord(seed, [], [], {"probes": [*probes, *(f.as_dict() for f in outcome_findings(v["runs"]))]})
        for seed, v in values.items()
    ]


def test_an_edge_is_unstable():
    found = judged(records(seeds_that("r", "", "rkc", "c"), FUNCTION))
    assert found.verdict is Verdict.UNSTABLE
    assert found.headline.endswith("end differently at one learning rate or more in 1 of 4 seeds")
    assert [e.probe for e in found.evidence if e.supports is Verdict.UNSTABLE] == ["edge", "fallen"]


def test_all_falling_alike_is_unstable_without_an_edge():
    found = judged(records(seeds_that("rkc", "rkc"), FUNCTION))
    assert found.verdict is Verdict.UNSTABLE
    assert "diverges" in found.headline
    assert "training is unstable" not in found.headline


def test_nobody_falling_is_round_off():
    found = judged(records(seeds_that("", "b"), FUNCTION))
    assert found.verdict is Verdict.ROUND_OFF
    assert found.headline.endswith("(2 seeds)")


def test_a_bug_that_the_probes_find_is_a_bug_whatever_the_outcomes():
    wrong = Evidence("function", "?", 9.0, 1.0, Verdict.BUG, "the forward of fc is off")
    found = judged(records(seeds_that("r", "kc"), wrong))
    assert found.verdict is Verdict.BUG
    assert "the forward of fc is off" in found.headline


def test_a_candidate_that_alone_falls_over_is_left_open():
    found = judged(records(seeds_that(*["c"] * 14, "rk"), FUNCTION))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "unlike the reference" in found.headline


def test_fewer_bits_come_before_the_edge_and_no_probe_leaves_it_open():
    narrow = Evidence("precision", "?", 900.0, 90.5, Verdict.REDUCED_PRECISION, "ten bits")
    edge = seeds_that("r", "kc")
    assert judged(records(edge, FUNCTION, narrow)).verdict is Verdict.REDUCED_PRECISION
    assert judged(records(edge)).verdict is Verdict.INCONCLUSIVE
    assert judged([]).verdict is Verdict.INCONCLUSIVE


def test_one_seed_that_speaks_for_fewer_bits_is_heard():
    narrow = Evidence("precision", "?", 900.0, 90.5, Verdict.REDUCED_PRECISION, "ten bits")
    fine = Evidence("precision", "?", 1.0, 90.5, None, "as many")
    edge = seeds_that("r", "kc")
    one, other = copy.deepcopy(edge), copy.deepcopy(edge)
    mixed = [records(one, FUNCTION, fine)[0], records(other, FUNCTION, narrow)[1]]
    assert judged(mixed).verdict is Verdict.REDUCED_PRECISION
