"""What groups=2 costs and saves, layer by layer; and what the thread says of its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driftlab.report.sections import Table
from experiments.questions.group.words import GROUPED, PLAIN, percent
from models.grouped_net import POOLED

# The state dict that the thread prints, and its number of parameters.
THREAD = {
    "conv.conv1_s1": [96, 3, 25, 7],
    "conv.conv2_s1": [192, 48, 3, 3],
    "conv.conv3_s1": [256, 192, 3, 3],
    "conv.conv4_s1": [256, 128, 3, 3],
    "conv.conv5_s1": [192, 128, 3, 3],
    "fc6.fc6_s1": [512, 6336],
    "fc7.fc7": [256, 2048],
    "classifier.fc8": [24, 256],
}
THREAD_PARAMETERS = 4_868_056


def cost_table(values: Mapping[int, dict]) -> Table:
    """Parameters and multiply-adds, layer by layer, against groups=1."""
    cost = next(iter(values.values()))["cost"]
    rows = [_row(name, cost[GROUPED][name], cost[PLAIN][name]) for name in cost[GROUPED]]
    total = {k: sum(row[k] for row in rows) for k in ("parameters", "parameters1", "macs", "macs1")}
    rows.append({"layer": "total", "groups": None} | total | _shares(total))
    columns = {
        "layer": "layer",
        "parameters": "parameters with biases (count)",
        "parameters1": "with groups=1 (count)",
        "share": "parameters (share of groups=1)",
        "macs": "multiply-adds (count)",
        "macs1": "multiply-adds, groups=1 (count)",
        "macs_share": "multiply-adds (share of groups=1)",
    }
    title = "Parameters and multiply-adds of one puzzle (four tiles)"
    return Table("cost", title, columns, rows, _conclusion(rows))


def network_table(values: Mapping[int, dict]) -> Table:
    """The network: what the thread gives, and what had to be chosen."""
    layers = next(iter(values.values()))["cost"][GROUPED]
    rows = [_layer(name, layer) for name, layer in layers.items()]
    columns = {
        "layer": "layer",
        "thread": "weight in the thread (expected)",
        "weight": "weight here",
        "groups": "groups",
        "chosen": "chosen here, for the thread does not say",
    }
    parameters = sum(layer["parameters"] for layer in layers.values())
    literal = parameters == THREAD_PARAMETERS and all(row["thread"] == row["weight"] for row in rows)
    conclusion = (
        f"All shapes and the {parameters:,} parameters are the thread's. "
        if literal
        else f"{parameters:,} parameters; these sizes are not the thread's, which has {THREAD_PARAMETERS:,}. "
    )
    conclusion += (
        "Strides, padding, pools and the size of a tile are our choice; what reaches what is not up to them."
    )
    return Table("network", "The network that was asked about", columns, rows, conclusion)


def _row(name: str, grouped: dict, plain: dict) -> dict:
    counts = {"parameters": grouped["parameters"], "parameters1": plain["parameters"]}
    counts |= {"macs": grouped["macs"], "macs1": plain["macs"]}
    return {"layer": name, "groups": grouped["groups"]} | counts | _shares(counts)


def _layer(name: str, layer: dict) -> dict:
    chosen = None
    if layer["stride"]:
        pooled = ", max-pool 3, stride 2" if name.removeprefix("conv.") in POOLED else ""
        chosen = f"stride {layer['stride']}, padding {layer['padding']}, ReLU{pooled}"
    shapes = {"thread": str(THREAD[name]), "weight": str(layer["weight"])}
    return {"layer": name, **shapes, "groups": layer["groups"], "chosen": chosen}


def _shares(row: Mapping[str, int]) -> dict[str, float]:
    return {"share": row["parameters"] / row["parameters1"], "macs_share": row["macs"] / row["macs1"]}


def _conclusion(rows: Sequence[dict]) -> str:
    *layers, total = rows
    grouped = ", ".join(
        f"{row['layer'].removeprefix('conv.')} {percent(row['macs_share'])}"
        for row in layers
        if (row["groups"] or 1) > 1
    )
    return " ".join(
        [
            "Less capacity, not less input: of the weights and multiply-adds that it would have with "
            f"groups=1 a layer keeps {grouped}.",
            f"The whole network keeps {percent(total['share'])} of its parameters and "
            f"{percent(total['macs_share'])} of its multiply-adds.",
        ]
    )
