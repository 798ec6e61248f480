"""The page of a training: what its sentence and its table say of any outcome."""

import csv
import math
from pathlib import Path

import pytest

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import as_csv
from suite.reading.publishing_curves import COLUMNS, over_seeds, published_curves, sentence, with_range

PUBLISHED = Path(__file__).resolve().parents[3] / "results/published"
PARTS = ("value", "low", "high", "n")
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


def test_the_spread_over_seeds_stands_in_columns_of_its_own(tmp_path):
    published_curves(tmp_path, [record(0), record(1), record(2, flips=(0, 0, 0))])
    rows = csv.DictReader((tmp_path / "tables" / "arms.numbers.csv").open())
    found = {row["arm"]: row for row in rows}
    drift = [found["candidate.float32"][f"{COLUMNS['weight_distance']}: {part}"] for part in PARTS]
    assert [float(text) for text in drift] == [2e-6, 1e-6, 3e-6, 3]
    flips = [found["candidate.float32"][f"{COLUMNS['first_flip']}: {part}"] for part in PARTS]
    assert [float(text) for text in flips] == [2, 2, 2, 2]  # of two seeds: the third has none
    missing = [found["candidate.float64"][f"{COLUMNS['test_accuracy']}: {part}"] for part in PARTS]
    assert missing == ["", "", "", "0"]


def of_trainings():
    """The pages with a row an arm and seed; that of ``growth`` is over the number of arms."""
    files = PUBLISHED.glob("*/tables/arms.csv")
    return sorted(p.parents[1].name for p in files if "arm," in p.read_text().splitlines()[0])


@pytest.mark.parametrize("name", of_trainings())
def test_what_is_published_over_seeds_is_made_of_the_published_seeds(name):
    folder = PUBLISHED / name / "tables"
    keys = {heading: key for key, heading in COLUMNS.items()}
    keys["disagreement (% of test images)"] = "disagreement"  # as published before data sets of text
    with (folder / "arms.csv").open() as file:
        rows = [{keys[h]: t for h, t in row.items() if h in keys} for row in csv.DictReader(file)]
    for row in rows:
        numbers = {k: float(t) if t else None for k, t in row.items() if k not in ("arm", "against")}
        row.update(numbers)
    made = list(csv.reader(as_csv(over_seeds(rows)).splitlines()))
    there = list(csv.reader((folder / "arms.numbers.csv").read_text().splitlines()))
    assert made[0] == there[0]
    for mine, theirs in zip(made[1:], there[1:], strict=True):
        assert mine[:2] == theirs[:2]
        assert [float(t or "nan") for t in mine[2:]] == pytest.approx(
            [float(t or "nan") for t in theirs[2:]], nan_ok=True
        )
