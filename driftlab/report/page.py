"""The page: tables and figures put into the template, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from driftlab.glossary import GLOSSARY, anchor
from driftlab.record import differing as environments
from driftlab.record.seed_record import SeedRecord, write_whole
from driftlab.report import tables
from driftlab.report.evidence_table import meanings, scaled
from driftlab.report.local_windows import local_table
from driftlab.report.sections import MISSING, Answer, in_page, number, percent, shown
from driftlab.report.series import MOST_LINES, all_arms
from driftlab.verdict.in_16_bits import precisions_in_16_bits
from driftlab.words import Judgement, counted

# Of a longer table the rest stands in its file alone: a page that grows with the seeds does not open at last.
MOST_TABLE_ROWS = 500
# Letters that fit in one line beside a verdict.
MOST_HEADLINE = 60
_TEST_NAMES = {"discordant": "seeds with another outcome", "mcnemar_p": "McNemar's exact test, p"}


def write_report(
    folder: Path,
    records: Sequence[SeedRecord],
    judgement: Judgement,
    meta: Mapping,
    answer: Answer | None = None,
) -> Path:
    """Write ``folder/report.html``: the verdict, what it rests on, and how to repeat it.

    Args:
        records: finished seeds of one experiment; there may be none.
        judgement: the verdict on them.
        meta: ``experiment``, ``digest``, ``hypothesis``, ``expected`` (a verdict or None), ``command`` and
            what to know before it is copied (``command_note``), ``settings`` (YAML text) and ``dataset`` (as
            in ``run.json``).
        answer: what the experiment has to show beside its verdict, where it has.
    """
    path = Path(folder) / "report.html"
    write_whole(path, as_page(records, judgement, meta, answer))
    return path


def as_page(
    records: Sequence[SeedRecord], judgement: Judgement, meta: Mapping, answer: Answer | None = None
) -> str:
    """The page itself; the arguments are those of ``write_report``, and what ``meta`` lacks is left out."""
    rows = tables.outcomes(records, judgement)
    most = tables.notable(rows)
    drawings, layers = _drawings(records)
    evidence, notice = scaled(judgement.evidence), environments.notice({r.seed: r.run for r in records})
    switches = [arm for d in drawings for arm in d.arms] + (layers.switches if layers else [])
    return template("page.html.j2").render(
        meta=_filled(meta),
        judgement=judgement,
        headline=_headline(judgement.headline),
        evidence=evidence,
        meanings=meanings(evidence),
        glossary=GLOSSARY,
        seeds=[r.seed for r in records],
        answer=_answered(answer) if answer else None,
        comparison=tables.comparison(records),
        drawings=drawings,
        local=local_table(records),
        roles={arm.partition(".")[0] for arm in all_arms(records)},
        in_16_bits=any(precisions_in_16_bits(record, "control") for record in records),
        layers=layers,
        switches=list(dict.fromkeys(switches)),
        most_lines=MOST_LINES,
        outcome_arms=tables.outcome_arms(records),
        outcomes=most.rows if most else rows,
        notable=most,
        notice=notice,
        outcome_summary=tables.outcome_summary(rows) if len(rows) > 1 else [],
        paired_tests=_paired_tests(judgement),
        environment=_environment(records, meta.get("dataset") or {}, notice),
    )


def template(name: str) -> Template:
    """The template of that name: what is put in is escaped, a name that is missing is an error."""
    environment = Environment(
        loader=PackageLoader("driftlab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "anchor": anchor, "counted": counted}
    return environment.get_template(name)


def _answered(answer: Answer) -> dict:
    figures = [
        {"name": f.name, "title": f.title, "svg": in_page(f), "caption": f.caption} for f in answer.figures
    ]
    tables = [shown(t, most=MOST_TABLE_ROWS) for t in answer.tables]
    return {"sentence": answer.sentence, "figures": figures, "tables": tables}


def _headline(text: str) -> dict[str, str]:
    """What stands beside the verdict in one line, and the rest of the sentence below it.

    A sentence is parted at its first colon; where that comes too late for one line, all of it stands below.
    """
    line, _, rest = text.partition(": ")
    if len(line) > MOST_HEADLINE:
        return {"line": "", "rest": text}
    return {"line": line, "rest": rest}


def _filled(meta: Mapping) -> dict:
    names = ("experiment", "digest", "hypothesis", "expected", "command", "command_note", "settings")
    return {name: meta.get(name) or "" for name in names} | {"dataset": meta.get("dataset") or {}}


def _drawings(records: Sequence[SeedRecord]) -> tuple[list, object]:
    """The figures over steps, and the per-layer picture where there is one."""
    # here, because matplotlib takes most of a second, and who imports driftlab.report may not write a page
    from driftlab.report import figures, layers

    return figures.drawings(records), layers.layer_picture(records)


def _paired_tests(judgement: Judgement) -> list[tuple[str, dict[str, str]]]:
    """A row an arm, a column each test in ``judgement.outcomes`` that has a number for that arm."""
    tests = {k: v for k, v in judgement.outcomes.items() if k != "fell_over" and isinstance(v, Mapping)}
    arms = list(dict.fromkeys(arm for values in tests.values() for arm in values))
    named = {_TEST_NAMES.get(key, key.replace("_", " ")): values for key, values in tests.items()}
    return [(arm, {name: _cell(values.get(arm)) for name, values in named.items()}) for arm in arms]


def _cell(value: object) -> str:
    return number(value) if value is None or isinstance(value, int | float) else str(value)


def _environment(
    records: Sequence[SeedRecord], dataset: Mapping, apart: environments.Notice | None
) -> list[tuple[str, str]]:
    """Where it was measured, as pairs of a name and a value: the first seed, and what differs in others."""
    pairs = [(f"data set: {name.replace('_', ' ')}", _plain(value)) for name, value in dataset.items()]
    if not records:
        return pairs
    first = records[0].run.get("environment", {})
    pairs += [(name.replace("_", " "), _plain(value)) for name, value in first.items()]
    if apart is not None:
        pairs += [("not in all seeds", line) for line in (*apart.loud, *apart.quiet)]
    seconds = [s for r in records if (s := r.run.get("times", {}).get("seconds")) is not None]
    if seconds:
        pairs.append(("time", f"{sum(seconds):,.0f} s for {counted(len(seconds), 'seed')}"))
    return pairs


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items() if v is not None) or MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return MISSING if value is None else str(value)
