"""docs/verdict.md: each worked example of a rule gives the verdict and the rows that the page shows."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "verdict.md").read_text()
SECTION = PAGE.partition("## A worked example of each rule")[2].partition("\n## ")[0]
SETUP, *EXAMPLES = SECTION.split("\n### ")
ROW = re.compile(r"^ (\w+) +\S+ +\S+ +(?:(\w+) )?", re.MULTILINE)


def fenced(text, kind):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for found, content in blocks if found == kind]


def test_every_rule_has_an_example():
    rules = re.findall(r"^(\d)\. ", PAGE.partition("## The rules")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted({re.match(r"Rule (\d)", example)[1] for example in EXAMPLES}) == rules


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.partition("\n")[0])
@pytest.mark.filterwarnings("ignore:the rewrite changes settings")
def test_an_example_gives_what_the_page_shows(example):
    names = {}
    exec("\n".join(fenced(SETUP, "python")), names)
    *definitions, call = fenced(example, "python")[0].rpartition("diagnose(")[::2]
    exec("".join(definitions), names)
    diagnosis = eval(f"diagnose({call}", names)
    (printed,) = fenced(example, "")
    headline, _, rows = printed.partition("\n\n")
    verdict, _, rest = headline.partition(":")
    assert diagnosis.verdict == verdict
    assert diagnosis.headline[:20] == rest.strip()[:20]
    found = {e.probe: e.supports for e in diagnosis.evidence}
    shown = {probe: supports for probe, supports in ROW.findall(rows) if probe != "asked"}
    assert shown
    words = {str(v) for v in type(diagnosis.verdict)}
    assert {probe: (word if word in words else None) for probe, word in shown.items()} == {
        probe: found[probe] for probe in shown
    }
