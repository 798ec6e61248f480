"""What the suite says, and what the same answer for every batch size costs."""

from __future__ import annotations

from statistics import median

from driftlab.report.sections import Table
from experiments.batch_size.plan import Plan
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values

ROUNDING = {"round_off", "bit_identical"}


def suite_tables(plan: Plan, values: Values) -> list[Table]:
    return [_verdicts(plan, values), _costs(plan, values), _places(values)]


def _verdicts(plan: Plan, values: Values) -> Table:
    replaced = f"first row's largest change, {plan.at - 1} other rows replaced (absolute)"
    columns = (
        say.first("compared", "compared"),
        Column("verdict", "driftlab's verdict (seeds)", _counted_verdicts),
        say.first("probe", "by the probe"),
        say.first("reading", "its reading (first seed)"),
        say.greatest("neighbours", replaced),
    )
    found = say.side_by_side(values, "verdicts")
    said = [{seed["verdict"] for seed in same} for same in found]
    title = "Rounding or a leak between rows?"
    return say.table("verdicts", title, found, columns, lambda rows: _on_verdicts(rows, said))


def _counted_verdicts(same: Rows) -> str:
    return ", ".join(f"{verdict} ({len(rows)})" for verdict, rows in say.grouped(same, "verdict").items())


def _on_verdicts(rows: Rows, verdicts: list[set[str]]) -> str:
    """Of the pair in question, which is the first, and of the controls."""
    own, *others = rows
    moved = own["neighbours"]
    changes = f"the answer changes by {moved:.2g}." if moved else "no bit of the answer changes."
    said = f"{own['compared']}: {own['verdict']}; when the other rows hold something else, {changes}"
    if not others:
        return said
    told = verdicts[0] <= ROUNDING and all(words == {"bug"} for words in verdicts[1:])
    named = " and ".join(row["verdict"] for row in others)
    changes = " and ".join(f"{row['neighbours']:.2g}" for row in others)
    return (
        f"{said} The controls, where rows do interact: {named}, changes of up to {changes}. So driftlab "
        f"{'tells' if told else 'does not tell'} rounding from a leak."
    )


def _costs(plan: Plan, values: Values) -> Table:
    def took(batch: int) -> float:
        return say.middle("milliseconds")(say.all_rows(values, "costs", batch=batch, chunk=None))

    columns = [Column("batch", "batch size", int), Column("plain", "plain (milliseconds)", took)]
    for c in plan.cost_chunks:
        times = f"chunks of {c} (times plain)"
        columns.append(Column(f"chunk {c}", times, lambda batch, c=c: cost_ratio(values, batch, c)))
    title = "What the same answer for every batch size costs"
    return say.table("costs", title, plan.cost_batches, columns, _on_costs(plan, values))


def same_bits(values: Values, chunk: int | None) -> bool:
    """Whether the first row has the same bits in all batches that were timed; None is the plain network."""
    return all(c["same"] for c in say.all_rows(values, "costs", chunk=chunk))


def cost_ratio(values: Values, batch: int, chunk: int) -> float:
    """Time in chunks over time of the plain network, the median over the seeds."""
    of_seeds = [
        {(c["batch"], c["chunk"]): c["milliseconds"] for c in costs} for costs in say.each(values, "costs")
    ]
    return median(times[batch, chunk] / times[batch, None] for times in of_seeds)


def _on_costs(plan: Plan, values: Values) -> str:
    chunks = {c: same_bits(values, c) for c in plan.cost_chunks}
    plain = "keeps" if same_bits(values, None) else "does not keep"
    other = ", ".join(str(c) for c, same in chunks.items() if not same)
    said = (
        f"In chunks of {other} rows the first row's answer changes with the batch size, which should not be."
        if other
        else "driftlab.batch_invariant(network, chunk) gives the first row the same bits in a batch of 1 and "
        f"in each of these; the plain network {plain} them."
    )
    best = {b: min(plan.cost_chunks, key=lambda c, b=b: cost_ratio(values, b, c)) for b in plan.cost_batches}
    cheapest = "; ".join(
        f"{c} for {say.counted(b, 'row')} ({cost_ratio(values, b, c):.3g} times plain)"
        for b, c in best.items()
    )
    return (
        f"{said} Cheapest chunk: {cheapest}. Medians of {say.counted(plan.repeats, 'run')} each, "
        f"{say.seeds(values)}, float32."
    )


def _places(values: Values) -> Table:
    columns = (
        say.first("chunk", "rows of a chunk"),
        say.first("arithmetic", "arithmetic"),
        say.greatest("answers", "different answers over its places, bit for bit"),
        say.greatest("difference", "largest difference from the first place (absolute)"),
    )
    lines = say.side_by_side(values, "places")
    title = "Does a row's place in its chunk matter?"
    return say.table("places", title, lines, columns, lambda rows: _on_places(values, rows))


def _on_places(values: Values, rows: Rows) -> str:
    moved = [r for r in rows if r["answers"] > 1]
    if not moved:
        return (
            f"The same row has the same bits in every place of a chunk, in {say.seeds(values)}: here the "
            "answer depends on neither batch size nor place."
        )
    where = "; ".join(f"{r['arithmetic']}, {r['chunk']} rows: up to {r['difference']:.2g}" for r in moved)
    return (
        f"A row's answer depends on its place in the chunk ({where}, absolute): with chunks it is the same "
        "for every batch size, but not for every place. Chunks of 1 have but one place."
    )
