"""The page of how cost grows is made of what was measured, which lies beside it."""

import pytest

from scripts import growth, growth_page


def test_the_published_page_is_that_of_what_was_measured(tmp_path):
    growth_page.publish(tmp_path, growth_page.read(growth.MEASURED))
    for file in (*tmp_path.rglob("*.csv"), tmp_path / "README.md"):
        assert file.read_text() == (growth.PAGE / file.relative_to(tmp_path)).read_text()


def test_what_is_written_is_read_back(tmp_path):
    row = {"axis": "width", "point": 8.0, "repeat": 0.0, "seconds": 1.5, "memory": 10.0, "disk": 0.1}
    rows = [
        row | {"steps": 0.5, "probes": 0.25, "machine": "a, b"},
        row | {"steps": None, "probes": None, "machine": "c"},
    ]
    growth_page.write(tmp_path / "measured.csv", rows)
    assert growth_page.read(tmp_path / "measured.csv") == rows
    assert growth_page.read(tmp_path / "nothing.csv") == []


def costs(power, points=(1, 10, 100), repeats=3):
    """Rows whose time grows with a power; each repetition on a machine of another speed."""
    return [
        {"axis": "a", "point": point, "repeat": repeat, "seconds": (1 + repeat) * point**power}
        for repeat in range(repeats)
        for point in points
    ]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_ratios_are_taken_within_a_repetition(power):
    rows = costs(power)
    assert growth_page.ratios(rows, "seconds", 100, 1) == pytest.approx([100**power] * 3)
    assert growth_page.exponent(rows, "seconds", 100) == pytest.approx(power)
    assert growth_page.exponent(rows, "seconds", 1) is None


def test_a_repetition_that_was_broken_off_counts_where_it_has_both_points():
    rows = [row for row in costs(1.0) if (row["repeat"], row["point"]) != (2, 100)]
    assert growth_page.ratios(rows, "seconds", 100, 1) == pytest.approx([100, 100])
    assert len(growth_page.ratios(rows, "seconds", 10, 1)) == 3
