"""``+experiment=one_bit``: what a seed gives, spreads and pairs by definition, the verdict, the answer."""

import copy
import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr, t
from torch import nn

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import as_csv, as_files, in_page, shown
from driftlab.words import Evidence, Finding, Verdict
from experiments.one_bit import QUESTION
from experiments.one_bit.answer import answer
from experiments.one_bit.judging import further, judged, repeated, sign_flip_test
from experiments.one_bit.measure import APART, BASE_WEIGHTS
from experiments.one_bit.rows import BASE, ROWS, SOURCES, network_of, seeds_of, split_by_chance
from experiments.one_bit.stored import accuracy_curve, curves, packed, runs_of, unpacked
from experiments.one_bit.summary import Estimate, mean_of_pairs, ratio_of_pairs, spread
from experiments.one_bit.training import digest_of, look_steps, make_groups, rate_of, trained
from models.resnet14 import ResNet14
from models.rewrites.swap import RewriteError
from suite.command.errors import ConfigurationError
from suite.data import load_images
from suite.running.building import make_batches
from suite.running.networks import build_reference
from tests.suite.conftest import resolved, set_anew
from tests.suite.programs import ONE_BLOCK

torch.set_num_threads(1)
IMAGES, CLASSES = 200, 4


configured = partial(resolved, "one_bit")


@pytest.fixture(scope="module")
def settings():
    return configured(ONE_BLOCK, "eval_images=40", "window.steps=1", "progress.images=20")


@pytest.fixture(scope="module")
def images(settings):
    return load_images(settings, lambda line: None)


@pytest.fixture(scope="module")
def measured(settings, images):
    return QUESTION.measure(settings, 3, images)


@pytest.fixture(scope="module")
def values(measured):
    """As they come back from the disk."""
    return json.loads(json.dumps(measured.values))


# --- what is varied


def test_a_row_varies_its_sources_and_nothing_else(settings):
    runs = {key: [seeds_of(row, settings, run) for run in (0, 1, 7)] for key, row in ROWS.items()}
    for key, found in runs.items():
        for source in SOURCES:
            seeds = {seed[source] for seed in found}
            assert len(seeds) == (3 if source in ROWS[key].sources else 1)
            assert (BASE in seeds) == (source not in ROWS[key].sources)  # no two rows share a run
    assert set(ROWS["all"].sources) == set(SOURCES)


def test_a_source_that_is_set_alone_is_the_base_of_its_row():
    settings = configured("seeds.order=50")
    assert seeds_of(ROWS["nothing"], settings, 4)["order"] == 50
    assert seeds_of(ROWS["order"], settings, 4)["order"] == 55


def test_one_ulp_moves_one_weight_of_the_named_module(settings, images):
    seeds = seeds_of(ROWS["one_ulp"], settings, 2)
    plain = build_reference(settings, images, seeds["init"])
    moved, said = network_of(ROWS["one_ulp"], settings, images, seeds, 2)
    different = {n: (p != q) for (n, p), q in zip(plain.named_parameters(), moved.parameters(), strict=True)}
    assert sum(d.sum().item() for d in different.values()) == 1
    assert different["conv1.weight"].any()
    index = int(said.removeprefix("conv1.weight[").removesuffix("]"))
    before, after = plain.conv1.weight.flatten()[index], moved.conv1.weight.flatten()[index]
    assert after == torch.nextafter(before, before * torch.inf)


def test_a_module_that_is_not_there_is_refused_in_one_line(images):
    settings = configured("nudged=conv9")
    with pytest.raises(ConfigurationError, match="nudged=conv9 is no module of the network: write conv1"):
        network_of(ROWS["one_ulp"], settings, images, seeds_of(ROWS["one_ulp"], settings, 0), 0)


