"""The page of a training: what its sentence and its table say of any outcome."""

import csv
import math

import pytest

from driftlab.record.seed_record import SeedRecord
from suite.reading.publishing_curves import published_curves, sentence, with_range

ROLES = ("reference", "candidate", "control")


def record(seed, *, dtypes=("float32", "float64"), flips=(0, 0, 3), blown=None, accuracy=0.5):
    """Three steps; the candidate drifts to ``(seed + 1) * 1e-6`` in float32, the control to half of that."""
    arms, rows = {}, [{"step": s, "epoch": 0} for s in range(3)]
    for dtype in dtypes:
        for role in ROLES:
            name = f"{role}.{dtype}"
            against = None if role == "reference" else f"reference.{dtype}"
            arms[name] = {"blown_up_at": 2 if name == blown else None, "against": against, "horizon": 2}
            for row in rows:
                row[f"loss/{name}"] = 2.0 - 0.1 * row["step"]
                if against:
                    size = (seed + 1) * (1e-6 if dtype == "float32" else 1e-15)
                    row[f"weight_distance/{name}"] = size * row["step"] / 2 / (1 + (role == "control"))
                    row[f"sign_flips/{name}"] = flips[row["step"]] if dtype == "float32" else 0
    last = {"step": 2, "epoch": 0}
    for role, extra in zip(ROLES, (0, 0.01 * seed, -0.01), strict=True):
        last[f"test_accuracy/{role}.float32"] = accuracy + extra
        if role != "reference":
            last[f"disagreement/{role}.float32"] = 0.1
    return SeedRecord(seed, rows, [last], {"arms": arms})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "—"),
        ([None], "—"),
        ([2.0], "2"),
        ([2.0, 2.0], "2"),
        ([1.0, 4.0, 2.0], "2 (1 to 4)"),
        ([1.0, None, 3.0], "2 (1 to 3, 2 of 3 seeds)"),
        ([None, 3.0], "3 (1 of 2 seeds)"),
        ([1.0, math.inf], "inf (1 to inf)"),
        ([123456.0], "123,456"),
    ],
)
def test_a_spread_in_words(values, text):
    assert with_range(values) == text


def test_the_sentence_gives_drift_flips_accuracy_and_disagreement():
    text = sentence([record(0), record(1), record(2)])
    assert text.startswith("No arm's loss diverges, in 3 seeds;")
    far = "candidate 2e-06 (1e-06 to 3e-06), control 1e-06 (5e-07 to 1.5e-06) (relative)"
    assert f"in float32, after 2 steps, {far}, first sign flip at step 2, at step 2;" in text
    assert "in float64, after 2 steps, candidate 2e-15 (1e-15 to 3e-15)" in text
    assert "(relative), without a sign flip." in text
    assert "reference 50 %" in text
    assert "candidate +1.00 +- 1.00 points, 10 % of the test set" in text
    assert "control -1.00 +- 0.00 points" in text


def test_who_falls_over_is_said_and_counted():
    text = sentence([record(0, blown="control.float32"), record(1)])
    assert text.startswith("The loss diverges for control.float32 in 1 of 2 seeds;")
    assert "control inf (1e-06 to inf)" in text  # its weights are nowhere near


def test_a_flip_in_some_seeds_is_said_so():
    text = sentence([record(0), record(1, flips=(0, 0, 0))])
    assert "first sign flip at step 2 in 1 of 2, at step 2 in 1 of 2" in text


def test_one_seed_without_float64_or_flips_is_answered_too():
    text = sentence([record(4, dtypes=("float32",), flips=(0, 0, 0))])
    assert "float64" not in text
    assert "(relative), without a sign flip. Test accuracy" in text
    assert "candidate +4.00 points" in text


def test_the_page_holds_a_line_an_arm_and_the_file_one_a_seed(tmp_path):
    answer = published_curves(tmp_path, [record(0), record(1)])
    (table,) = answer["tables"]
    assert [row[0] for row in table["rows"]] == [
        *("candidate.float32", "control.float32", "candidate.float64", "control.float64"),
        *("reference.float32", "reference.float64"),
    ]
    rows = list(csv.DictReader((tmp_path / "tables" / "arms.csv").read_text().splitlines()))
    assert len(rows) == 12
    ends = {
        r["seed"]: float(r["weight distance at the end (relative)"])
        for r in rows
        if r["arm"] == "candidate.float32"
    }
    assert ends == {"0": 1e-06, "1": 2e-06}
    (figure,) = answer["figures"]
    assert (tmp_path / "figures" / f"{figure['name']}.png").read_bytes().startswith(b"\x89PNG")
