"""Kinks: flips counted and predicted against second implementations, drift around them, and the answer."""

import copy
import json
import math
from functools import partial
from itertools import product
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import as_files, in_page, shown
from driftlab.words import Verdict
from experiments.kinks.answer import answer
from experiments.kinks.crossings import COUNTS, patch_keys, sign_changes, winner_changes
from experiments.kinks.judged import judged, probes
from experiments.kinks.measure import about, measure
from experiments.kinks.series import crossed, first_flip, growth, leap, quiet_ratio
from experiments.kinks.tables import ratio_of_sums
from suite.command.errors import ConfigurationError
from suite.data import load_images
from tests.suite.conftest import ROOT, resolved, set_anew

POOL = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
CONF = ROOT / "conf" / "experiment" / "kinks.yaml"


configured = partial(resolved, "kinks")


def counted(tensor):
    return dict(zip(COUNTS, tensor.tolist(), strict=True))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- how many signs and winners change


def test_sign_changes_of_a_normal_layer_are_those_of_the_closed_form():
    n, spread = 400_000, 0.01
    z = drawn(n)
    found = counted(sign_changes(z, z + spread * drawn(n, seed=1)))
    exact = n * math.atan(spread) / math.pi  # of two normals whose correlation is cos(atan(spread))
    assert found["changed"] == pytest.approx(exact, abs=4 * math.sqrt(exact))
    for law in ("product", "near", "product_half", "near_half"):
        assert found[law] == pytest.approx(exact, rel=0.03)
    assert found["ties"] == 0


def test_near_takes_the_perturbation_of_what_lies_near_zero():
    """Where small pre-activations are moved less, the mean of the layer says too much."""
    z = drawn(400_000)
    moved = 0.01 * (0.2 + z.abs()) * drawn(400_000, seed=1)
    found = counted(sign_changes(z, z + moved))
    density = NormalDist().pdf(0)
    # near 0 the perturbation is 0.002 of a normal: E|d| = 0.002 sqrt(2 / pi); those within 0.1 have 0.05 more
    exact = 400_000 * density * 0.002 * math.sqrt(2 / math.pi)
    assert found["changed"] == pytest.approx(exact, abs=4 * math.sqrt(exact))
    assert found["near_half"] == pytest.approx(exact * (1 + 0.025 / 0.2), rel=0.1)
    assert found["product"] > 4 * exact


def test_sign_changes_count_one_by_one_and_not_at_all_where_nothing_moved():
    z, other = drawn(5, 7), drawn(5, 7, seed=1)
    pairs = zip(z.flatten().tolist(), other.flatten().tolist(), strict=True)
    assert counted(sign_changes(z, other))["changed"] == sum((a > 0) != (b > 0) for a, b in pairs)
    for same in (z, torch.zeros(5, 7)):
        found = counted(sign_changes(same, same))
        assert found.pop("number") == 35
        assert set(found.values()) == {0.0}


def naive_winner(x, n, c, i, j):
    """The place of the first greatest value of a window, by the definition."""
    rows, columns = (
        range(max(0, 2 * k - 1), min(size, 2 * k + 2)) for k, size in zip((i, j), x.shape[2:], strict=True)
    )
    best = None
    for place in product(rows, columns):
        value = float(x[n, c, *place])
        if best is None or value > best[0]:
            best = (value, place)
    return best[1]


def test_winner_changes_and_ties_are_those_of_the_definition():
    x, other = F.relu(drawn(2, 3, 7, 6)), F.relu(drawn(2, 3, 7, 6, seed=1))
    seen = torch.randint(0, 3, (2, 1, 7, 6), generator=torch.Generator().manual_seed(2)).double()
    places = list(product(range(2), range(3), range(4), range(3)))
    winners = [(n, naive_winner(x, n, c, i, j), naive_winner(other, n, c, i, j)) for n, c, i, j in places]
    changed = [(n, a, b) for n, a, b in winners if a != b]
    found = counted(winner_changes(x, other, seen, POOL))
    assert found["number"] == len(places)
    assert found["changed"] == len(changed)
    assert found["ties"] == sum(float(seen[n, 0, *a]) == float(seen[n, 0, *b]) for n, a, b in changed)


