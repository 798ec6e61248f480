"""What groups=2 connects and uses: the gradients of all seeds as tables with their conclusions."""

from __future__ import annotations

from collections.abc import Mapping

from driftlab.report.sections import Table
from experiments.group_semantics.reach import GROUPED, INTERLEAVED, PLAIN
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values, percent


def kind_label(kind: str, groups: int) -> str:
    return {PLAIN: PLAIN, GROUPED: f"groups={groups}", INTERLEAVED: f"groups={groups}, interleaved"}[kind]


def layers_table(values: Values) -> Table:
    """Which input channels reach which output channels, layer by layer."""
    columns = (
        say.first("layer", "layer"),
        say.first("kind"),
        Column("channels", "channels", lambda found: kind_label(found[0]["kind"], found[0]["groups"])),
        Column("sizes", "input -> output channels", lambda f: f"{f[0]['inputs']} -> {f[0]['outputs']}"),
        Column("zeros", "pairs with gradient exactly 0 (count)", lambda found: max(map(_unreached, found))),
        Column("share", "pairs that depend (share)", least_share),
        say.over(sum, "unexpected", "pairs against the definition (count, all seeds)"),
        Column("used", "input channels used (share)", lambda f: say.least("used")(f) / f[0]["inputs"]),
        say.least("entries", "channels x pixels used (share)"),
        Column("moved", None, lambda found: say.greatest("moved")(found) / _pairs(found[0])),
    )
    found = [
        kinds[kind] | {"layer": layer, "kind": kind}
        for layers in say.each(values, "layers")
        for layer, kinds in layers.items()
        for kind in kinds
    ]
    return say.table(
        "layers",
        "Which input channels reach which output channels",
        say.grouped(found, "layer", "kind").values(),
        columns,
        lambda rows: _layers_conclusion(rows, say.seeds(values)),
    )


def _pairs(found: Mapping) -> int:
    return found["inputs"] * found["outputs"]


def _unreached(found: Mapping) -> int:
    return _pairs(found) - found["reached"]


def least_share(found: Rows) -> float:
    """Of the pairs of an input channel and an output, the share that depends; the least over seeds."""
    return min(f["reached"] / _pairs(f) for f in found)


def _layers_conclusion(rows: Rows, seeds: str) -> str:
    against = sum(row["unexpected"] for row in rows)
    used = min(min(row["used"], row["entries"]) for row in rows)
    grouped, plain = ({row["share"] for row in say.chosen(rows, kind=kind)} for kind in (GROUPED, PLAIN))
    moved = [row["moved"] for row in say.chosen(rows, kind=INTERLEAVED)]
    return say.sentences(
        f"In {seeds} the gradient is zero exactly where the definition of groups puts one."
        if against == 0
        else f"In {seeds} {against} pairs are not as the definition of groups says.",
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
    )


def _listed(shares: set[float], separator: str = ", ") -> str:
    return separator.join(percent(share) for share in sorted(shares))


def through_table(values: Values) -> Table:
    """From conv1's channels to every later layer: where the halves meet."""
    everything = say.each(values, "through")
    whole, apart = everything[0]
    columns = (
        say.own("to", "from the channels of conv1_s1 to"),
        say.own("inputs", "channels of conv1_s1"),
        say.own("outputs", "outputs there"),
        say.own(whole, "pairs that depend (share): the network as it is, groups=1 in conv3"),
        say.own(apart, "pairs that depend (share): conv3 grouped too"),
    )
    lines = [
        {"to": name, "inputs": one["inputs"], "outputs": one["outputs"]}
        | {net: least_share([through[net][name] for through in everything]) for net in (whole, apart)}
        for name, one in everything[0][whole].items()
    ]
    conclusion = _through_conclusion({x["to"]: (x[whole], x[apart]) for x in lines}, say.seeds(values))
    return say.table("through", "From the channels of conv1 to every class score", lines, columns, conclusion)


def _through_conclusion(shares: Mapping[str, tuple[float, float]], seeds: str) -> str:
    before, after, apart = shares["conv2_s1"][0], shares["conv3_s1"][0], shares["conv5_s1"][1]
    scores, scores_apart = shares["scores"]
    mixes = ", which has groups=1 and mixes the groups" if after > before else ""
    return (
        f"An output of conv2 has seen {percent(before)} of the channels of conv1, one of conv3{mixes}, "
        f"{percent(after)}; {percent(scores)} of the pairs of a channel and a class score depend. "
        f"Were conv3 grouped too, an output of conv5 would have seen {percent(apart)} of them, and "
        f"the linear layers would join the groups: {percent(scores_apart)} of the pairs with a score. "
        f"Gradients on random inputs, {seeds}; without ReLU and with mean pools, so that "
        "only what is connected counts."
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
    everything = say.each(values, "used")
    rows = [
        {"layer": name, "reads": "channels" if number else "pixels"}
        | {f"{w}/{k}": min(used[k][name][w] for used in everything) for w, k in _USED}
        for number, name in enumerate(everything[0][GROUPED])
    ]
    columns = {"layer": "layer", "reads": "it reads"} | {f"{w}/{k}": text for (w, k), text in _USED.items()}
    geometry = min(used["without kinks"]["conv1_s1"]["entries"] for used in everything)
    conclusion = _used_conclusion(rows, geometry, say.seeds(values))
    return Table("used", "What the class scores depend on in the whole network", columns, rows, conclusion)


def _used_conclusion(rows: Rows, geometry: float, seeds: str) -> str:
    def least(what: str, kind: str) -> float:
        return min(row[f"{what}/{kind}"] for row in rows)

    pixels = rows[0][f"entries/{GROUPED}"]
    read = min(least(what, kind) for what in ("channels", "entries") for kind in (GROUPED, PLAIN))
    passed, plain, free = (least("outputs", kind) for kind in (GROUPED, PLAIN, "without kinks"))
    return say.sentences(
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
        f"One random puzzle a seed, {seeds}, the least share is shown.",
    )
