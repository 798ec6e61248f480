"""One seed of ``batch_size``: the sweeps, the layers one by one, the suite's verdicts, the cost of chunks."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.questions.batch.cost import costs, places
from experiments.questions.batch.layers import kernels, layer_by_layer
from experiments.questions.batch.network import boards, prepared
from experiments.questions.batch.plan import Plan, read
from experiments.questions.batch.suite import verdicts
from experiments.questions.batch.sweep import INPUTS, sweeps
from experiments.questions.question import Measured
from models.policy_net import NORMS, PolicyNet


def measure(settings: DictConfig, seed: int) -> Measured:
    """Raises ConfigurationError where a setting cannot be used."""
    plan = read(settings)
    networks = {norm: prepared(plan, norm, seed) for norm in NORMS}
    network, rows = networks["batch"].deepest(), boards(plan, "random", seed)
    record, said = verdicts(plan, network, rows, seed)
    values = {
        "sweeps": sweeps(plan, networks, seed),
        "verdicts": said,
        "costs": costs(plan, network, rows),
        "places": places(plan, network, rows[:1]),
    }
    # in chunks no layer ever sees another size, so that there is nothing to look at one by one
    return Measured(record, values | ({} if plan.invariant else _why(plan, network, seed)))


def _why(plan: Plan, network: PolicyNet, seed: int) -> dict:
    given = {inputs: boards(plan, inputs, seed) for inputs in INPUTS}
    sizes = {"float32": plan.sizes, "float64": plan.few}
    return {
        "layers": {inputs: layer_by_layer(network, rows[: plan.at]) for inputs, rows in given.items()},
        "kernels": kernels(network, given["random"][: plan.sizes[-1]], sizes),
    }


def about(settings: DictConfig) -> str:
    plan = read(settings)
    mode = f", in chunks of {plan.chunk}" if plan.invariant else ""
    depths = f"0 to {plan.blocks}" if plan.blocks else "no"
    return f"the first row's logits in batches of 1 to {plan.sizes[-1]}, {depths} residual blocks{mode}"