def everywhere_else(*shape):
    """Keys of places that all see something else."""
    return torch.arange(math.prod(shape), dtype=torch.float64).view(1, 1, *shape)


@pytest.mark.parametrize("shift", [None, 0.0, -1.2], ids=["smooth", "relu", "mostly dead"])
def test_winners_change_as_often_as_the_gaps_predict(shift):
    """Independent values, so that the mean over all windows is that of the near ones."""
    z = drawn(40, 8, 32, 32)
    moved = z + 0.01 * drawn(40, 8, 32, 32, seed=1)
    x, other = (z, moved) if shift is None else (F.relu(z + shift), F.relu(moved + shift))
    found = counted(winner_changes(x, other, everywhere_else(32, 32).expand(40, -1, -1, -1), POOL))
    assert found["changed"] > 500
    # overlapping windows share their best two values, so counts scatter more than Poisson's by up to sqrt(4)
    for law in ("near", "near_half", "product_half"):
        assert found[law] == pytest.approx(found["changed"], rel=0.07, abs=6 * math.sqrt(found["changed"]))


def test_a_dead_window_has_its_winner_where_it_begins():
    """One place in four is ever alive, the same in each window: only away from the first a winner moves."""
    found = {}
    pool = nn.MaxPool2d(kernel_size=2, stride=2, padding=0)
    for name, (i, j) in {"first": (0, 0), "last": (1, 1)}.items():
        z = torch.full((40, 8, 32, 32), -1.0, dtype=torch.float64)
        z[:, :, i::2, j::2] = 0.2 * drawn(40, 8, 16, 16)
        moved = z.clone()
        moved[:, :, i::2, j::2] += 0.002 * drawn(40, 8, 16, 16, seed=1)
        keys = everywhere_else(32, 32).expand(40, -1, -1, -1)
        found[name] = counted(winner_changes(F.relu(z), F.relu(moved), keys, pool))
    exact = 40 * 8 * 256 * math.atan(0.01) / math.pi
    assert found["first"]["changed"] == found["first"]["near"] == found["first"]["product"] == 0
    assert found["last"]["changed"] == pytest.approx(exact, abs=4 * math.sqrt(exact))
    for law in ("near", "product"):
        assert found["last"][law] == pytest.approx(exact, rel=0.1)


def test_the_second_best_is_of_places_that_see_something_else():
    """Every value stands twice side by side: the gap is the one to the next pair."""
    z = drawn(40, 8, 32, 16)
    moved = z + 0.01 * drawn(40, 8, 32, 16, seed=1)
    keys = everywhere_else(32, 16).expand(40, -1, -1, -1)
    found = counted(winner_changes(*(t.repeat_interleave(2, 3) for t in (z, moved, keys)), POOL))
    assert found["changed"] > 300
    assert found["ties"] == 0
    assert found["near"] == pytest.approx(found["changed"], rel=0.07, abs=6 * math.sqrt(found["changed"]))