def test_splits_are_the_same_function_in_another_way_each_run():
    torch.manual_seed(0)
    model = ResNet14(width=4).double().eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    ways = set()
    for seed in range(6):
        split, words = split_by_chance(model, seed)
        assert split_by_chance(model, seed)[1] == words
        torch.testing.assert_close(split(x), model(x), rtol=1e-12, atol=1e-12)
        assert digest_of(split) == digest_of(model)  # folded back, to the bit
        parts = [m for m in split.modules() if isinstance(m, nn.Conv2d)]
        assert len(parts) == 13 + len(words.split(", "))
        ways.add(words)
    assert len(ways) == 6
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_network_without_channels_to_split_is_refused():
    with pytest.raises(RewriteError, match="no conv of the network has two channels"):
        split_by_chance(nn.Sequential(nn.Conv2d(1, 1, 3)), 0)


def test_a_digest_sees_one_bit_and_a_buffer():
    model = ResNet14(width=2)
    first = digest_of(model)
    with torch.no_grad():
        model.fc.bias[3] = torch.nextafter(model.fc.bias[3], torch.tensor(9.0))
    second = digest_of(model)
    model.bn1.running_mean[0] += 1
    assert len({first, second, digest_of(model)}) == 3


# --- how it is trained


def test_the_rate_rises_in_a_line_and_falls_with_the_cosine():
    settings = configured("steps=100", "warmup_steps=10")
    factor = rate_of(settings)
    assert [factor(s) for s in (0, 5, 9)] == pytest.approx([0, 0.5, 0.9])
    assert [factor(s) for s in (10, 50, 100)] == pytest.approx([0.5 + 0.5 * math.cos(math.pi / 10), 0.5, 0])
    settings.learning_rate_schedule, settings.warmup_steps = "constant", 0
    assert [rate_of(settings)(s) for s in (0, 99)] == [1, 1]


def test_norms_and_biases_have_a_share_of_the_rate(settings):
    model = ResNet14(width=2)
    groups = make_groups(settings, model).param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        slow = name.endswith("bias") or "bn" in name
        assert rates[id(parameter)] == pytest.approx(0.1 * (0.1 if slow else 1))
    assert {group["weight_decay"] for group in groups} == {5e-4}


def test_looks_go_from_the_first_update_to_the_last():
    assert look_steps(1000, 4) == [1, 10, 100, 1000]
    assert look_steps(3, 12) == [1, 2, 3]


def test_a_training_that_blows_up_is_known_as_such(images):
    settings = configured("optimizer.lr=1e30", "warmup_steps=0", "eval_images=20")
    module = build_reference(settings, images, 0)
    seeds = dict.fromkeys(SOURCES, 0)
    found = trained(settings, module, make_batches(settings, images, seeds), 0)
    assert not found["finite"]
    assert np.isfinite(unpacked(found["logits"])).all()  # so that JSON and tables can hold it


# --- what a seed leaves


def test_a_seed_holds_every_row_with_its_predictions(values, images, settings):
    assert list(values["rows"]) == list(ROWS)
    assert unpacked(values["labels"]).tolist() == images.test_labels[:40].tolist()
    for run in values["rows"].values():
        logits, classes = unpacked(run["logits"]), unpacked(run["classes"])
        assert logits.shape == (40, len(images.classes))
        assert unpacked(run["on_the_way"]).shape == (len(look_steps(settings.steps, 12)), 20)
        assert unpacked(run["on_the_way"])[-1].tolist() == classes[:20].tolist()
        most = logits.max(axis=1)
        assert (logits[np.arange(40), classes] == most).all()  # a tie in 11 bits is still the largest
    assert len({run["weights"] for run in values["rows"].values()}) == len(ROWS)


def test_with_nothing_varied_another_seed_ends_at_the_same_bits(values, settings, images):
    row = ROWS["nothing"]
    seeds = seeds_of(row, settings, 99)
    module, _ = network_of(row, settings, images, seeds, 99)
    again = trained(settings, module, make_batches(settings, images, seeds), 0)
    assert again["weights"] == values["rows"]["nothing"]["weights"]


