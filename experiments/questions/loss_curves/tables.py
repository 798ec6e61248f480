"""The tables: the networks with what can be seen of them, and the rules with how often they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from omegaconf import DictConfig

from driftlab.report.sections import Table
from experiments.questions.loss_curves.networks import RIGHT, Network
from experiments.questions.loss_curves.rules import FEWER_AND_MORE, Score, score
from experiments.questions.loss_curves.series import SIGNS, Seed, Values, by_size, over_seeds, size

_PERCENT = ("loss", "accuracy")
_HEADINGS = {
    "loss": "final training loss off (%)",
    "accuracy": "test accuracy off (points)",
    **{s.key: s.words for s in SIGNS if s.key not in _PERCENT},
}


def network_table(settings: DictConfig, values: Values) -> Table:
    columns = {
        "network": "network",
        "same": "same function",
        "size": "gradient distance at step 0, float64",
        **_HEADINGS,
    }
    rows = [_network_row(settings, values, network) for network in by_size(values)]
    seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
    conclusion = (
        f"Median (least to greatest) of n = {seeds}, beside the reference. "
        "Drift: weight distance (relative), its median after one update. "
        f"The end: {settings.steps} float32, {settings.float64_steps} float64 steps."
    )
    return Table("networks", "The networks, the smallest fault first", columns, rows, conclusion)


def seed_table(values: Values) -> Table:
    """All digits of what the table of networks sums up."""
    columns = {"network": "network", "seed": "seed", "verdict": "driftlab's verdict", **_HEADINGS}
    rows = [_seed_row(number, seed, n.role) for n in by_size(values) for number, seed in values.items()]
    return Table("seeds", "Every network and seed", columns, rows, "What the first table sums up.")


def _seed_row(number: int, seed: Seed, role: str) -> dict:
    seen = {sign.key: sign.of(seed, role) for sign in SIGNS}
    seen = {k: v if v is None else 100 * v if k in _PERCENT else v for k, v in seen.items()}
    return {"network": role, "seed": number, "verdict": seed["verdicts"][role]["verdict"]} | seen


def _network_row(settings: DictConfig, values: Values, network: Network) -> dict:
    seen = {s.key: over_seeds(values, s.of, network.role) for s in SIGNS}
    texts = {key: _cell(key, found, len(values)) for key, found in seen.items()}
    words = network.words
    if network.role == RIGHT:
        words = f"{words}: {settings.rewrite.target.rpartition('.')[2]}"
    return {"network": words, "same": network.same, "size": _plain(size(values, network.role))} | texts


def _cell(key: str, found: Sequence[float], n: int) -> str:
    if found and key.endswith("_first"):
        return _plain(median(found))
    return spread(found, n, _percent if key in _PERCENT else _plain)


def _percent(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f}"  # so that -0 reads 0


def _plain(value: float) -> str:
    return f"{value:.2g}"


def spread(found: Sequence[float], n: int, text: Callable[[float], str]) -> str:
    """Median and range, the one number where there is one; and how many of ``n`` gave none."""
    if not found:
        return "blew up"
    middle, low, high = (text(f(found)) for f in (median, min, max))
    said = middle if len(found) == 1 else f"{middle} ({low} to {high})"
    return said if len(found) == n else f"{said}; {n - len(found)} blew up"


def rule_table(settings: DictConfig, values: Values, scores: Sequence[Score]) -> Table:
    columns = {
        "rule": "rule",
        "right": "right (%)",
        "counts": "right",
        "interval": "95 % interval (%)",
        "alarms": "right networks not cleared",
        "missed": "bugs not caught",
    }
    conclusion = (
        f"{scores[0].same} right and {scores[0].wrong} wrong networks, one of each a seed. Those of one "
        "seed share their reference, so the intervals (Clopper and Pearson) are nominal. The rerun takes "
        f"{settings.float64_steps} steps; {_decimals_words(values)}. All bugs here are in float64 too: one "
        "of float32 code alone would escape a rerun in float64."
    )
    return Table("rules", "How often each rule is right", columns, [_rule_row(s) for s in scores], conclusion)


def _decimals_words(values: Values) -> str:
    found = [score(values, rule) for rule in FEWER_AND_MORE]
    return ", ".join(f"{s.rule.words} it would be right about {s.right}" for s in found)


def _rule_row(score: Score) -> dict:
    low, high = score.interval
    return {
        "rule": score.rule.words,
        "right": f"{100 * score.right / score.n:.0f}",
        "counts": f"{score.right} of {score.n}",
        "interval": f"{100 * low:.0f} to {100 * high:.0f}",
        "alarms": f"{score.alarms} of {score.same}",
        "missed": f"{score.missed} of {score.wrong}",
    }
