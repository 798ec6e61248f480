"""The note: its numbers are the tables', none is typed, and the PDF is made of the sources beside it."""

import re
import sys

import pytest

from docs.note import build
from docs.note.values import published

SOURCE = (build.NOTE / "note.typ").read_text(encoding="utf-8")
PDF = (build.NOTE / "note.pdf").read_bytes()

# What may stand in the text with a digit in it: names, formulas, and the levels of intervals.
NAMES = (
    r"\b(b?[Ff]loat|TF)(16|32|64)\b|_float(32|64)\b",
    r"\bResNet18\b|\bCIFAR-10\b|\bgroups=2\b",
    r"\b16[- ]bits?\b",
    r"\b(90|95)~%",
    r"\$2 gamma_K |\(1 - K u\)",
    r"@[a-z]+(19|20)\d\d\b",
)
COUNTING = (
    r"seven|eight|nine|ten|eleven|twelve|\w+teen|(twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand"
)


def test_the_numbers_are_those_that_the_tables_give():
    assert (build.NOTE / "numbers.json").read_text(encoding="utf-8") == build.as_json()


def test_no_number_is_typed():
    text = re.sub(r"^ *//.*$", "", SOURCE, flags=re.M)
    for name in NAMES:
        text = re.sub(name, "", text)
    assert re.findall(r".*\d.*", text) == []
    assert re.findall(rf"(?i)\b({COUNTING})\b", text) == []


def test_no_semicolon_is_swallowed_by_the_number_before_it():
    assert re.findall(r"#[\w.]+(?:\([^()]*\))?(?:\[[^]]*\])?;", SOURCE) == []


@pytest.mark.parametrize(
    ("key", "folder"), [("planted", "calibration"), ("ported", "ported"), ("later", "held_back")]
)
def test_first_sights_are_counted_as_on_the_published_pages(key, folder):
    page = (published.PUBLISHED / folder / "README.md").read_text(encoding="utf-8")
    first_sight = page.split("## At first sight")[1].split("## Confusion")[0]
    rates = build.numbers()["calibration"][key]
    for rate in (rates[column] for column in ("right", "place", "alarms", "missed")):
        assert "{count} of {n} ({percent} %; {low} to {high})".format(**rate) in first_sight


def test_habits_and_pairs_in_16_bits_are_counted_as_on_the_published_pages():
    numbers = build.numbers()
    page = (published.PUBLISHED / "real_bugs" / "README.md").read_text(encoding="utf-8")
    for habit in ("outputs", "gradients", "two_updates", "loss_curves", "float64"):
        score = numbers["habits"]["real"][habit]
        cells = [score["not_cleared"], score["not_caught"]]
        assert " | ".join("{count} of {n}".format(**cell) for cell in cells) in page
    tolerance = numbers["calibration"]["half"]["tolerance"]["right"]
    assert "right on {count} of the {n} ".format(**tolerance) in (
        build.ROOT / "docs" / "verdict.md"
    ).read_text(encoding="utf-8")


def test_what_is_said_in_words_is_what_the_tables_say():
    numbers = build.numbers()
    first, habits, findings = numbers["calibration"], numbers["habits"], numbers["findings"]
    assert first["everything"]["passed"]["count"] == first["later"]["passed"]["count"] == "3"  # "all"
    none_of = [habits["real"]["driftlab"]["not_caught"]]
    none_of += [score["not_cleared"] for name, score in habits["real"].items() if name != "driftlab"]
    none_of += [numbers["threads"]["split"]["forward_differs"]]
    assert {share["count"] for share in none_of} == {"0"}
    all_of = [
        first["published"]["place"],
        habits["training"]["float64"]["right"],
        habits["training"]["driftlab"]["right"],
    ]
    assert all(share["count"] == share["n"] for share in all_of)
    told = {name: float(score["p"]) < 0.05 for name, score in habits["real"].items() if name != "driftlab"}
    assert sorted(name for name in told if not told[name]) == [
        "float64",
        "two_updates",
    ]  # "the two best habits"
    most = sorted(told, key=lambda name: float(habits["real"][name]["right"]["percent"]))
    assert sorted(most[-2:]) == ["float64", "two_updates"]
    assert findings["one_bit"]["nothing"] == "0.0"
    assert 2 * int(findings["edge"]["reference"]) == int(findings["edge"]["seeds"])
    split, control = (findings["lockstep"][f"{arm}_float64"] for arm in ("candidate", "control"))
    assert split["flip"] == control["flip"] != ""
    assert split["flipped"] == control["flipped"]


def test_the_thresholds_lie_halfway():
    found = {
        k: float(v) for k, v in build.numbers()["thresholds"].items() if re.fullmatch(r"-?[\d.]+", str(v))
    }
    assert found["wider"] == found["unit_float32"] - found["unit_float64"] == -found["units"]
    assert 2 * found["halfway"] == found["wider"]
    assert 2 * found["halfway_bits"] == found["bits_float32"] - found["bits_half"] == found["lost_bits"]
    assert 2 * found["beside_half_exponent"] == -found["unit_bfloat"]


def test_the_pdf_is_made_of_these_sources_and_has_four_to_six_pages():
    assert f"sources:{build.digest()}".encode() in PDF, "uv run --group note docs/note/build.py"
    (pages,) = re.findall(rb"NPages>(\d+)<", PDF)
    assert 4 <= int(pages) <= 6


def test_the_sources_compile_to_the_pdf_byte_for_byte(tmp_path):
    pytest.importorskip("typst", reason="uv sync --group note")
    build.compile_to(tmp_path / "note.pdf")
    assert (tmp_path / "note.pdf").read_bytes() == PDF


def test_every_work_in_the_bibliography_is_cited():
    works = re.findall(r"^@\w+\{(\w+),", (build.NOTE / "references.bib").read_text(encoding="utf-8"), re.M)
    assert works
    assert [work for work in works if f"@{work}" not in SOURCE] == []


def test_without_typst_the_build_says_what_to_write(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typst", None)
    monkeypatch.setattr(sys, "argv", ["build.py"])
    assert build.main() == 2
    assert capsys.readouterr().err == "the note is set by Typst: uv run --group note docs/note/build.py\n"


def test_a_table_without_the_row_or_the_column_is_named():
    table = "kinks/tables/drift.csv"
    with pytest.raises(ValueError, match=r"kinks/tables/drift\.csv: 0 rows with .*no such network"):
        published.row(table, network="no such network")
    with pytest.raises(ValueError, match="has the column 'no such column'"):
        published.rows(table)[0]["no such column"]
