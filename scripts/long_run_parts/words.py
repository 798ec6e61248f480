"""What the page of a long run opens with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from bench import habits
from bench.habits import Score
from driftlab.verdict.rules import judge
from driftlab.words import Judgement, Verdict
from scripts.long_run_parts.rules import CONTROLS, DRIFTLAB, RULES, Network, free_pair_stays, grown
from suite.showing.wording import counted, listed, sentences, share_of, spread

LOOKS = (30, 300, 3_000)
ADDED_UP = 6**0.2  # an update, in six updates of equal size and direction
GONE = 1e-3  # a float64 control so far from its reference has lost all that float64 has over float32


def sentence(networks: Sequence[Network]) -> str:
    """The rules at the last look, where each fault is found, growth along the run, how far float64 goes."""
    last = scores(networks, LOOKS[-1])
    faults = [n for n in networks if n.begins is not None]
    other = [f"{s.rule.words}: {s.right} of {s.n}" for key, s in last.items() if key != DRIFTLAB.key]
    mine = last[DRIFTLAB.key]
    return sentences(
        f"At step {LOOKS[-1]:,}, with both faults at work, driftlab's verdict is right about {mine.right} of "
        f"{mine.n} trainings; {'; '.join(other)}.",
        *(_found(n) for n in faults),
        *_grows(grown(networks[0], CONTROLS[0])),
        _gone(networks[0]),
    )


def _grows(growth: Mapping[int, Sequence[float]]) -> Iterable[str]:
    """Where along the run the control's distance grows faster than rounding that only adds up.

    Args:
        growth: window -> an update's, seed by seed.
    """
    first, final = min(growth), max(growth)
    faster = [step for step in growth if median(growth[step]) > ADDED_UP]
    yield (
        "In a window of six updates the distance of the float64 control grows "
        f"{spread(growth[first], two)} times an update at step {first:,} and {spread(growth[final], two)} "
        f"times at step {final:,}, at the end of the schedule; rounding that only adds up grows at most "
        f"{ADDED_UP:.2f} times."
    )
    if faster:
        most = max(faster, key=lambda step: median(growth[step]))
        yield (
            f"It grows faster than that, by the median, in {len(faster)} of {len(growth)} windows, those "
            f"from step {listed(map(whole, faster))}; most from step {most:,} on "
            f"({spread(growth[most], two)} times)."
        )


def _found(network: Network) -> str:
    judged = verdicts(network)
    steps = found_at(judged)
    pair = share_of(not free_pair_stays(r, LOOKS[-1]) for r in network.records)
    where = f", which it puts at step {spread(steps, whole)}" if steps else ""
    bugs, n = sum(j.verdict is Verdict.BUG for j in judged), counted(len(judged), "seed")
    what = network.words.removeprefix("fault: ")
    return (
        f"The fault ({what}) ends as `bug` in {bugs} of {n}{where}; the free-running float64 pair leaves its "
        f"control in {pair}."
    )


def _gone(network: Network) -> str:
    """When float64 is no longer any better than float32."""
    gone = []
    for record in network.records:
        apart = record.series("weight_distance", CONTROLS[0])
        gone.append(next((s for s in sorted(apart) if apart[s] > GONE), None))
    steps, n = [s for s in gone if s is not None], counted(len(gone), "seed")
    if not steps:
        return (
            f"The float64 control stays within {GONE:g} of the weights to its last step in all of {n}, so "
            "that the free-running pair can tell as long as it runs."
        )
    return (
        f"The float64 control is more than {GONE:g} of the weights away in {len(steps)} of {n}, from step "
        f"{spread(steps, whole)} on: there the free-running pair says nothing any more."
    )


def scores(networks: Sequence[Network], step: int) -> dict[str, Score]:
    """How often each rule was right about the trainings as they were after so many updates."""
    found = {}
    for rule in RULES:
        said = [(n.same(step), rule.same(record, step)) for n in networks for record in n.records]
        if any(answer is not None for _, answer in said):
            found[rule.key] = habits.score(rule, said)
    return found


def verdicts(network: Network) -> list[Judgement]:
    """Of each seed by itself, at the end of the training."""
    return [judge([record]) for record in network.records]


def found_at(judged: Sequence[Judgement]) -> list[int]:
    """The steps that those name which say bug, and where."""
    return [j.where.step for j in judged if j.verdict is Verdict.BUG and j.where]


def two(value: float) -> str:
    return f"{value:.2f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"
