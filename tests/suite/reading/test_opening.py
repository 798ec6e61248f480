"""What a published page opens with: asked, found, how sure, in the words of its settings."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from suite.reading.publishing import opening, paragraph, sentences

ROOT = Path(__file__).resolve().parents[3]
PAGES = {p.parent.name: p for p in sorted((ROOT / "results/published").glob("*/README.md"))}
EXPERIMENTS = {p.stem: OmegaConf.load(p) for p in (ROOT / "conf/experiment").glob("*.yaml")}
ASKED = {
    "question": "Is it so?",
    "source": "[Thread](https://x.y).",
    "caveat": "One machine.",
    "hypothesis": "h",
}


def opened(settings=ASKED, seeds=3, controlled=True, verdict="`bug`: where.", sentence="It is. So is that."):
    return "\n".join(opening(settings, seeds, controlled, verdict, sentence))


def test_what_was_asked_and_where_what_was_found_and_how_sure():
    asked, found, listed, sure = opened().strip().split("\n\n")
    assert asked == "**Asked.** Is it so? [Thread](https://x.y)."
    assert found == "**Found.** `bug`: where."
    assert listed == "- It is.\n- So is that."
    assert sure.startswith("**How sure.** n = 3 seeds, beside a control: ")
    assert sure.endswith("(ulp). One machine.")


def test_a_hypothesis_stands_in_for_a_question_and_no_control_is_claimed_that_was_not_trained():
    page = opened({"hypothesis": "all is well"}, seeds=1, controlled=False)
    assert "**Asked.** Does this hold: all is well?\n" in page
    assert "**How sure.** n = 1 seed.\n" in page


def test_beyond_four_sentences_the_rest_follows_what_makes_it_sure():
    page = opened(sentence="A. B. C. D. E. F.")
    first, rest = page.split("**How sure.**")
    assert first.endswith("- A.\n- B.\n- C.\n- D.\n\n")
    assert rest.endswith("**Found as well.**\n\n- E.\n- F.\n")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two? Three!", 3),
        ("It is 0.5 times 2.e-3. float32 is not. driftlab.check says so.", 3),
        ("As predicted (Higham, SIAM J. Sci. Comput. 41, 2019). Next.", 2),
        ("u: unit round-off", 1),
    ],
)
def test_where_a_sentence_ends(text, count):
    found = sentences(text)
    assert len(found) == count
    assert " ".join(found) == text


def test_a_paragraph_of_many_sentences_becomes_a_list():
    assert paragraph("A. B. C.") == "A. B. C.\n"
    assert paragraph("A. B. C. D.") == "- A.\n- B.\n- C.\n- D.\n"


@pytest.mark.parametrize("name", PAGES)
def test_every_published_page_opens_so(name):
    page = PAGES[name].read_text()
    head = page[: page.index("\n## ")]
    assert [head.count(label) for label in ("**Asked.**", "**Found.**", "**How sure.**")] == [1, 1, 1]
    assert head.index("**Asked.**") < head.index("**Found.**") < head.index("**How sure.**")


@pytest.mark.parametrize("name", sorted(PAGES.keys() & EXPERIMENTS.keys()))
def test_a_published_page_asks_what_its_settings_ask(name):
    settings, page = EXPERIMENTS[name], PAGES[name].read_text()
    asked = " ".join(settings[key] for key in ("question", "source") if key in settings)
    assert f"**Asked.** {asked}\n" in page
    assert f" {settings.caveat}\n" in page
