"""The answer to the person who asked what becomes of the other half of the channels."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from experiments.questions.group.cost_table import cost_table, network_table
from experiments.questions.group.equality_tables import errors_table, literal_table, sweep_table
from experiments.questions.group.figures import figures
from experiments.questions.group.reach_tables import layers_table, through_table, used_table
from experiments.questions.group.verdict_table import verdict_table
from experiments.questions.group.words import GROUPED, PLAIN, percent

TABLES = (
    literal_table,
    errors_table,
    sweep_table,
    layers_table,
    through_table,
    used_table,
    network_table,
    cost_table,
    verdict_table,
)


def answer(settings: DictConfig, values: Mapping[int, dict]) -> Answer:
    """The sentence, tables and figures, from the values of at least one seed."""
    sentence = _sentence(values, settings.device)
    return Answer(sentence, [table(values) for table in TABLES], figures(values))


def _sentence(values: Mapping[int, dict], device: str) -> str:
    layers = [kinds[GROUPED] for v in values.values() for kinds in v["layers"].values()]
    used = min(min(f["used"] / f["inputs"], f["entries"]) for f in layers)
    shares = {f["groups"]: percent(f["reached"] / (f["inputs"] * f["outputs"])) for f in layers}
    seen = " and ".join(f"{share} of the input channels with groups={n}" for n, share in shares.items())
    dropped = "Nothing is dropped" if used == 1 else f"Not everything is used ({percent(used)} of the inputs)"
    return (
        f"{dropped} on one device: each output channel sees {seen}, those of its own group, and the groups "
        f"together use {percent(used)} of the inputs. {_capacity(values)} One device or two is irrelevant: "
        f"this was computed on one ({device}), which computes every group and concatenates what they give."
    )


def _capacity(values: Mapping[int, dict]) -> str:
    cost = next(iter(values.values()))["cost"]
    layer = "conv.conv2_s1"
    groups = cost[GROUPED][layer]["groups"]
    kept = percent(cost[GROUPED][layer]["macs"] / cost[PLAIN][layer]["macs"])
    return (
        f"With groups={groups} a layer has {kept} of the weights and multiply-adds of groups=1: less "
        "capacity, not less input."
    )
