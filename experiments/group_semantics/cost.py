"""Parameters and multiply-adds, layer by layer, beside groups=1; and what the thread says of its network."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from driftlab.report.sections import Table
from experiments.group_semantics.reach import GROUPED, PLAIN
from models.grouped_net import POOLED
from suite.showing.wording import Column, Rows, Values, first_of, own, percent, table

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


def costs(net: nn.Module, inputs: tuple[int, ...]) -> dict[str, dict]:
    """Every conv and linear layer of ``net`` in one forward pass of inputs of this shape.

    Counted on the meta device, where nothing is computed.

    Returns:
        name -> "weight" (its shape), "parameters" (biases included), "macs" (multiply-adds of the products; a
        bias adds none). FlopCounterMode counts two operations for each.
    """
    net = copy.deepcopy(net).to("meta")
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(inputs, device="meta"))
    flops = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    root = type(net).__name__
    return {
        name: {
            "weight": list(layer.weight.shape),
            "groups": getattr(layer, "groups", None),
            "stride": _size(layer, "stride"),
            "padding": _size(layer, "padding"),
            "parameters": sum(p.numel() for p in layer.parameters()),
            "macs": flops[f"{root}.{name}"] // 2,
        }
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }


def _size(layer: nn.Module, name: str) -> int | None:
    """Equal in both directions in every conv here; a linear layer has none."""
    return getattr(layer, name)[0] if isinstance(layer, nn.Conv2d) else None


def cost_table(values: Values) -> Table:
    """Parameters and multiply-adds, layer by layer, against groups=1."""
    cost = first_of(values)["cost"]
    columns = (
        own("layer", "layer"),
        own("groups"),
        own("parameters", "parameters with biases (count)"),
        own("parameters1", "with groups=1 (count)"),
        Column("share", "parameters (share of groups=1)", lambda x: x["parameters"] / x["parameters1"]),
        own("macs", "multiply-adds (count)"),
        own("macs1", "multiply-adds, groups=1 (count)"),
        Column("macs_share", "multiply-adds (share of groups=1)", lambda x: x["macs"] / x["macs1"]),
    )
    counts = ("parameters", "macs")
    lines = [
        {"layer": name, "groups": grouped["groups"]}
        | {k: grouped[k] for k in counts}
        | {f"{k}1": cost[PLAIN][name][k] for k in counts}
        for name, grouped in cost[GROUPED].items()
    ]
    total = {k: sum(line[k] for line in lines) for k in ("parameters", "parameters1", "macs", "macs1")}
    lines.append({"layer": "total", "groups": None} | total)
    title = "Parameters and multiply-adds of one puzzle (four tiles)"
    return table("cost", title, lines, columns, _cost_words)


def _cost_words(rows: Rows) -> str:
    *layers, total = rows
    grouped = ", ".join(
        f"{row['layer'].removeprefix('conv.')} {percent(row['macs_share'])}"
        for row in layers
        if (row["groups"] or 1) > 1
    )
    return (
        "Less capacity, not less input: of the weights and multiply-adds that it would have with "
        f"groups=1 a layer keeps {grouped}. The whole network keeps {percent(total['share'])} of its "
        f"parameters and {percent(total['macs_share'])} of its multiply-adds."
    )


def network_table(values: Values) -> Table:
    """The network: what the thread gives, and what had to be chosen."""
    layers = first_of(values)["cost"][GROUPED]
    columns = (
        own("layer", "layer"),
        Column("thread", "weight in the thread (expected)", lambda x: str(THREAD[x["layer"]])),
        Column("weight", "weight here", lambda x: str(x["weight"])),
        own("groups", "groups"),
        Column("chosen", "chosen here, for the thread does not say", _chosen),
    )
    lines = [layer | {"layer": name} for name, layer in layers.items()]
    parameters = sum(layer["parameters"] for layer in lines)
    literal = parameters == THREAD_PARAMETERS and all(THREAD[x["layer"]] == x["weight"] for x in lines)
    said = (
        f"All shapes and the {parameters:,} parameters are the thread's."
        if literal
        else f"{parameters:,} parameters; these sizes are not the thread's, which has {THREAD_PARAMETERS:,}."
    )
    said += (
        " Strides, padding, pools and the size of a tile are our choice; what reaches what is not up to them."
    )
    return table("network", "The network that was asked about", lines, columns, said)


def _chosen(layer: dict) -> str | None:
    if not layer["stride"]:
        return None
    pooled = ", max-pool 3, stride 2" if layer["layer"].removeprefix("conv.") in POOLED else ""
    return f"stride {layer['stride']}, padding {layer['padding']}, ReLU{pooled}"
