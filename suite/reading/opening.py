"""What a published page opens with: what was asked, what was found, how sure it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# The sentences under "Found"; what else was found follows "How sure".
MOST_FOUND = 4
# A paragraph of more sentences is easier to read as a list.
MOST_IN_A_PARAGRAPH = 3
# Behind a full stop, before a capital letter or one of our own names, outside of brackets.
_END = re.compile(r"(?<=[.?!]) (?=[A-Z]|float\d|driftlab\.)(?![^(]*\))")


def opening(settings: Mapping, seeds: int, controlled: bool, verdict: str, sentence: str) -> Iterable[str]:
    """The paragraphs under the title.

    Args:
        settings: of the run; ``question`` or ``hypothesis``, ``source`` and ``caveat`` are shown.
        controlled: whether a control was trained beside the pair.
        verdict: with its headline.
        sentence: the answer, of any number of sentences.
    """
    asked = settings.get("question") or f"Does this hold: {settings['hypothesis']}?"
    found = sentences(sentence)
    sure = f"n = {seeds} seed{'s' * (seeds != 1)}"
    if controlled:
        sure += ", beside a control: the reference with one weight moved by one unit in the last place (ulp)"
    yield f"**Asked.** {_joined(asked, settings.get('source'))}\n"
    yield f"**Found.** {verdict}\n"
    yield as_list(found[:MOST_FOUND])
    yield f"**How sure.** {_joined(f'{sure}.', settings.get('caveat'))}\n"
    if found[MOST_FOUND:]:
        yield "**Found as well.**\n"
        yield as_list(found[MOST_FOUND:])


def _joined(*texts: str | None) -> str:
    return " ".join(text for text in texts if text)


def sentences(text: str) -> list[str]:
    return [line for line in _END.split(text) if line]


def as_list(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def paragraph(text: str) -> str:
    """A few sentences as they are, more of them as a list."""
    lines = sentences(text)
    return as_list(lines) if len(lines) > MOST_IN_A_PARAGRAPH else f"{text}\n"