def test_places_that_see_the_same_pixels_tie_and_their_swap_changes_no_gradient():
    images = torch.zeros(
        1, 3, 8, 8, dtype=torch.float64
    )  # flat: away from the border all places see the same
    seen = patch_keys(images, 3, 1)
    value = torch.ones(1, 2, 8, 8, dtype=torch.float64)
    up, down = value.clone(), value.clone()
    up[0, 0, 3, 3] += 1e-16 * 4
    down[0, 0, 3, 4] += 1e-16 * 4
    found = counted(winner_changes(up, down, seen, POOL))
    assert found["changed"] == found["ties"] > 0
    assert found["near"] == found["product"] == 0  # nothing else moved
    weight = torch.ones(2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    gradients = []
    for place in ((3, 3), (3, 4)):
        (gradient,) = torch.autograd.grad(F.conv2d(images + 0.7, weight, padding=1)[0, 0, *place], weight)
        gradients.append(gradient)
    assert torch.equal(*gradients)


def test_patches_have_the_same_key_where_they_are_the_same_and_only_there():
    images = torch.randint(0, 2, (2, 1, 9, 9), generator=torch.Generator().manual_seed(0)).double()
    keys = patch_keys(images, 3, 1)
    patches = F.unfold(images, 3, padding=1).transpose(1, 2).flatten(0, 1)
    same_patch = (patches[:, None] == patches[None]).all(2)
    flat = keys.flatten()
    assert torch.equal(flat[:, None] == flat[None], same_patch)
    assert 1 < len(set(flat.tolist())) < len(flat)


# --- what one seed gives


@pytest.fixture(scope="module")
def measured():
    settings = configured("batch_size=16", "steps=4", "float64_steps=3", "optimizer.lr=0.5")
    return measure(settings, 0, load_images(settings, lambda line: None))


@pytest.fixture(scope="module")
def stored(measured):
    return json.loads(json.dumps(measured.values))["networks"]


def test_counts_are_those_of_the_lockstep(stored):
    flips = 0
    for name, network in stored.items():
        for dtype, last in (("float32", 4), ("float64", 3)):
            kinds = [k for k in ("signs", "winners") if f"{k}/{dtype}" in network["crossings"]]
            assert ("winners" in kinds) == ("max" in name)
            kinked = [k for k in kinds if k == "winners" or "ReLU" in name]
            mine = [
                sum(network["crossings"][f"{k}/{dtype}"]["changed"][s] for k in kinked)
                for s in range(last + 1)
            ]
            assert mine == network["curves"][f"sign_flips/control.{dtype}"][: last + 1]
            flips += sum(mine)
    assert network["steps"] == [0, 1, 2, 3, 4]
    assert flips > 0


def test_a_dtype_that_ends_sooner_leaves_no_value(stored):
    for network in stored.values():
        assert network["curves"]["weight_distance/control.float64"][4] is None
        assert network["crossings"]["signs/float64"]["near"][4] is None
        assert network["crossings"]["signs/float32"]["near"][4] > 0


def test_a_network_that_blows_up_is_measured_up_to_there():
    networks = "networks=[{activation: relu, pool: max},{activation: silu, pool: average}]"
    settings = configured("batch_size=4", "steps=5", "float64_steps=5", "optimizer.lr=1.0e+30", networks)
    found = measure(settings, 0, load_images(settings, lambda line: None))
    values = json.loads(json.dumps(found.values, allow_nan=False))
    for network in values["networks"].values():
        assert network["blown_up_at"]["reference.float32"] in range(1, 5)
        assert network["curves"]["weight_distance/control.float32"][0] > 0
        assert network["curves"]["weight_distance/control.float32"][5] is None
    assert answer(None, {0: values}).sentence
    assert judged([found.record]).verdict is Verdict.INCONCLUSIVE


def test_the_nudge_is_one_ulp_in_either_dtype(stored):
    for network in stored.values():
        narrow, wide = (network["curves"][f"weight_distance/control.{d}"][0] for d in ("float32", "float64"))
        assert wide / narrow == pytest.approx(2.0**-29, rel=1e-6)


def test_float64_perturbations_predict_next_to_no_flips(stored):
    for network in stored.values():
        narrow, wide = (network["crossings"][f"signs/{d}"]["near"][3] for d in ("float32", "float64"))
        assert 0 <= wide < 2.0**-20 * narrow


def test_the_record_holds_the_evidence_of_the_seed(measured):
    assert [p["probe"] for p in measured.record.run["probes"]] == ["float64_ratio", "leap", "flip_law"]
    assert judged([measured.record]).verdict in (Verdict.ROUND_OFF, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtypes=[float32]", "dtypes=.float32,float64."),
        ("networks=[{activation: relu}]", "networks.pool is not set"),
        ("networks=[{activation: relu, pool: min}]", "pool=min is unknown: choose from max, average"),
        ("networks=[{activation: tanh, pool: max}]", "activation=tanh is unknown"),
        ("networks=[]", "networks"),
    ],
)
def test_refuses(override, message):
    with pytest.raises(ConfigurationError, match=message):
        about(set_anew("kinks", override))


