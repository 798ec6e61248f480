"""What the suite says, and what the same answer for every batch size costs."""

from __future__ import annotations

from statistics import median

from driftlab.report.sections import Table
from experiments.questions.batch.plan import Plan
from experiments.questions.batch.seeds import Values, counted, seeds_in_words

ROUNDING = {"round_off", "bit_identical"}


def suite_tables(plan: Plan, values: Values) -> list[Table]:
    return [_verdicts(plan, values), _costs(plan, values), _places(values)]


def _verdicts(plan: Plan, values: Values) -> Table:
    rows, verdicts = [], []
    for same in zip(*(v["verdicts"] for v in values.values()), strict=True):
        words = [s["verdict"] for s in same]
        verdicts.append(set(words))
        rows.append(
            {
                "compared": same[0]["compared"],
                "verdict": ", ".join(f"{w} ({words.count(w)})" for w in dict.fromkeys(words)),
                "probe": same[0]["probe"],
                "reading": same[0]["reading"],
                "neighbours": max(s["neighbours"] for s in same),
            }
        )
    columns = {
        "compared": "compared",
        "verdict": "driftlab's verdict (seeds)",
        "probe": "by the probe",
        "reading": "its reading (first seed)",
        "neighbours": f"first row's largest change, {plan.at - 1} other rows replaced (absolute)",
    }
    conclusion = _on_verdicts(rows, verdicts)
    return Table("verdicts", "Rounding or a leak between rows?", columns, rows, conclusion)


def _on_verdicts(rows: list[dict], verdicts: list[set[str]]) -> str:
    """Of the pair in question, which is the first, and of the controls."""
    own, *others = rows
    moved = own["neighbours"]
    said = [
        f"{own['compared']}: {own['verdict']}; when the other rows hold something else, "
        + (f"the answer changes by {moved:.2g}." if moved else "no bit of the answer changes.")
    ]
    if others:
        changes = " and ".join(f"{r['neighbours']:.2g}" for r in others)
        told = verdicts[0] <= ROUNDING and all(words == {"bug"} for words in verdicts[1:])
        said.append(
            f"The controls, where rows do interact: {' and '.join(r['verdict'] for r in others)}, changes of "
            f"up to {changes}. So driftlab {'tells' if told else 'does not tell'} rounding from a leak."
        )
    return " ".join(said)


def _costs(plan: Plan, values: Values) -> Table:
    found = {
        (batch, chunk): median(
            c["milliseconds"]
            for v in values.values()
            for c in v["costs"]
            if (c["batch"], c["chunk"]) == (batch, chunk)
        )
        for batch in plan.cost_batches
        for chunk in (None, *plan.cost_chunks)
    }
    rows = []
    for batch in plan.cost_batches:
        row: dict[str, object] = {"batch": batch, "plain": found[batch, None]}
        row |= {f"chunk {c}": found[batch, c] / found[batch, None] for c in plan.cost_chunks}
        rows.append(row)
    columns = {"batch": "batch size", "plain": "plain (milliseconds)"}
    columns |= {f"chunk {c}": f"chunks of {c} (times plain)" for c in plan.cost_chunks}
    title = "What the same answer for every batch size costs"
    return Table("costs", title, columns, rows, _on_costs(plan, values))


def same_bits(values: Values, chunk: int | None) -> bool:
    """Whether the first row has the same bits in all batches that were timed; None is the plain network."""
    return all(c["same"] for v in values.values() for c in v["costs"] if c["chunk"] == chunk)


def cost_ratio(values: Values, batch: int, chunk: int) -> float:
    """Time in chunks over time of the plain network, the median over the seeds."""
    ratios = []
    for value in values.values():
        times = {(c["batch"], c["chunk"]): c["milliseconds"] for c in value["costs"]}
        ratios.append(times[batch, chunk] / times[batch, None])
    return median(ratios)


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
        f"{c} for {counted(b, 'row')} ({cost_ratio(values, b, c):.2g} times plain)" for b, c in best.items()
    )
    return (
        f"{said} Cheapest chunk: {cheapest}. Medians of {counted(plan.repeats, 'run')} each, "
        f"{seeds_in_words(values)}, float32."
    )


def _places(values: Values) -> Table:
    rows = []
    for same in zip(*(v["places"] for v in values.values()), strict=True):
        rows.append(
            {
                "chunk": same[0]["chunk"],
                "arithmetic": same[0]["arithmetic"],
                "answers": max(s["answers"] for s in same),
                "difference": max(s["difference"] for s in same),
            }
        )
    moved = [r for r in rows if r["answers"] > 1]
    conclusion = (
        f"The same row has the same bits in every place of a chunk, in {seeds_in_words(values)}: here the "
        "answer depends on neither batch size nor place."
        if not moved
        else "A row's answer depends on its place in the chunk ("
        + "; ".join(f"{r['arithmetic']}, {r['chunk']} rows: up to {r['difference']:.2g}" for r in moved)
        + ", absolute): with chunks it is the same for every batch size, but not for every place. "
        "Chunks of 1 have but one place."
    )
    columns = {
        "chunk": "rows of a chunk",
        "arithmetic": "arithmetic",
        "answers": "different answers over its places, bit for bit",
        "difference": "largest difference from the first place (absolute)",
    }
    return Table("places", "Does a row's place in its chunk matter?", columns, rows, conclusion)