def test_the_record_speaks_for_rounding(measured):
    probes = {p["probe"]: p for p in measured.record.run["probes"]}
    assert probes[BASE_WEIGHTS]["reading"] == measured.values["rows"]["nothing"]["weights"]
    runs = measured.values["rows"]
    for key in ("split", "one_ulp"):
        mine, base = (unpacked(runs[k]["classes"]) for k in (key, "nothing"))
        assert probes[f"{APART}_{key}"]["measured"] == np.mean(
            [a != b for a, b in zip(mine, base, strict=True)]
        )
    judgement = judged([measured.record])
    assert judgement.verdict is Verdict.ROUND_OFF
    asked = [e.probe for e in judgement.evidence]
    assert {"nothing_varied", "further_than_one_bit", "float64_pair"} <= set(asked)
    assert not any(name.startswith((APART, BASE_WEIGHTS)) for name in asked)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("shrink=0", "shrink=0 must be a whole number of at least 1"),
        ("norm_rate=0", "norm_rate=0 must be a finite number above 0"),
        ("~window.learning_rate", "window.learning_rate is not set"),
        ("progress.points=0", "progress.points=0 must be a whole number"),
        ("warmup_steps=-1", "warmup_steps=-1 must be a whole number"),
    ],
)
def test_refuses(override, said):
    with pytest.raises(ConfigurationError, match=said):
        set_anew("one_bit", override)


def test_refuses_what_cannot_be_built_before_there_is_a_folder(images):
    for override, said in (("nudged=conv9", "no module"), ("shrink=100", "leaves nothing of 32 pixels")):
        with pytest.raises(ConfigurationError, match=said):
            QUESTION.check(set_anew("one_bit", override), 0, images)


@pytest.mark.parametrize(
    ("dtype", "array"), [("i2", [[1, -2], [300, 4]]), ("f2", [[0.5, -1.25], [8.0, 0.0]])]
)
def test_what_is_packed_reads_back(dtype, array):
    found = unpacked(json.loads(json.dumps(packed(np.array(array), dtype))))
    assert found.tolist() == array


# --- intervals


def test_the_interval_of_a_sum_over_runs_is_student_s():
    """Where a pair's number is the sum of its runs', the mean over pairs is twice the mean of the runs."""
    runs = np.random.default_rng(0).normal(3, 1, 8)
    found = mean_of_pairs(runs[:, None] + runs[None])
    half = t.ppf(0.975, 7) * 2 * runs.std(ddof=1) / 8**0.5
    assert (found.value, found.low, found.high) == pytest.approx(
        (2 * runs.mean(), 2 * runs.mean() - half, 2 * runs.mean() + half)
    )


def leave_one_out(n, of):
    """The definition of the jackknife, in loops: value and standard error."""
    left = [of([k for k in range(n) if k != out]) for out in range(n)]
    middle = sum(left) / n
    return of(list(range(n))), math.sqrt((n - 1) / n * sum((x - middle) ** 2 for x in left))


def test_spread_is_the_jackknife_of_its_logarithm():
    numbers = np.random.default_rng(1).normal(size=6)

    def of(kept):
        mean = sum(numbers[k] for k in kept) / len(kept)
        return 0.5 * math.log(sum((numbers[k] - mean) ** 2 for k in kept) / (len(kept) - 1))

    value, error = leave_one_out(6, of)
    found, wide = spread(numbers), t.ppf(0.975, 5) * error
    assert found.value == pytest.approx(numbers.std(ddof=1))
    assert (found.low, found.high) == pytest.approx((math.exp(value - wide), math.exp(value + wide)))


def test_a_ratio_leaves_a_seed_out_of_both_rows():
    generator = np.random.default_rng(2)
    first, second = (m + m.T for m in generator.uniform(1, 2, (2, 5, 5)))

    def of(kept):
        pairs = list(itertools.combinations(kept, 2))
        return math.log(sum(first[p] for p in pairs) / sum(second[p] for p in pairs))

    value, error = leave_one_out(5, of)
    found, wide = ratio_of_pairs(first, second, range(5), range(5)), t.ppf(0.975, 4) * error
    expected = [math.exp(x) for x in (value, value - wide, value + wide)]
    assert [found.value, found.low, found.high] == pytest.approx(expected)
    same = ratio_of_pairs(first, first, range(5), range(5))
    assert (same.value, same.low, same.high) == (1, 1, 1)


def test_rows_that_lost_different_seeds_still_have_a_ratio():
    matrix = np.full((4, 4), 3.0)
    found = ratio_of_pairs(matrix, 2 * matrix, [0, 1, 2, 3], [1, 2, 3, 4])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize(("n", "known", "bounded"), [(0, False, False), (1, False, False), (2, True, False)])
