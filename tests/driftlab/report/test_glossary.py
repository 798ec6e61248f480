"""The glossary: one list of words, shown in the page and in the docs, and links that lead to it."""

import re
from pathlib import Path

import pytest

from driftlab.glossary import GLOSSARY, anchor, as_markdown
from tests.driftlab.report.test_report import page

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("results/published/*/README.md"), ROOT / "README.md"])


def test_the_glossary_of_the_docs_is_the_list():
    assert (ROOT / "docs" / "glossary.md").read_text() == as_markdown(), "python -m driftlab.glossary"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_page_links_to_the_glossary_and_to_words_that_it_has(path):
    if path.name == "glossary.md":
        return
    links = re.findall(r"\]\([^)]*glossary\.md(?:#([\w-]+))?\)", path.read_text())
    assert links
    assert {link for link in links if link} <= {anchor(term) for term in GLOSSARY}


def test_words_in_the_report_lead_to_its_glossary(tmp_path, make_seed):
    text = page(tmp_path, [make_seed(tmp_path, 0)])
    linked = set(re.findall(r'href="#(word-[\w-]+)"', text))
    assert {"word-control", "word-arm", "word-disagreement"} <= linked
    assert linked <= set(re.findall(r'<div id="(word-[\w-]+)"', text))
    assert all(meaning.replace("`", "").split(";")[0] in text for meaning in [GLOSSARY["kink"]])
