"""The report page: complete, self-contained, and fit for whatever a run leaves behind."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from driftlab.report import write_report
from driftlab.verdict.rules import judge
from driftlab.words import Evidence, Judgement, Place, Verdict

ORDER = ["verdict", "where", "stand-in", "comparison", "figures", "weight-distance", "sign-flips", "loss"]
ORDER += ["outcomes", "evidence", "layers", "by-layer", "environment", "settings", "meanings", "repeat"]

META = {
    "experiment": "split_conv",
    "digest": "0a1b2c3d",
    "hypothesis": "a conv split in two is the same function",
    "expected": "round_off",
    "command": "python train.py +experiment=split_conv seed=0..9",
    "settings": "name: split_conv\noptimizer:\n  lr: 0.1\n",
    "dataset": {"name": "shapes", "sha256": "ab" * 32, "source": "drawn here", "stand_in": True},
}
BUG = Judgement(
    Verdict.BUG,
    "not the same function",
    [Evidence("float64_pair", "Does it stay?", 1e9, 2.0**14.5, Verdict.BUG, "1e9 times the control")],
    Place("layer1.0.conv2", "weight gradient", 0),
)
EVERY_ARM = [f"{r}.{d}" for r in ("reference", "candidate", "control") for d in ("float32", "float64")]


def with_layers(record, module="conv1", **changes):
    """As if the probes had compared a pair of modules."""
    values = {"float32": 1e-7, "exact": 2e-16, "float32_explained": 1e-5, "exact_explained": 1e-11}
    passes = {"forward": values, "input gradient": values | changes}
    entries = [
        {"module": module, "rewritten": True, "passes": passes},
        {"module": "norm", "rewritten": False, "passes": {}},
    ]
    return replace(record, run=record.run | {"layers": entries})


def page(folder, records, judgement=None, **changes):
    return write_report(folder, records, judgement or judge(records), META | changes).read_text()


class Tags(HTMLParser):
    """Names and ids in their order, what something would be loaded from, and the tags left open."""

    void = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, text):
        super().__init__()
        self.names, self.ids, self.loads, self.open = set(), [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)
        self.ids += [v for k, v in attrs if k == "id"]
        self.loads += [v for k, v in attrs if k in ("src", "srcset", "href", "xlink:href", "data", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def ten(tmp_path_factory, make_seed):
    folder = tmp_path_factory.mktemp("ten")
    return [make_seed(folder, s, blown={"candidate.float32": 57} if s == 3 else None) for s in range(10)]


@pytest.fixture(scope="module")
def ten_drawn(tmp_path_factory, ten):
    """Their page."""
    return page(tmp_path_factory.mktemp("drawn"), ten)


def test_needs_nothing_from_elsewhere(ten_drawn):
    tags = Tags(ten_drawn)
    assert all(address.startswith("#") for address in tags.loads)
    assert not tags.names & {"link", "img", "iframe", "object", "embed", "base"}
    namespaces = {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert set(re.findall(r"\w+://[^\"'\s<]+", ten_drawn)) <= namespaces
    assert "@import" not in ten_drawn
    assert not re.search(r"url\((?!#)", ten_drawn)


def test_is_well_formed_with_unique_ids_that_every_reference_finds(ten_drawn):
    tags = Tags(ten_drawn)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    drawn = re.sub(r"<script>.*?</script>", "", ten_drawn, flags=re.DOTALL)
    assert set(re.findall(r"url\(#([^)]+)\)", drawn)) | {a[1:] for a in tags.loads} <= set(tags.ids)


def test_sections_stand_in_order(tmp_path, ten):
    tags = Tags(page(tmp_path, [with_layers(r) for r in ten], BUG))
    assert [i for i in tags.ids if i in ORDER] == ORDER


def test_says_the_verdict_where_and_how_to_repeat_it(tmp_path, ten):
    text = page(tmp_path, ten, BUG)
    for part in ("layer1.0.conv2", "weight gradient", "not what was found", META["command"], "lr: 0.1"):
        assert part in text
    assert 'class="word">bug</a>' in text


def test_stand_in_is_said_only_of_a_stand_in(tmp_path, ten):
    assert 'id="stand-in"' in page(tmp_path, ten)
    assert 'id="stand-in"' not in page(tmp_path, ten, dataset={"name": "cifar10", "stand_in": False})


@pytest.mark.parametrize("key", ["experiment", "digest", "hypothesis", "expected", "command", "settings"])
def test_markup_in_a_name_is_text(tmp_path, ten, key):
    text = page(tmp_path, ten[:1], **{key: "<script>alert(1)</script>"})
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_markup_in_the_judgement_and_the_data_set_is_text(tmp_path, ten):
    evil = "<img src=x>"
    evidence = [Evidence(evil, evil, None, None, None, evil)]
    judgement = Judgement(Verdict.BUG, evil, evidence, Place(evil, evil, 0), {"p": {evil: evil}})
    text = page(tmp_path, ten[:1], judgement, dataset={evil: evil, "stand_in": True})
    assert "img" not in Tags(text).names


def test_figures_take_their_colours_from_the_page(tmp_path, ten):
    drawings = "".join(re.findall(r"<svg.*?</svg>", page(tmp_path, ten), re.DOTALL))
    assert "currentColor" in drawings
    assert not re.search(r"#[0-9a-f]{6}\b", drawings)


def test_ten_seeds_are_drawn_one_by_one(ten_drawn):
    assert "each of 10 seeds" in ten_drawn
    assert {f'data-part="seed={seed}"' for seed in range(10)} <= set(
        re.findall(r'data-part="[^"]*"', ten_drawn)
    )
    assert len(ten_drawn) < 1_500_000


def test_a_hundred_long_seeds_take_little_more_room_than_ten(tmp_path, make_seed):
    steps = sorted({int(10 ** (n / 50)) for n in range(195)} | {0})
    horizons = {"float64": steps[-1], "float32": steps[-1]}
    text = page(tmp_path, [make_seed(tmp_path, s, horizons=horizons, steps=steps) for s in range(100)])
    assert "each of 100 seeds" in text
    assert "100 of 100 finished" in text
    assert len(text) < 4_000_000


def test_blow_ups_are_shown_and_counted(ten_drawn):
    for part in ("blew up at step 57", "9 of 10 finished", "candidate.float32 in 1 of 10 seeds"):
        assert part in ten_drawn


@pytest.mark.parametrize("step", [0, 1, 20])
def test_every_arm_may_blow_up(tmp_path, make_seed, step):
    text = page(tmp_path, [make_seed(tmp_path, s, blown=dict.fromkeys(EVERY_ARM, step)) for s in range(2)])
    assert f"blew up at step {step}" in text
    assert "0 of 2 finished" in text


def test_a_run_without_a_finite_number_has_no_figures(tmp_path, make_seed):
    records = [make_seed(tmp_path, s, blown=dict.fromkeys(EVERY_ARM, 0)) for s in range(2)]
    for row in (row for record in records for row in record.curves):
        row |= dict.fromkeys((c for c in row if "/" in c), math.nan)
    text = page(tmp_path, records)
    assert "No value over the steps was finite" in text
    assert "<figure" not in text


def drawn(text, name):
    """What a figure hands to its script."""
    figure = re.search(rf'<figure id="{name}".*?</figure>', text, re.DOTALL)[0]
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', figure, re.DOTALL)[1])


def test_what_the_pointer_reads_are_the_values_of_the_curves(ten, ten_drawn):
    data = drawn(ten_drawn, "weight-distance")
    assert data["at"] == list(range(121))
    arm = data["arms"]["control.float32"]
    values = [r.series("weight_distance", "control.float32")[40] for r in ten]
    read = [arm["seeds"][str(r.seed)][40] for r in ten]
    assert read == pytest.approx(values, rel=1e-2)
    assert (arm["low"][40], arm["high"][40]) == pytest.approx((min(values), max(values)), rel=1e-2)
    # seed 3 blew up: no number stands for it afterwards
    assert data["arms"]["candidate.float32"]["seeds"]["3"][60:] == ["inf"] * 61


def test_the_page_is_whole_without_its_script(ten_drawn):
    """What the script alone can serve is hidden until it runs."""
    tools = re.findall(r'<(?:p|div) class="tools[^>]*>', ten_drawn)
    assert len(tools) == 4
    assert all("data-script hidden" in tag for tag in tools)


def test_zero_distances_are_drawn_and_said(tmp_path, make_seed):
    record = make_seed(tmp_path, 0, horizons={"float32": 12})
    for row in record.curves:
        row |= dict.fromkeys((c for c in row if "distance" in c or "flips" in c), 0.0)
    text = page(tmp_path, [record])
    assert "exactly 0 stands on the bottom line" in text


SHAPES = {
    "float32 alone": {"horizons": {"float32": 30}},
    "float64 alone": {"horizons": {"float64": 30}},
    "no candidate": {"roles": ("reference", "control")},
    "no control": {"roles": ("reference", "candidate")},
    "reference alone": {"roles": ("reference",)},
    "no kinks": {"kinks": False},
    "row 0 alone": {"steps": [0]},
    "two rows far apart": {"steps": [0, 10**7], "horizons": {"float32": 10**7}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_partial_runs(tmp_path, make_seed, shape):
    text = page(tmp_path, [make_seed(tmp_path, s, **shape) for s in range(3)])
    assert Tags(text).open == []
    assert ('id="sign-flips"' in text) == shape.get("kinks", True)


def test_seeds_need_not_have_the_same_arms_nor_steps(tmp_path, make_seed):
    other = make_seed(tmp_path, 1, horizons={"float32": 7}, roles=("reference", "control"))
    assert "1 of 2 seeds" in page(tmp_path, [make_seed(tmp_path, 0), other])


def test_no_record_still_leaves_a_page(tmp_path):
    text = page(tmp_path, [], dataset={})
    assert "no seed has finished" in text
    assert Tags(text).open == []


def test_same_records_same_bytes(tmp_path, ten):
    assert page(tmp_path / "a", ten) == page(tmp_path / "b", ten)


def test_reporting_needs_neither_torch_nor_lightning(tmp_path):
    code = (
        "import sys; from pathlib import Path; from driftlab.report import write_report; "
        "from driftlab.verdict.rules import judge; write_report(Path(sys.argv[1]), [], judge([]), {}); "
        "import driftlab.report.figures; "
        "assert not {'torch', 'lightning', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