def test_too_few_runs_have_no_interval(n, known, bounded):
    for found in (mean_of_pairs(np.ones((n, n))), spread(np.arange(float(n)))):
        assert (found.value is not None, found.bounded) == (known, bounded)


def test_no_interval_leaves_what_can_be():
    matrix = np.zeros((4, 4))
    matrix[0] = matrix[:, 0] = 100
    found = mean_of_pairs(matrix, 0, 100)
    assert (found.low, found.high) == (0, 100)
    assert found.value == 50


def test_equal_runs_have_a_spread_of_nothing():
    assert spread(np.ones(5)) == Estimate(0.0)


# --- spreads and pairs of stored runs


def made(spec, n=6, seed=0):
    """Seeds' values as ``measure`` leaves them: ``spec`` says how often a run of a row errs from its base."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, IMAGES)

    def run(key, number):
        rate, weights = spec.get(key, 0.3), f"{key}-{number}"
        own = np.random.default_rng([list(ROWS).index(key), number])
        wrong = own.random(IMAGES) < rate
        classes = np.where(wrong, (labels + own.integers(1, CLASSES, IMAGES)) % CLASSES, labels)
        logits = own.normal(size=(IMAGES, CLASSES)) * 0.1
        logits[np.arange(IMAGES), classes] += 3
        return {
            "finite": True,
            "changed": "",
            "classes": packed(classes, "i2"),
            "logits": packed(logits, "f2"),
            "on_the_way": packed(np.array([classes[:50]] * 3), "i2"),
            "weights": "the same" if key == "nothing" else weights,
        }

    return {
        number: {
            "rows": {key: run(key, 0 if key == "nothing" else number) for key in ROWS},
            "labels": packed(labels, "i2"),
            "train_images": 2000,
        }
        for number in range(n)
    }


def test_pairs_are_those_of_the_definitions():
    found, runs = runs_of(made({}, n=3), "order"), made({}, n=3)
    labels = unpacked(runs[0]["labels"])
    logits = [unpacked(v["rows"]["order"]["logits"]).astype(float) for v in runs.values()]
    classes = [unpacked(v["rows"]["order"]["classes"]) for v in runs.values()]
    for i, j in itertools.combinations(range(3), 2):
        differ = sum(a != b for a, b in zip(classes[i], classes[j], strict=True)) / IMAGES
        assert found.disagreements[i, j] == found.disagreements[j, i] == pytest.approx(100 * differ)
        rank = spearmanr(logits[i].ravel(), logits[j].ravel()).statistic
        assert found.correlations[i, j] == pytest.approx(rank)
        together = ((logits[i] + logits[j]) / 2).argmax(1)
        right = [np.mean(c == labels) for c in (together, classes[i], classes[j])]
        assert found.gains[i, j] == pytest.approx(100 * (right[0] - (right[1] + right[2]) / 2))
    assert np.isnan(np.diag(found.disagreements)).all()


def test_runs_that_blew_up_are_left_out_and_equal_ones_counted():
    values = made({}, n=4)
    values[1]["rows"]["split"]["finite"] = False
    values[2]["rows"]["split"]["weights"] = "the same"
    found = runs_of(values, "split")
    assert (found.seeds, found.blown_up, found.same_as_base, found.endings) == ([0, 2, 3], [1], [2], 3)
    assert found.disagreements.shape == (3, 3)
    for value in values.values():
        value["rows"]["split"]["finite"] = False
    assert runs_of(values, "split").n == 0


def test_two_equal_runs_gain_nothing_though_two_logits_are_the_largest():
    values = made({}, n=2)
    for value in values.values():
        ties = packed(np.ones((IMAGES, CLASSES)), "f2")  # as 11 bits may leave them
        value["rows"]["split"] |= {"logits": ties, "classes": packed(np.ones(IMAGES), "i2")}
    assert runs_of(values, "split").gains[0, 1] == 0


def test_curves_are_means_over_pairs():
    values = made({}, n=3)
    seen = [unpacked(v["rows"]["init"]["on_the_way"]) for v in values.values()]
    pairs = itertools.combinations(seen, 2)
    expected = np.mean([[100 * np.mean(a != b) for a, b in zip(x, y, strict=True)] for x, y in pairs], axis=0)
    assert curves(values, "init") == pytest.approx(expected)
    assert len(curves(made({}, n=1), "init")) == 0
    labels = unpacked(values[0]["labels"])[: seen[0].shape[1]]
    right = [np.mean([100 * np.mean(run[look] == labels) for run in seen]) for look in range(len(seen[0]))]
    assert accuracy_curve(values, "init") == pytest.approx(right)


def test_where_fewer_images_are_asked_at_the_end_the_accuracy_on_the_way_is_of_those():
    values = made({}, n=3)
    few = unpacked(values[0]["labels"])[:4]
    values[0]["labels"] = packed(few, "i2")
    seen = [unpacked(v["rows"]["init"]["on_the_way"])[:, :4] for v in values.values()]
    right = np.mean([[100 * np.mean(look == few) for look in run] for run in seen], axis=0)
    assert accuracy_curve(values, "init") == pytest.approx(right)


# --- the verdict


def test_signs_by_chance_reach_the_sum_as_often_as_coins_do():
    assert sign_flip_test([1.0] * 7) == pytest.approx(2**-7)
    assert sign_flip_test([-1.0] * 7) == 1
    assert sign_flip_test([0.0, 0.0]) == 1
    assert sign_flip_test([0.1, 0.2, -0.3]) == pytest.approx(5 / 8)  # by hand: five of the eight reach 0
    assert 0 < sign_flip_test([1.0] * 20) < 1e-4


def test_as_few_as_seven_seeds_can_show_that_the_split_goes_further():
    assert further([(0.2, 0.1)] * 7).supports is Verdict.INCONCLUSIVE
    assert further([(0.2, 0.1)] * 6).supports is Verdict.ROUND_OFF
    assert further([(0.1, 0.2)] * 9).supports is Verdict.ROUND_OFF
    nothing = further([(None, 0.1)])
    assert (nothing.supports, nothing.measured) == (None, None)


def again(record, seed, split, ulp, weights="the same", environment="here"):
    """The record as another seed would have left it, with these distances."""
    probes = [p for p in record.run["probes"] if not p["probe"].startswith((APART, BASE_WEIGHTS))]
    own = {f"{APART}_split": split, f"{APART}_one_ulp": ulp}
    probes += [Finding(Evidence(k, "?", v, None, None, "")).as_dict() for k, v in own.items()]
    probes.append(Finding(Evidence(BASE_WEIGHTS, "?", None, None, None, weights)).as_dict())
    run = record.run | {"probes": probes, "environment": environment}
    return SeedRecord(seed, record.curves, record.evaluations, run)


def test_a_split_that_goes_further_than_one_bit_is_not_called_rounding(measured):
    near = [again(measured.record, s, 0.30 + 0.01 * (-1) ** s, 0.30) for s in range(8)]
    assert judged(near).verdict is Verdict.ROUND_OFF
    far = [again(measured.record, s, 0.40, 0.30) for s in range(8)]
    judgement = judged(far)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "40.0 %" in judgement.headline


def test_a_training_that_does_not_repeat_itself_settles_the_verdict(measured):
    records = [again(measured.record, s, 0.3, 0.3, weights=f"{s}") for s in range(2)]
    judgement = judged(records)
    assert judgement.verdict is Verdict.NONDETERMINISTIC
    assert "2 runs with nothing varied end at 2 different weights" in judgement.headline


def test_other_kernels_may_end_elsewhere(measured):
    records = [
        again(measured.record, s, 0.3, 0.3, weights=f"{s % 2}", environment=f"{s % 2}") for s in range(4)
    ]
    assert repeated(records).supports is None
    assert "within each of 2 environments" in repeated(records).reading


def test_no_record_is_no_verdict():
    assert judged([]).verdict is Verdict.INCONCLUSIVE


# --- the answer


def said(spec, n=6, change=None):
    values = made(spec, n)
    if change:
        change(values)
    return answer(configured("progress.points=3"), values)


def test_alike_rows_are_not_told_apart():
    found = said({})
    assert found.sentence.startswith("Yes, as far as these runs can tell: two runs that differ in one bit")
    assert "the same as one bit, as far as these runs can tell" in found.sentence
    assert "With nothing varied all 6 runs end at the same weights, bit for bit." in found.sentence
    assert "10.6 % and 10.7 %" in found.sentence
    assert "Not to be told from all three together by disagreement: one ulp in one weight" in conclusion(
        found
    )


def conclusion(found):
    return next(table.conclusion for table in found.tables if table.name == "variation")


@pytest.mark.parametrize(
    ("spec", "opening"),
    [
        ({"one_ulp": 0.05}, "Not quite: "),
        ({"one_ulp": 0.6}, "Yes, and more: "),
        ({"one_ulp": 0.0}, "No: "),
    ],
)
def test_unlike_rows_are_told_apart(spec, opening):
    found = said(spec)
    assert found.sentence.startswith(opening)
    if spec["one_ulp"]:
        assert "Told apart: one ulp in one weight (" in conclusion(found)


@pytest.mark.parametrize(("rate", "words"), [(0.05, "less than one bit"), (0.6, "more than one bit")])
def test_the_split_beside_one_bit(rate, words):
    assert words in said({"split": rate}).sentence


def test_one_run_is_no_pair():
    found = said({}, n=1)
    assert found.sentence == "There are no two finished runs to compare: run more seeds."
    row = next(r for r in found.tables[0].rows if r["row"] == "all three")
    assert (row["n"], row["spread"], row["disagreement"]) == (1, None, None)


def test_nothing_that_changes_is_nothing_to_compare():
    assert said({"all": 0.0, "one_ulp": 0.0}).sentence.startswith("There is nothing to compare")


def test_two_runs_have_no_interval():
    found = said({}, n=2)
    assert found.sentence.startswith("Too few runs to say: ")
    assert "only" not in found.sentence


def test_what_does_not_repeat_itself_is_said():
    def differ(values):
        values[2]["rows"]["nothing"]["weights"] = "others"

    assert "With nothing varied 6 runs end at 2 different weights" in said({}, change=differ).sentence


def test_what_blew_up_is_said():
    def blow_up(values):
        for seed in (0, 3):
            values[seed]["rows"]["init"]["finite"] = False

    found = said({}, change=blow_up)
    assert "Left out, because the training blew up: initial weights 2." in found.sentence
    assert next(r for r in found.tables[0].rows if r["row"] == "initial weights")["n"] == 4


def test_nothing_left_of_a_row():
    def blow_up(values):
        for value in values.values():
            value["rows"]["all"]["finite"] = value["rows"]["order"]["finite"] = False

    found = said({}, change=blow_up)
    assert found.sentence.startswith("There are no two finished runs to compare")
    assert as_files(found.figures[0])["png"].startswith(b"\x89PNG")


def test_runs_that_ended_as_with_nothing_varied_are_counted():
    def equal(values):
        values[4]["rows"]["one_ulp"]["weights"] = "the same"

    assert "1 of the runs that differ by round-off alone ended as with nothing varied" in conclusion(
        said({}, change=equal)
    )


def test_the_full_size_is_that_of_the_paper_but_for_epochs_and_runs():
    settings = configured("scale=full", "progress.points=3")
    values = made({}, n=3)
    for value in values.values():
        value["train_images"] = 50_000
    table = next(t for t in answer(settings, values).tables if t.name == "differences")
    assert {row["what"]: row["here"] for row in table.rows}["epochs"] == "100"
    assert {row["what"] for row in table.rows} == {"epochs", "runs a row", "one bit", "all sources"}


@pytest.mark.parametrize("n", [1, 2, 5])
def test_tables_and_figure_can_be_shown(n):
    found = said({}, n=n)
    for table in found.tables:
        assert len(as_csv(table).splitlines()) == len(table.rows) + 1
        assert shown(table).conclusion
    for figure in found.figures:
        assert set(as_files(figure)) == {"svg", "png"}
        page = in_page(figure)
        assert "data order" in page
        assert "#06060" not in page
