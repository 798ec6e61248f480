"""How far right and wrong pairs stand from the control in 16 bits: ``python -m bench.low_precision.arms``.

Every pair of this folder that has weights is trained for ten updates in its own precision, on one batch and a
squared error, by SGD and by AdamW; small networks with kinks and norms, rewritten rightly, from 40 seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.low_precision.case import Case, cases
from driftlab.fold import find_fold
from driftlab.lockstep.arm import Arm, grow
from driftlab.lockstep.loop import Lockstep
from driftlab.network.calling import calling, named_leaves
from driftlab.precision import TRAINED_IN
from driftlab.record.seed_record import SeedRecord
from driftlab.rounding import BESIDE_16_BITS
from driftlab.verdict.in_16_bits import asked_in_16_bits

UPDATES, SEEDS = 10, 40
OPTIMIZERS = {
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=3e-3),
}
Batch = tuple[object, object]


class Apart(nn.Linear):
    """A linear layer whose inputs are summed in two parts, each rounded before they meet."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.in_features // 3
        parts = x[:, :first] @ self.weight[:, :first].T, x[:, first:] @ self.weight[:, first:].T
        return parts[0] + parts[1] + self.bias


def apart(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = Apart
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.Sequential(
        nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)
    ),
    "gelu, layer norm": lambda: nn.Sequential(
        nn.Linear(20, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5)
    ),
    "relu, batch norm": lambda: nn.Sequential(
        nn.Linear(20, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)
    ),
}


def times_the_control(
    pair: tuple[nn.Module, nn.Module],
    precision: str,
    optimizer: Callable,
    loss: Callable,
    batch: Callable[[int], Batch],
    seed: int = 0,
) -> float:
    """What the evidence ``<precision>_pair`` measures after ``UPDATES``."""
    horizons, fold = {"float32": UPDATES, precision: UPDATES}, find_fold(*pair, None)
    arms = grow(*pair, optimizer=optimizer, horizons=horizons, fold=fold, nudge_seed=seed)
    lockstep = Lockstep(arms, loss, seed=seed, call=calling(pair[0], batch(0)[0]))
    for step in range(UPDATES + 1):
        lockstep.forward_backward(step, *batch(step))
        lockstep.update(step)
    lockstep.flush()
    evidence, _ = next(asked_in_16_bits([_record(lockstep.arms, lockstep.rows, seed)], "candidate"))
    return evidence.measured or 0.0


def _record(arms: list[Arm], rows: dict, seed: int) -> SeedRecord:
    table = [{"step": step, **row} for step, row in sorted(rows.items())]
    return SeedRecord(seed, table, [], {"arms": {a.name: {"blown_up_at": a.blown_up_at} for a in arms}})


def squared_error(outputs: object, _: object) -> Tensor:
    """From numbers drawn once."""
    generator = torch.Generator().manual_seed(0)
    leaves = named_leaves(outputs).values()
    return sum(((o - torch.randn(o.shape, generator=generator).to(o)) ** 2).mean() for o in leaves)


def of_cases(found: list[Case]) -> Iterator[tuple[str, float]]:
    """Label and distance, by each optimizer, of those with weights that are trained in their precision."""
    for case in found:
        reference, candidate, inputs = case.make()
        if case.precision in TRAINED_IN and any(True for _ in reference.parameters()):
            batch = partial(_always, (inputs, torch.zeros(1)))
            for optimizer in OPTIMIZERS.values():
                pair = copy.deepcopy((reference, candidate))
                yield case.label, times_the_control(pair, case.precision, optimizer, squared_error, batch)


def _always(batch: Batch, step: int) -> Batch:
    return batch


def of_networks() -> Iterator[tuple[str, float]]:
    """The same of ``NETWORKS``, in every precision of 16 bits."""

    def drawn(seed: int) -> Callable[[int], Batch]:
        def batch(step: int) -> Batch:
            generator = torch.Generator().manual_seed(1000 * seed + step)
            return torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)

        return batch

    for name, make in NETWORKS.items():
        for precision in TRAINED_IN[2:]:
            for optimizer in OPTIMIZERS.values():
                for seed in range(SEEDS):
                    torch.manual_seed(seed)
                    reference = make()
                    pair = reference, apart(copy.deepcopy(reference))
                    yield (
                        f"right ({name})",
                        times_the_control(pair, precision, optimizer, F.cross_entropy, drawn(seed), seed),
                    )


def main() -> int:
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for label, times in (*of_cases(cases()), *of_networks()):
        found.setdefault(label, []).append(times)
    print(f"times the control, of runs of {UPDATES} updates; more than {BESIDE_16_BITS:g} is no rounding")
    for label, times in found.items():
        beyond = sum(t > BESIDE_16_BITS for t in times)
        print(f"{label}: n {len(times)}, median {median(times):.2f}, most {max(times):.3g}, beyond {beyond}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
