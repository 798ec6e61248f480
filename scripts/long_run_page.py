"""The page of ``long_run.py``: growth along a long training, and what tells a fault that sets in late."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from bench import habits
from bench.habits import Score
from driftlab.along import times_the_controls
from driftlab.inquiry import Examined
from driftlab.record.local_windows import growth, windows_of
from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import Answer, Figure, Look, Table
from driftlab.rounding import HALFWAY
from driftlab.verdict.rules import judge
from driftlab.words import Verdict
from scripts.long_run_rules import DRIFTLAB, RULES, Network, free_pair_stays
from suite.showing.wording import Column, counted, sentences, share_of, spread, table

LOOKS = (30, 300, 3_000)
STEPS_OF_THE_PAIR = (10, 30, 100, 200, 300, 500, 700, 800, 1_000)
GONE = 1e-3  # a float64 control so far from its reference has lost all that float64 has over float32
CONTROLS = ("control.float64", "control.float32")


def answer(networks: Sequence[Network], steps: int) -> Answer:
    """From the right rewrite first, then the faults; ``steps`` are those of the whole training."""
    tables = [_rules(networks), _windows(networks, steps), _pair(networks), _ends(networks, steps)]
    return Answer(_sentence(networks), tables, [figure(networks)])


def scores(networks: Sequence[Network], step: int) -> dict[str, Score]:
    """How often each rule was right about the trainings as they were after so many updates."""
    found = {}
    for rule in RULES:
        said = [(n.same(step), rule.same(record, step)) for n in networks for record in n.records]
        if any(answer is not None for _, answer in said):
            found[rule.key] = habits.score(rule, said)
    return found


def found_at(network: Network) -> list[int | None]:
    """The step that the verdict names, seed by seed; None where it is no bug."""
    judged = [judge([record]) for record in network.records]
    return [j.where.step if j.verdict is Verdict.BUG and j.where else None for j in judged]


def _sentence(networks: Sequence[Network]) -> str:
    last = scores(networks, LOOKS[-1])
    faults = [n for n in networks if n.begins is not None]
    other = [f"{s.rule.words}: {s.right} of {s.n}" for key, s in last.items() if key != DRIFTLAB.key]
    mine = last[DRIFTLAB.key]
    begin = _grown(networks[0], CONTROLS[0])
    first, final = min(begin), max(begin)
    most = max(begin, key=lambda step: median(begin[step]))
    return sentences(
        f"At step {LOOKS[-1]:,}, with both faults at work, driftlab's verdict is right about {mine.right} of "
        f"{mine.n} trainings; {'; '.join(other)}.",
        *(_found(n) for n in faults),
        f"In a window of six updates the drift of the control grows {spread(begin[first], _two)} times an "
        f"update at step {first:,}, most at step {most:,} ({spread(begin[most], _two)} times), and "
        f"{spread(begin[final], _two)} times at step {final:,}; rounding that only adds up grows 1.2 to "
        "1.43 times.",
        _gone(networks[0]),
    )


def _found(network: Network) -> str:
    steps = [s for s in found_at(network) if s is not None]
    pair = share_of(not free_pair_stays(r, LOOKS[-1]) for r in network.records)
    where = f", which it puts at step {spread(steps, _whole)}" if steps else ""
    n = counted(len(network.records), "seed")
    return (
        f"The {network.words} ends as `bug` in {len(steps)} of {n}{where}; the free-running float64 pair "
        f"leaves its control in {pair}."
    )


def _gone(network: Network) -> str:
    """When float64 is no longer any better than float32."""
    gone = []
    for record in network.records:
        apart = record.series("weight_distance", CONTROLS[0])
        gone.append(next((s for s in sorted(apart) if apart[s] > GONE), None))
    steps = [s for s in gone if s is not None]
    where = f", first at step {spread(steps, _whole)}" if steps else ""
    return (
        f"The float64 control is more than {GONE:g} of the weights away by its end in {len(steps)} of "
        f"{counted(len(gone), 'seed')}{where}: from there on the free-running pair says nothing."
    )


def _two(value: float) -> str:
    return f"{value:.2f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _rules(networks: Sequence[Network]) -> Table:
    lines = [(step, score) for step in LOOKS for score in scores(networks, step).values()]
    columns = [
        Column("step", "after step", lambda line: f"{line[0]:,}"),
        Column("rule", "rule", lambda line: line[1].rule.words),
        Column("right", "right", lambda line: f"{line[1].right} of {line[1].n}"),
        Column(
            "interval",
            "95 % interval (%)",
            lambda line: " to ".join(f"{100 * x:.0f}" for x in line[1].interval),
        ),
        Column("alarms", "same trainings not cleared", lambda line: f"{line[1].alarms} of {line[1].same}"),
        Column(
            "missed",
            "faults not caught",
            lambda line: f"{line[1].missed} of {line[1].wrong}" if line[1].wrong else None,
        ),
    ]
    said = (
        "Each rule is asked about the training as it was after so many updates. A fault counts once it has "
        "set in; before, the training is the same. The trainings of one seed share their reference, so the "
        "intervals (Clopper and Pearson) are nominal. What a rule could not be asked is left out: no "
        "accuracy is measured at step 30, and float64 ends at step 1,000."
    )
    return table("rules", "How often each rule is right, the later the training", lines, columns, said)


def _grown(network: Network, arm: str) -> dict[int, list[float]]:
    """Window -> by how much the distance of an arm grows an update, seed by seed."""
    return _by_window(network, lambda rows: growth(rows, f"weight_distance/{arm}"))


def _times(network: Network) -> dict[int, list[float]]:
    return _by_window(network, lambda rows: times_the_controls(rows, Examined([])))


def _by_window(network: Network, of: Callable[[list], float | None]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in network.records:
        for begins, rows in windows_of(record.local).items():
            found.setdefault(begins, [])
            if (value := of(rows)) is not None:
                found[begins].append(value)
    return {begins: found[begins] for begins in sorted(found)}


def _windows(networks: Sequence[Network], steps: int) -> Table:
    grown = {arm: _grown(networks[0], arm) for arm in CONTROLS}
    times = [_times(n) for n in networks]
    columns = [
        Column("step", "window from step", lambda w: f"{w:,}"),
        Column(
            "rate",
            "learning rate (share of the first)",
            lambda w: f"{(1 + math.cos(math.pi * w / steps)) / 2:.2g}",
        ),
        *(
            Column(f"growth_{arm}", f"growth of {arm} an update", lambda w, a=arm: spread(grown[a][w], _two))
            for arm in CONTROLS
        ),
        *(
            Column(f"times_{i}", f"{n.words}: times the controls", lambda w, i=i: spread(times[i].get(w, [])))
            for i, n in enumerate(networks)
        ),
    ]
    said = (
        "A window puts candidate and controls where the reference is and follows them for six updates. "
        "Growth of a distance that only adds up is 1.2 (as a random walk) to 1.43 (in a straight line). "
        f"Times the controls: in float64, a bug from {HALFWAY:,.0f} on."
    )
    return table(
        "windows", "Growth along the run, and what the windows say", grown[CONTROLS[0]], columns, said
    )


def _pair(networks: Sequence[Network]) -> Table:
    def apart(arm: str, network: Network, step: int) -> str | None:
        found = (r.series("weight_distance", arm).get(step) for r in network.records)
        return spread([value for value in found if value is not None])

    columns = [
        Column("step", "after step", lambda s: f"{s:,}"),
        Column("control", "control.float64 (relative)", lambda s: apart(CONTROLS[0], networks[0], s)),
    ]
    for i, n in enumerate(networks):
        columns += [
            Column(f"apart_{i}", f"{n.words} (relative)", lambda s, n=n: apart("candidate.float64", n, s)),
            Column(
                f"says_{i}",
                "called a bug by then",
                lambda s, n=n: share_of(not free_pair_stays(r, s) for r in n.records),
            ),
        ]
    said = (
        "Weight distance of the float64 arms from their reference: median (least to greatest). A bug is what "
        "leaves the control's largest distance so far by more than HALFWAY, unless a kink can have made it."
    )
    return table("pair", "What the free-running float64 pair says", STEPS_OF_THE_PAIR, columns, said)


def _ends(networks: Sequence[Network], steps: int) -> Table:
    def verdicts(n: Network) -> str:
        found = [judge([record]).verdict for record in n.records]
        return ", ".join(f"{v} {found.count(v)}" for v in dict.fromkeys(found))

    def last(kind: str, arm: str, r: SeedRecord) -> float:
        return r.series(kind, arm, table="evaluations")[steps]

    def apart(arm: str, n: Network) -> str | None:
        return spread([100 * last("disagreement", arm, r) for r in n.records])

    def accuracy(arm: str, n: Network) -> str | None:
        found = [
            last("test_accuracy", arm, r) - last("test_accuracy", "reference.float32", r) for r in n.records
        ]
        return spread([100 * value for value in found], lambda v: f"{v:+.1f}")

    lines = [("control: one weight moved by one ulp", CONTROLS[1], networks[0])]
    lines += [(n.words, "candidate.float32", n) for n in networks]
    columns = [
        Column("network", "network", lambda line: line[0]),
        Column("n", "seeds", lambda line: len(line[2].records)),
        Column(
            "verdict", "verdict a seed", lambda line: verdicts(line[2]) if line[1] != CONTROLS[1] else None
        ),
        Column(
            "step",
            "set in at step, by the verdict",
            lambda line: spread([s for s in found_at(line[2]) if s is not None], _whole),
        ),
        Column("accuracy", "test accuracy off (points)", lambda line: accuracy(line[1], line[2])),
        Column("disagreement", "test images classified otherwise (%)", lambda line: apart(line[1], line[2])),
    ]
    said = (
        f"After {steps:,} updates in float32: median (least to greatest) over seeds, against the reference."
    )
    return table("ends", "Where each training ends", lines, columns, said)


def figure(networks: Sequence[Network]) -> Figure:
    caption = (
        "(a) Growth of the control's distance an update, in windows of six updates from equal weights "
        "(float64 drawn through, float32 dashed); shaded: what rounding that only adds up shows. "
        "(b) Candidate over its controls in these windows, float64; dotted: HALFWAY. (c) Free-running "
        "float64 and (d) float32: weight distance from the reference. Lines: medians over seeds; bands: their range. "
        "Upright: where a fault sets in."
    )
    return Figure(
        "long_run",
        "A long training, and two faults on its way",
        partial(_draw, networks),
        caption,
        aspect=0.8,
    )


def _draw(networks: Sequence[Network], canvas: Canvas, look: Look) -> None:
    axes = canvas.subplots(2, 2).flat
    canvas.subplots_adjust(top=0.86, bottom=0.09, left=0.1, right=0.98, hspace=0.32, wspace=0.26)
    names = ["control", *(n.words.removeprefix("right rewrite: ") for n in networks)]
    colours = dict(zip(names, look.series, strict=False))
    a, b, c, d = axes
    a.axhspan(6**0.1, 6**0.2, color=look.ink, alpha=0.12, linewidth=0)
    for arm, style in zip(CONTROLS, ("-", "--"), strict=True):
        _band(a, _grown(networks[0], arm), colours["control"], style)
    for n, name in zip(networks, names[1:], strict=True):
        _band(b, _times(n), colours[name], "-", floor=1e-3)
    b.axhline(HALFWAY, color=look.ink, linestyle=":", linewidth=0.8)
    for ax, dtype in ((c, "float64"), (d, "float32")):
        _band(ax, _distances(networks[0], f"control.{dtype}"), colours["control"], "-")
        for n, name in zip(networks, names[1:], strict=True):
            _band(ax, _distances(n, f"candidate.{dtype}"), colours[name], "-")
    for ax, title in zip(
        (a, b, c, d),
        (
            "(a) growth an update",
            "(b) times the controls",
            "(c) float64, free-running",
            "(d) float32, free-running",
        ),
        strict=True,
    ):
        ax.set_title(title, fontsize="small", loc="left")
        ax.set_xscale("log")
        for n, name in zip(networks, names[1:], strict=True):
            if n.begins is not None and ax is not a:
                ax.axvline(n.begins, color=colours[name], linestyle=":", linewidth=0.8)
    for ax in (b, c, d):
        ax.set_yscale("log")
    for ax in (c, d):
        ax.set_xlabel("step")
    handles = [a.plot([], [], color=colours[name], label=name)[0] for name in names]
    canvas.legend(handles=handles, loc="upper center", ncols=2, frameon=False, fontsize="small")


def _distances(network: Network, arm: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in network.records:
        for step, value in record.series("weight_distance", arm).items():
            if step and value > 0:
                found.setdefault(step, []).append(value)
    return {step: found[step] for step in sorted(found)}


def _band(
    ax: Axes, found: Mapping[int, Sequence[float]], colour: str, style: str, floor: float = 0.0
) -> None:
    steps = [step for step, values in found.items() if values]
    of = {take: [max(take(found[s]), floor) for s in steps] for take in (min, median, max)}
    ax.plot(steps, of[median], color=colour, linestyle=style, linewidth=1.3)
    ax.fill_between(steps, of[min], of[max], color=colour, alpha=0.15, linewidth=0)
