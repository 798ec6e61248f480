"""What groups=2 connects and uses: the gradients of all seeds as tables with their conclusions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driftlab.report.sections import Table
from experiments.questions.group.words import GROUPED, INTERLEAVED, PLAIN, kind_label, percent, seeds_text

Values = Mapping[int, dict]


def layers_table(values: Values) -> Table:
    """Which input channels reach which output channels, layer by layer."""
    first = next(iter(values.values()))["layers"]
    rows = [
        _layer_row(layer, kind, [v["layers"][layer][kind] for v in values.values()])
        for layer in first
        for kind in first[layer]
    ]
    columns = {
        "layer": "layer",
        "channels": "channels",
        "sizes": "input -> output channels",
        "zeros": "pairs with gradient exactly 0 (count)",
        "share": "pairs that depend (share)",
        "unexpected": "pairs against the definition (count, all seeds)",
        "used": "input channels used (share)",
        "entries": "channels x pixels used (share)",
    }
    conclusion = _layers_conclusion(rows, len(values))
    return Table("layers", "Which input channels reach which output channels", columns, rows, conclusion)


def _layer_row(layer: str, kind: str, found: Sequence[dict]) -> dict:
    one = found[0]
    pairs, reached = one["inputs"] * one["outputs"], min(f["reached"] for f in found)
    return {
        "layer": layer,
        "kind": kind,
        "channels": kind_label(kind, one["groups"]),
        "sizes": f"{one['inputs']} -> {one['outputs']}",
        "reached": reached,
        "zeros": pairs - reached,
        "share": reached / pairs,
        "unexpected": sum(f["unexpected"] for f in found),
        "moved": None if kind == PLAIN else max(f["moved"] for f in found),
        "used": min(f["used"] for f in found) / one["inputs"],
        "entries": min(f["entries"] for f in found),
    }


def _layers_conclusion(rows: Sequence[dict], seeds: int) -> str:
    against = sum(row["unexpected"] for row in rows)
    used = min(min(row["used"], row["entries"]) for row in rows)
    grouped, plain = ({row["share"] for row in rows if row["kind"] == kind} for kind in (GROUPED, PLAIN))
    moved = [row["moved"] / (row["reached"] + row["zeros"]) for row in rows if row["kind"] == INTERLEAVED]
    return " ".join(
        [
            f"In {seeds_text(seeds)} the gradient is zero exactly where the definition of groups puts one."
            if against == 0
            else f"In {seeds_text(seeds)} {against} pairs are not as the definition of groups says.",
            f"An output depends on {_listed(grouped)} of the input channels, its own group's; with groups=1 "
            f"on {_listed(plain)}.",
            "Either way every input channel and every pixel of it is used: what one group does not read, "
            "another reads."
            if used == 1
            else f"At least {percent(used)} of the input entries are used.",
            f"Interleaved channels connect as many pairs, but {_listed({min(moved), max(moved)}, ' to ')} of "
            "all pairs otherwise: another function."
            if min(moved) > 0
            else "For some sizes interleaved channels are the contiguous ones.",
        ]
    )


def _listed(shares: set[float], separator: str = ", ") -> str:
    return separator.join(percent(share) for share in sorted(shares))


def through_table(values: Values) -> Table:
    """From conv1's channels to every later layer: where the halves meet."""
    everything = [v["through"] for v in values.values()]
    whole, apart = everything[0]
    rows = []
    for name, one in everything[0][whole].items():
        row = {"to": name, "inputs": one["inputs"], "outputs": one["outputs"]}
        rows.append(row | {net: _least_share([t[net][name] for t in everything]) for net in (whole, apart)})
    columns = {
        "to": "from the channels of conv1_s1 to",
        "inputs": "channels of conv1_s1",
        "outputs": "outputs there",
        whole: "pairs that depend (share): the network as it is, groups=1 in conv3",
        apart: "pairs that depend (share): conv3 grouped too",
    }
    conclusion = _through_conclusion({row["to"]: (row[whole], row[apart]) for row in rows}, len(values))
    return Table("through", "From the channels of conv1 to every class score", columns, rows, conclusion)