def test_the_config_is_short_and_says_what_it_expects():
    lines = CONF.read_text().splitlines()
    assert len(lines) <= 25
    assert "Expected: round_off" in " ".join(line for line in lines if line.startswith("#"))
    named = "ReLU, max-pool; ReLU, average-pool; SiLU, max-pool; SiLU, average-pool"
    assert about(configured()).startswith(named)


# --- drift around the first flip, in made-up networks


def network(activation, pool, *, first=None, jump=1.0, ratio=-29.0, steps=30, law=1.0, number=1e6):
    """Drift that grows by 1.5 a step, and ``jump`` times faster for five steps from the first flip on."""
    wide = [1e-17 * 2.0**-3, *(1e-16 * 1.5**s for s in range(steps))]
    narrow = [
        w * 2.0**-ratio * (1 if first is None else jump ** min(max(s - first, 0), 5))
        for s, w in enumerate(wide)
    ]
    flips = [0.0 if first is None or s < first else 20.0 * 2 ** min(s - first, 9) for s in range(steps + 1)]
    predicted = [max(f / law, 0.05) for f in flips]
    zeros = [0.0] * (steps + 1)

    def counts(seen, near):
        columns = ([number] * (steps + 1), seen, zeros, near, near, near, near)
        return {c: list(v) for c, v in zip(COUNTS, columns, strict=True)}

    smooth = activation == "silu"
    crossings = {
        "signs/float32": counts(zeros if smooth else flips, [0.05] * (steps + 1) if smooth else predicted),
        "signs/float64": counts(zeros, zeros),
    }
    if pool == "max":
        crossings |= {
            "winners/float32": counts(flips if smooth else zeros, predicted if smooth else zeros),
            "winners/float64": counts(zeros, zeros),
        }
    return {
        "network": {"activation": activation, "pool": pool},
        "steps": list(range(steps + 1)),
        "curves": {"weight_distance/control.float32": narrow, "weight_distance/control.float64": wide},
        "crossings": crossings,
        "blown_up_at": {},
    }


def made(**relu):
    """Networks of one seed in which ReLU leaps by ``jump`` and max-pool behind SiLU does not."""
    return {
        "networks": {
            "ReLU, max-pool": network("relu", "max", **{"first": 8, "jump": 6.0} | relu),
            "SiLU, max-pool": network("silu", "max", first=10),
            "SiLU, average-pool": network("silu", "average"),
        }
    }


def test_growth_and_leap_are_those_that_were_put_in():
    leaping = network("relu", "max", first=8, jump=6.0)
    assert first_flip(leaping) == 8
    assert first_flip(leaping, "float64") is None
    assert growth(leaping, "float32", 3, 8) == pytest.approx(1.5)
    assert growth(leaping, "float32", 8, 13) == pytest.approx(9.0)
    assert leap(leaping, (8, 13)) == pytest.approx(6.0)
    assert quiet_ratio(leaping) == pytest.approx(-29.0)
    assert growth(leaping, "float32", 8, 99) is None
    assert growth(leaping, "float32", 8, 8) is None


def test_a_nudge_that_is_lost_in_rounding_says_nothing():
    asleep = network("relu", "max", first=8)
    wide = asleep["curves"]["weight_distance/control.float64"]
    wide[1:5] = [wide[0]] * 4
    assert growth(asleep, "float64", 3, 8) is None
    assert quiet_ratio(asleep) == pytest.approx(-29.0)
    wide[:] = [wide[0]] * len(wide)
    assert quiet_ratio(asleep) is None


def test_a_tie_is_no_flip():
    tied = network("silu", "max", first=10)
    tied["crossings"]["winners/float32"]["ties"] = list(tied["crossings"]["winners/float32"]["changed"])
    assert first_flip(tied) is None


def test_flips_up_to_the_first_are_held_against_the_prediction_up_to_there():
    values = {0: {"networks": {"a": network("relu", "average", first=8)}}}
    predicted, counted_ = crossed(values, "near", "float32", up_to_first_flip=True)
    assert counted_ == 20
    assert predicted == pytest.approx(8 * 0.05 + 20)


