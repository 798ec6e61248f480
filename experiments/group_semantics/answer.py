"""The answer to the person who asked what becomes of the other half of the channels."""

from __future__ import annotations

from collections import Counter

from omegaconf import DictConfig

from driftlab.report.sections import Answer, Table
from experiments.group_semantics.cost import cost_table, network_table
from experiments.group_semantics.equality_tables import errors_table, literal_table, sweep_table
from experiments.group_semantics.figures import figures
from experiments.group_semantics.reach import GROUPED, PLAIN
from experiments.group_semantics.reach_tables import layers_table, through_table, used_table
from experiments.group_semantics.verdicts import KEPT_ZEROS, SAME_NUMBERS
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values, each, first_of, percent


def answer(settings: DictConfig, values: Values) -> Answer:
    """The sentence, tables and figures, from the values of at least one seed."""
    equal = [literal_table(values), errors_table(values), sweep_table(values)]
    reach = [layers_table(values), through_table(values), used_table(values)]
    cost = [network_table(values), cost_table(values)]
    tables = [*equal, *reach, *cost, verdict_table(values)]
    return Answer(_sentence(values, settings.device), tables, figures(values))


def _sentence(values: Values, device: str) -> str:
    layers = [kinds[GROUPED] for layers in each(values, "layers") for kinds in layers.values()]
    used = min(min(f["used"] / f["inputs"], f["entries"]) for f in layers)
    shares = {f["groups"]: percent(f["reached"] / (f["inputs"] * f["outputs"])) for f in layers}
    seen = " and ".join(f"{share} of the input channels with groups={n}" for n, share in shares.items())
    dropped = "Nothing is dropped" if used == 1 else f"Not everything is used ({percent(used)} of the inputs)"
    return (
        f"{dropped} on one device: each output channel sees {seen}, those of its own group, and the groups "
        f"together use {percent(used)} of the inputs. {_capacity(values)} One device or two is irrelevant: "
        f"this was computed on one ({device}), which computes every group and concatenates what they give."
    )


def _capacity(values: Values) -> str:
    cost = first_of(values)["cost"]
    layer = "conv.conv2_s1"
    groups = cost[GROUPED][layer]["groups"]
    kept = percent(cost[GROUPED][layer]["macs"] / cost[PLAIN][layer]["macs"])
    return (
        f"With groups={groups} a layer has {kept} of the weights and multiply-adds of groups=1: less "
        "capacity, not less input."
    )


def verdict_table(values: Values) -> Table:
    """Rewrite by rewrite: verdict, place and the evidence that decides."""
    columns = (
        say.first("subject", "of"),
        say.first("rewrite", "grouped convs rewritten as"),
        Column("verdict", "verdict (seeds)", _verdicts),
        Column(
            "start", "same before training (seeds)", lambda f: say.share_of(x["same_at_start"] for x in f)
        ),
        say.greatest("apart", "outputs apart before training (relative 2-norm, float64)"),
        say.first("place", "place"),
        say.first("probe", "first evidence for it"),
        say.first("measured", "it measures (function: multiples of float64 rounding)"),
        say.first("threshold", "threshold (same unit)"),
        Column("verdicts", None, lambda found: {row["verdict"] for row in found}),
        Column("same", None, lambda found: all(row["same_at_start"] for row in found)),
    )
    found = say.grouped(say.all_rows(values, "verdicts"), "subject", "rewrite").values()
    zeros = say.each(values, "zeros")
    title = "What the suite says: groups against what is taken for the same"
    return say.table("verdicts", title, found, columns, lambda rows: _conclusion(rows, zeros))


def _verdicts(found: Rows) -> str:
    counts = Counter(row["verdict"] for row in found)
    return ", ".join(f"{v} ({count} of {len(found)})" for v, count in counts.most_common())


def _conclusion(rows: Rows, zeros: Rows) -> str:
    said: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        said.setdefault(row["subject"], {}).setdefault(row["verdict"], []).append(row["rewrite"])
    if len(said) > 1 and len({str(verdicts) for verdicts in said.values()}) == 1:
        said = {f"{' and of '.join(said)} alike": next(iter(said.values()))}
    texts = [
        f"Of {subject}: "
        + " ".join(f"{verdict} for {'; '.join(names)}." for verdict, names in verdicts.items())
        for subject, verdicts in said.items()
    ]
    places = "Places and evidence are those of the first seed, distances the largest of all seeds."
    return " ".join([*texts, *_about_zeros(rows, zeros), places])


def _about_zeros(rows: Rows, zeros: Rows) -> list[str]:
    loose, kept = (say.chosen(rows, rewrite=name) for name in (SAME_NUMBERS, KEPT_ZEROS))
    if not all(row["same"] and row["verdicts"] == {"bug"} for row in loose):
        return []
    pulled, count = (sum(z[key] for z in zeros) for key in ("pulled", "zeros"))
    ratios = say.numbers(zeros, "ratio")
    texts = [
        "The same numbers with zeros elsewhere are the same function before training and not after: "
        f"{pulled:,} of {count:,} zeros ({say.seeds(zeros)}) get a gradient at the first batch, "
        f"{say.between(min(ratios), max(ratios))} times as large (root mean square) as the weights in the "
        "blocks get, so the first update moves them, and what is trained is groups=1."
    ]
    if not any("bug" in row["verdicts"] for row in kept):
        texts.append("Kept at zero they train as groups do, with the multiply-adds of groups=1.")
    return texts
