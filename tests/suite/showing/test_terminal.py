"""What a person at a terminal sees: all of it, at any width, without colour where none is wanted."""

import io
import re

import pytest
from rich.console import Console

from driftlab.report.sections import Answer, Table
from driftlab.words import Evidence, Judgement, Place, Verdict
from suite.showing.terminal import Terminal

TABLE = Table(
    "sums",
    "Sums in two orders",
    {"order": "order of the sum", "apart": "largest difference (absolute)", "n": "sums (count)"},
    [
        {"order": "left to right", "apart": 2.4e-7, "n": 1200},
        {"order": "[bold] blocks", "apart": 0.0, "n": 7},
    ],
    "They differ by rounding.",
)
ANSWER = Answer("It is rounding.", [TABLE])
JUDGEMENT = Judgement(
    Verdict.BUG,
    "not the same function: the [red] gate",
    [
        Evidence(
            "function",
            "Is it the same?",
            5.4e8,
            23170.0,
            Verdict.BUG,
            "540 million times what rounding makes",
        )
    ],
    Place("gate", "forward", 0),
)


def shown(width, **options):
    file = io.StringIO()
    terminal = Terminal(Console(file=file, width=width, soft_wrap=False, highlight=False, **options))
    terminal.tables(ANSWER)
    terminal.verdict(JUDGEMENT, "round_off", (), {"report": "results/report.html"})
    return file.getvalue()


def words(text):
    return re.sub(r"[\s╭╮╰╯│─]+|\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", [30, 44, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_word_is_lost_at_any_width(width, terminal):
    text = words(shown(width, force_terminal=terminal))
    for part in (
        "leftto right",
        "[bold]blocks",
        "2.4e-07",
        "1,200",
        "Theydifferbyrounding.",
        "Itisrounding.",
    ):
        assert part.replace(" ", "") in text
    for part in ("the[red]gate", "5.4e+08", "540milliontimeswhatroundingmakes", "expectedround_off"):
        assert part in text
    assert "…" not in text


def test_colours_are_left_out_where_none_are_wanted(monkeypatch):
    assert re.search(r"\x1b\[[0-9;]*3\d", shown(80, force_terminal=True, color_system="standard"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[(\d+;)*3\d", shown(80, force_terminal=True))


def test_a_log_holds_no_control_characters():
    assert "\x1b" not in shown(80, force_terminal=False)


def test_the_bar_says_which_probe_is_asked_and_a_log_file_does_not():
    for is_terminal in (True, False):
        file = io.StringIO()
        terminal = Terminal(Console(file=file, width=120, force_terminal=is_terminal))
        with terminal.progress([0], 3):
            terminal.doing("seed 0  probe 2 of 9: [function]")
        assert ("probe 2 of 9: [function]" in file.getvalue()) == is_terminal
