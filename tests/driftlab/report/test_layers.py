"""The per-layer picture: what it says, what it draws, what it leaves out."""

import re

import pytest

from driftlab.record.seed_record import SeedRecord
from driftlab.report.layers import MOST_ROWS, layer_picture

ROUNDING = {"float32": 1e-7, "exact": 2e-16, "float32_explained": 1e-5, "exact_explained": 1e-11}
SAME = ROUNDING | {"float32": 0.0, "exact": 0.0}
WRONG = ROUNDING | {"float32": 0.3, "exact": 0.3}
NARROW = ROUNDING | {"float32": 1e-3}
UNKNOWN = {"float32": "inf", "exact": None, "float32_explained": None, "exact_explained": None}


def record(seed=0, **passes):
    """Layers by name: what was measured of each in both passes; None where it was not compared."""
    layers = [
        {
            "module": name,
            "rewritten": values is not None,
            "passes": {} if values is None else {"forward": SAME, "input gradient": values},
        }
        for name, values in passes.items()
    ]
    return SeedRecord(seed, [], [], {"arms": {}, "layers": layers})


def test_without_layers_there_is_no_picture():
    assert layer_picture([SeedRecord(0, [], [], {"arms": {}}), record()]) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (ROUNDING, "Rounding explains all that differs"),
        (
            WRONG,
            "In 1 the difference is more than rounding explains, first in the order of the "
            "forward pass in b ",
        ),
        (NARROW, "In 1 float32 is less exact than its rounding explains"),
        (UNKNOWN, "cannot tell whether it is rounding"),
    ],
    ids=["rounding", "wrong", "fewer bits", "float32 alone"],
)
def test_says_what_explains_the_difference(values, said):
    picture = layer_picture([record(a=SAME, b=values, c=None)])
    assert said in picture.sentence
    assert picture.sentence.startswith("2 of 3 pairs of modules were compared; the others are the same code")
    assert "1 agree in every bit" in picture.sentence
    assert [row["module"] for row in picture.rows] == ["b"]


def test_nothing_is_drawn_where_every_bit_agrees():
    picture = layer_picture([record(a=SAME)])
    assert picture.svg is None
    assert "Rounding" not in picture.sentence


def test_seeds_are_told_by_their_median():
    seeds = [record(s, a=v) for s, v in enumerate((ROUNDING, ROUNDING, WRONG))]
    assert "Rounding explains all" in layer_picture(seeds).sentence
    assert "Medians of 3 seeds" in " ".join(layer_picture(seeds).caption)


def test_layers_stand_in_the_order_of_the_forward_pass_with_a_mark_a_pass():
    picture = layer_picture([record(z=WRONG, a=ROUNDING, m=WRONG)])
    assert picture.readings["at"] == ["z", "a", "m"]
    assert picture.readings["place"] == sorted(picture.readings["place"])
    assert [c["bad"] for c in picture.rows[0]["cells"]] == [False, True, False]
    assert set(re.findall(r'data-arm="([^"]*)"', picture.svg)) == set(picture.switches)


def test_of_many_layers_those_that_rounding_explains_least_are_drawn():
    layers = {f"layer{i}": WRONG if i == 70 else ROUNDING for i in range(80)}
    picture = layer_picture([record(**layers)])
    assert len(picture.rows) == MOST_ROWS
    assert "layer70" in [row["module"] for row in picture.rows]
    assert "The 60 of 80 differing pairs" in " ".join(picture.caption)


def test_markup_in_a_module_is_text():
    picture = layer_picture([record(**{"<b>": WRONG})])
    assert "<b>" not in picture.svg
    assert "&lt;b&gt;" in picture.svg