def test_poisson_interval_against_its_definition():
    from scipy.stats import poisson

    text = ratio_of_sums([(2.0, 3.0), (3.0, 4.0)])
    ratio, low, high = (float(t.strip("()")) for t in text.replace("to", "").split())
    assert ratio == 1.4
    assert poisson.sf(6, low * 5) == pytest.approx(0.025, abs=2e-3)
    assert poisson.cdf(7, high * 5) == pytest.approx(0.025, abs=2e-3)
    assert ratio_of_sums([(0.5, 0.0)]).startswith("0.00 (0.00 to 7.")
    assert ratio_of_sums([]) is None


# --- the verdict


def verdict_of(*seeds):
    records = [
        SeedRecord(i, [], [], {"arms": {}, "probes": [p.as_dict() for p in probes(s["networks"])]})
        for i, s in enumerate(seeds)
    ]
    return judged(records)


def test_rounding_leaps_and_predicted_flips_are_round_off():
    found = verdict_of(made(), made())
    assert found.verdict is Verdict.ROUND_OFF
    assert [e.measured for e in found.evidence] == pytest.approx([-29.0, 6.0, 1.0])
    assert "(2 seeds)" in found.headline


@pytest.mark.parametrize(
    ("changes", "probe"),
    [({"jump": 1.0}, "leap"), ({"law": 3.0}, "flip_law"), ({"first": None}, "leap"), ({"first": 28}, "leap")],
)
def test_what_is_not_shown_leaves_it_open(changes, probe):
    found = verdict_of(made(**changes))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert next(e for e in found.evidence if e.probe == probe).supports is None


def test_a_difference_that_float64_does_not_shrink_is_no_rounding():
    wrong = {name: network(*key, ratio=-1.0) for name, key in {"a": ("silu", "average")}.items()}
    found = verdict_of({"networks": wrong})
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.headline.startswith("before any flip float64 drift is 2^-1.0")


# --- the answer


def test_the_answer_says_that_relu_leaps_and_max_pool_alone_does_not():
    said = answer(None, {0: made(), 1: made()}).sentence
    assert said.startswith(
        "ReLU, max-pool: float32 drift jumps at the first flip. It grows 1.5 times a step before"
    )
    assert "9 times a step after it; float64 drift, of the same network at the same steps, 1.5 times" in said
    assert "No jump: SiLU, max-pool (1.5 times)." in said
    assert "So does" not in said
    assert "Without kinks (SiLU, average-pool): 1.5 times a step over the same steps" in said
    assert "2^-29.0 of float32 drift" in said
    assert "flips can be predicted: number x density at 0 x perturbation is 1.00 times the count" in said


def test_the_answer_says_so_where_it_is_otherwise():
    assert "does not jump at the first flip" in answer(None, {0: made(jump=1.0)}).sentence
    uneven = made(jump=1.5)  # a network without kinks drifts as unevenly
    uneven["networks"]["SiLU, average-pool"] = network("silu", "average")
    wide = uneven["networks"]["SiLU, average-pool"]["curves"]["weight_distance/control.float64"]
    wide[13:] = [v / 2.0**5 for v in wide[13:]]
    assert "does not jump at the first flip" in answer(None, {0: uneven}).sentence
    assert "nothing flipped in 1 runs" in answer(None, {0: made(first=None)}).sentence
    assert "too late or too early" in answer(None, {0: made(first=28)}).sentence
    assert "flips cannot be predicted" in answer(None, {0: made(law=3.0)}).sentence
    only = {"SiLU, average-pool": made()["networks"]["SiLU, average-pool"]}
    alone = answer(None, {0: {"networks": only}}).sentence
    assert alone.startswith("Without kinks (SiLU, average-pool): float64 drift is 2^-29.0")
    assert alone.endswith(
        "Too few changes were predicted in any step to hold the prediction against the count."
    )
    kinked = {"ReLU, max-pool": made()["networks"]["ReLU, max-pool"]}
    assert "Without kinks" not in answer(None, {0: {"networks": kinked}}).sentence
    both = made()
    both["networks"]["ReLU, average-pool"] = network("relu", "average", first=9, jump=4.0)
    assert "So does: ReLU, average-pool (6 times)." in answer(None, {0: both}).sentence


