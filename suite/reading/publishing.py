"""From a finished run to the page that is committed: the answer, its tables and figures, how it was made."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from driftlab.glossary import PUBLISHED_NOTE
from driftlab.record.differing import differences
from driftlab.record.seed_record import write_whole
from driftlab.words import counted
from suite.command.errors import ConfigurationError
from suite.reading.archive import read_judged
from suite.reading.judging import Judged, check_no_links, repeat_command, write_shown
from suite.reading.publishing_curves import published_curves
from suite.reading.stored import SETTINGS
from suite.showing import wording

# The sentences under "Found"; what else was found follows "How sure".
MOST_FOUND = 4
# A paragraph of more sentences is easier to read as a list.
MOST_IN_A_PARAGRAPH = 3
# Behind a full stop, before a capital letter or one of our own names, outside of brackets.
_END = re.compile(r"(?<=[.?!]) (?=[A-Z]|float\d|driftlab\.)(?![^(]*\))")
# Beyond so many rows a table stands in its CSV file alone.
MOST_ROWS = 40


def publish(run: Path, to: Path, say: Callable[[str], None] = print) -> Path:
    """Write ``to/<experiment>/README.md`` with the tables and figures of ``run`` beside it; returns the page.

    The run is judged again: of what lies in its folder only the seeds and the settings are read, with care,
    and nothing is copied.

    Raises:
        ConfigurationError: the run has no finished seed, cannot be read, or has a name that is no folder's.
    """
    judged = read_judged(run, say)
    if judged is None:
        raise ConfigurationError(f"{run} holds no finished seed: run its command first")
    page = to / _folder_name(judged.settings.name, run)
    shown = page / "tables", page / "figures"
    check_no_links(page, *shown)
    for folder in shown:
        shutil.rmtree(folder, ignore_errors=True)
    if judged.answer is None:
        answer = published_curves(page, judged.records)
    else:
        answer = write_shown(page, judged.answer)
    write_whole(page / "README.md", "\n".join([*_page(judged, answer, page), *made(judged)]))
    return page / "README.md"


def _folder_name(name: str, run: Path) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", name, re.ASCII):
        raise ConfigurationError(
            f"{run / SETTINGS}: name={name!r} is no folder's name: write letters, digits, _, -, + and ."
        )
    return name


def _page(judged: Judged, answer: Mapping, page: Path) -> Iterable[str]:
    settings, judgement = judged.settings, judged.judgement
    yield f"# {settings.name}\n"
    yield f"{PUBLISHED_NOTE}\n"
    verdict = f"`{judgement.verdict}`: {judgement.headline}."
    controlled = any(arm.startswith("control.") for record in judged.records for arm in record.arms)
    yield from opening(settings, len(judged.records), controlled, verdict, answer["sentence"])
    yield from sections(answer, page)


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
    sure = f"n = {counted(seeds, 'seed')}"
    if controlled:
        sure += ", beside a control: the reference with one weight moved by one unit in the last place (ulp)"
    yield f"**Asked.** {wording.sentences(asked, settings.get('source'))}\n"
    yield f"**Found.** {verdict}\n"
    yield as_list(found[:MOST_FOUND])
    yield f"**How sure.** {wording.sentences(f'{sure}.', settings.get('caveat'))}\n"
    if found[MOST_FOUND:]:
        yield "**Found as well.**\n"
        yield as_list(found[MOST_FOUND:])


def sentences(text: str) -> list[str]:
    return [line for line in _END.split(text) if line]


def as_list(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def paragraph(text: str) -> str:
    """A few sentences as they are, more of them as a list."""
    lines = sentences(text)
    return as_list(lines) if len(lines) > MOST_IN_A_PARAGRAPH else f"{text}\n"


def sections(answer: Mapping, page: Path) -> Iterable[str]:
    """The figures and tables of ``answer``, as ``write_shown`` left them in ``page``."""
    for figure in answer["figures"]:
        yield f"## {figure['title']}\n"
        yield f"![{figure['title']}](figures/{figure['name']}.png)\n"
        yield f"{figure['caption']}\n"
    for table in answer["tables"]:
        yield f"## {table['title']}\n"
        yield paragraph(table["conclusion"])
        yield from _table(table, page / "tables" / f"{table['name']}.numbers.csv")


def _data_and_size(run: Mapping, settings: Mapping) -> Iterable[str]:
    """Of a kind that trains on a data set: which one, and whether this is the size that a GPU is for."""
    data, size = run["dataset"], settings["scale"]["name"]
    if not data["sha256"]:
        return
    stand_in = ", a STAND-IN of drawn shapes" if data["stand_in"] else ""
    counts = f"{data['train_images']:,} training and {data['test_images']:,} test images"
    yield f"Data: {data['name']}{stand_in}, {counts}, SHA-256 `{data['sha256']}`.\n"
    if size != "full":
        yield (
            f"Size: `{size}`, which is for a CPU. The full size is for a GPU and was not run here: on a "
            "machine that has one the same command takes it (`scale=auto`).\n"
        )


def _table(table: Mapping, numbers: Path) -> Iterable[str]:
    file = f"[tables/{table['name']}.csv](tables/{table['name']}.csv)"
    if numbers.exists():
        file += f"; each number in a column of its own: [tables/{numbers.name}](tables/{numbers.name})"
    if len(table["rows"]) > MOST_ROWS:
        yield f"{len(table['rows'])} rows: {file}\n"
        return
    yield wording.markdown_row(table["headings"])
    yield wording.markdown_row(["---:" if numeric else "---" for numeric in table["numeric"]])
    yield from map(wording.markdown_row, table["rows"])
    yield f"\nAs a file: {file}\n"


def made(judged: Judged) -> Iterable[str]:
    """By which command, in which environment, on which data, at which size."""
    records = judged.records
    environment = records[0].run["environment"]
    seconds = [r.run["times"]["seconds"] for r in records]
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v)
    yield "## How it was made\n"
    yield "By this command, as the run's records name it:\n"
    yield f"```\n{repeat_command(records)}\n```\n"
    yield (
        f"n = {counted(len(records), 'seed')}, {sum(seconds):.0f} s in all; "
        f"{environment['device']}, {counted(environment['threads'], 'thread')}, "
        f"Python {environment['python']}, {versions}. "
        f"TF32: {'on' if any(environment['tf32'].values()) else 'off'}. "
        f"Digest of the settings: `{records[0].run['digest']}`.\n"
    )
    if differences({r.seed: r.run["environment"] for r in records}):
        yield "Not all seeds ran in that environment; the others' stands in the run's `verdict.json`.\n"
    yield from _data_and_size(records[0].run, judged.settings)