def _least_share(found: Sequence[dict]) -> float:
    return min(f["reached"] / (f["inputs"] * f["outputs"]) for f in found)


def _through_conclusion(shares: Mapping[str, tuple[float, float]], seeds: int) -> str:
    before, after, apart = shares["conv2_s1"][0], shares["conv3_s1"][0], shares["conv5_s1"][1]
    scores, scores_apart = shares["scores"]
    mixes = ", which has groups=1 and mixes the groups" if after > before else ""
    return " ".join(
        [
            f"An output of conv2 has seen {percent(before)} of the channels of conv1, one of conv3{mixes}, "
            f"{percent(after)}; {percent(scores)} of the pairs of a channel and a class score depend.",
            f"Were conv3 grouped too, an output of conv5 would have seen {percent(apart)} of them, and "
            f"the linear layers would join the groups: {percent(scores_apart)} of the pairs with a score.",
            f"Gradients on random inputs, {seeds_text(seeds)}; without ReLU and with mean pools, so that "
            "only what is connected counts.",
        ]
    )


_USED = {
    ("channels", GROUPED): "channels read that count, grouped (share)",
    ("channels", PLAIN): "channels read that count, groups=1 (share)",
    ("entries", GROUPED): "entries read that count, grouped (share)",
    ("entries", PLAIN): "entries read that count, groups=1 (share)",
    ("outputs", GROUPED): "outputs that pass ReLU and max-pool, grouped (share)",
    ("outputs", PLAIN): "outputs that pass ReLU and max-pool, groups=1 (share)",
    ("outputs", "without kinks"): "outputs that pass without ReLU, mean pools, grouped (share)",
}


def used_table(values: Values) -> Table:
    """What of each conv's inputs and outputs the class scores depend on, in the whole network."""
    everything = [v["used"] for v in values.values()]
    rows = [
        {"layer": name, "reads": "channels" if number else "pixels"}
        | {f"{w}/{k}": min(used[k][name][w] for used in everything) for w, k in _USED}
        for number, name in enumerate(everything[0][GROUPED])
    ]
    columns = {"layer": "layer", "reads": "it reads"} | {f"{w}/{k}": text for (w, k), text in _USED.items()}
    geometry = min(used["without kinks"]["conv1_s1"]["entries"] for used in everything)
    conclusion = _used_conclusion(rows, geometry, len(values))
    return Table("used", "What the class scores depend on in the whole network", columns, rows, conclusion)


def _used_conclusion(rows: Sequence[dict], geometry: float, seeds: int) -> str:
    def least(what: str, kind: str) -> float:
        return min(row[f"{what}/{kind}"] for row in rows)

    pixels = rows[0][f"entries/{GROUPED}"]
    read = min(least(what, kind) for what in ("channels", "entries") for kind in (GROUPED, PLAIN))
    passed, plain, free = (least("outputs", kind) for kind in (GROUPED, PLAIN, "without kinks"))
    return " ".join(
        [
            "The class scores depend on every pixel and on every channel that a conv reads, with groups as "
            "without."
            if read == 1
            else f"The class scores depend on {percent(pixels)} of the pixels and on at least "
            f"{percent(least('channels', GROUPED))} of the channels that a conv reads; with groups=1 on "
            f"{percent(rows[0][f'entries/{PLAIN}'])} and {percent(least('channels', PLAIN))}.",
            "Neither strides nor pools skip a pixel of this tile."
            if geometry == 1
            else f"Strides and pools reach {percent(geometry)} of the pixels of this tile, not its edge.",
            "What a given input leaves out, ReLU and max-pool leave out, whatever the groups: as few as "
            f"{percent(passed)} of a conv's own outputs pass them, {percent(plain)} with groups=1, "
            f"{percent(free)} without these kinks.",
            f"One random puzzle a seed, {seeds_text(seeds)}, the least share is shown.",
        ]
    )