def test_tables_hold_what_was_put_in():
    two = made()
    two["networks"]["ReLU, max-pool"] = network("relu", "max", first=6, jump=6.0)
    drift, flips = (shown(t) for t in answer(None, {0: made(), 1: two}).tables)
    row = dict(zip(drift.headings, drift.rows[0], strict=True))
    assert row["first flip (step)"] == "7 (6 to 8)"
    assert row["seeds with a flip"] == "2 of 2"
    assert row["in the 5 steps after it"] == "9"
    assert row["float64 / float32 drift before the flip"] == "2^-29.0"
    assert [r[1] for r in drift.rows] == ["7 (6 to 8)", "10", "none"]
    relu = dict(zip(flips.headings, flips.rows[0], strict=True))
    assert relu["what changes"] == "signs, ReLU"
    assert relu["counted / predicted, median (middle 90 %)"] == "1.00 (1.00 to 1.00)"
    assert relu["number"] == "1,000,000"
    assert (relu["steps with under 10 predicted"], relu["steps with 10 or more"]) == ("14", "48")
    assert relu["counted / predicted (95 % interval)"].startswith("0.00 (0.00 to 5.27)")
    assert relu["steps after saturation"] == "0"
    assert [r[0] for r in flips.rows][1:] == [
        "signs, SiLU (no kinks)",
        "max-pool winners, ReLU",
        "max-pool winners, SiLU",
    ]


def test_a_nudge_that_float32_rounds_away_is_counted():
    assert "rounded the nudge away" not in answer(None, {0: made()}).tables[0].conclusion
    healed = made(first=None)
    healed["networks"]["ReLU, max-pool"]["curves"]["weight_distance/control.float32"][3:] = [0.0] * 28
    table = answer(None, {0: healed}).tables[0]
    assert "In 1 of 3 runs float32 rounded the nudge away" in table.conclusion
    assert shown(table).rows[0][-1] == "0"


def test_saturated_steps_are_kept_apart():
    few = made(number=1e5)  # 10,240 of them flip in the end, at 0.1 / sqrt(2 pi) of which a step is saturated
    relu = shown(answer(None, {0: few}).tables[1])
    row = dict(zip(relu.headings, relu.rows[0], strict=True))
    late = sum(20.0 * 2 ** min(s, 9) > 1e5 * 0.1 / math.sqrt(2 * math.pi) for s in range(23))
    assert row["steps after saturation"] == str(late)
    assert row["steps with 10 or more"] == str(23 - late)
    assert row["counted / predicted there"] == "1.00 (1.00 to 1.00)"


def test_ties_are_named_where_there_are_any():
    assert "left out" not in answer(None, {0: made()}).tables[1].conclusion
    tied = made()
    wide = tied["networks"]["SiLU, max-pool"]["crossings"]["winners/float64"]
    wide["changed"][3] = wide["ties"][3] = 1500.0
    conclusion = answer(None, {0: tied}).tables[1].conclusion
    assert "Up to each network's first flip: 40 counted, 40.9 predicted" in conclusion
    assert "In float64, over all steps: 0 counted, 0 predicted; left out are 1,500 winners" in conclusion


def test_figures_draw_whatever_was_measured(stored):
    broken = copy.deepcopy(made())
    for found in broken["networks"].values():
        for column in found["curves"].values():
            column[4:] = [None] * len(column[4:])
        for counts in found["crossings"].values():
            for listed in counts.values():
                listed[4:] = [None] * len(listed[4:])
    cases = {0: {"networks": stored}}, {0: made(), 1: made(first=None)}, {0: broken}
    for values in cases:
        (figure,) = answer(None, values).figures
        assert as_files(figure)["png"].startswith(b"\x89PNG")
    page = str(in_page(answer(None, cases[1]).figures[0]))
    for words in ("first flip", "ReLU, max-pool, float32", "SiLU, average-pool, float64", "signs, ReLU"):
        assert words in page
