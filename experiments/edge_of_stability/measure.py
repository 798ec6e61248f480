"""What one seed gives: at every learning rate, which runs trained and which diverged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from driftlab.arithmetic.sizes import fewer_samples
from driftlab.inquiry import before_training
from driftlab.lockstep.arm import Arm
from driftlab.lockstep.control import nudge
from driftlab.lockstep.loop import Lockstep
from driftlab.network.calling import copied
from driftlab.network.pair import Pair
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.outcomes import tail_of
from driftlab.words import Finding, settled_by
from experiments.edge_of_stability.judged import outcome_findings
from experiments.edge_of_stability.outcomes import ARMS
from suite.data.batches import Batches
from suite.data.images import Images
from suite.running.arguments import check_rewrite
from suite.running.asking import Measured
from suite.running.building import make_batches, own_seeds
from suite.running.networks import build_arms, make_arm
from suite.running.updates import make_loss


def about(settings: DictConfig) -> str:
    rates = _rates(settings)
    return f"{len(ARMS)} arms at {len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}"


def measure(settings: DictConfig, seed: int, images: Images) -> Measured:
    """Train every arm at every rate, from the same weights on the same batches; probe candidate and bug."""
    rates, seeds = _rates(settings), own_seeds(settings, seed)
    batches, pairs = pairs_of(settings, seed, images)
    first = batches.batch(0)
    few = fewer_samples(first, settings.probe_images) or first
    found = {role: before_training(pair, few)[0].findings for role, pair in pairs.items()}
    networks = _networks(pairs, seeds["nudge"])
    runs = [run for rate in rates for run in _trained(settings, rate, networks, batches, seeds["order"])]
    probes = [*found["candidate"], *outcome_findings(runs)]
    record = SeedRecord(seed, [], [], {"arms": {}, "probes": [f.as_dict() for f in probes]})
    return Measured(record, {"runs": runs, "probes": {role: _said(f) for role, f in found.items()}})


def pairs_of(settings: DictConfig, seed: int, images: Images) -> tuple[Batches, dict[str, Pair]]:
    """What a seed trains on, and its pairs. Raises ConfigurationError where a rewrite is none."""
    check_rewrite("bug", settings)
    seeds = own_seeds(settings, seed)
    batches = make_batches(settings, images, seeds)
    few = batches.batch(0)[0][:2].cpu()
    rewrites = {"candidate": settings.rewrite, "bug": settings.bug}
    return batches, {role: _pair(settings, rewrite, images, seeds, few) for role, rewrite in rewrites.items()}


def _rates(settings: DictConfig) -> list[float]:
    """In rising order."""
    return sorted(float(rate) for rate in settings.learning_rates)


def _pair(
    settings: DictConfig, rewrite: Mapping, images: Images, seeds: dict[str, int], few: torch.Tensor
) -> Pair:
    """Reference and rewritten network on the device. Raises ConfigurationError where there is no rewrite."""
    asked = settings.copy()
    asked.rewrite = rewrite
    asked.roles, asked.dtypes = ["reference", "candidate"], ["float32"]
    return build_arms(asked, images, seeds, few)[1]


def _networks(pairs: Mapping[str, Pair], nudge_seed: int) -> dict[str, nn.Module]:
    reference = pairs["candidate"].reference
    control = copied(reference)
    nudge(control, nudge_seed)
    return {"reference": reference, "control": control} | {r: p.candidate for r, p in pairs.items()}


def _trained(
    settings: DictConfig, rate: float, networks: Mapping[str, nn.Module], batches: Batches, seed: int
) -> list[dict]:
    """Every arm at one learning rate, in lockstep: how it began and how it ended."""
    asked = OmegaConf.merge(settings, {"optimizer": {"lr": rate}})
    arms = [make_arm(asked, role, "float32", network, settings.steps) for role, network in networks.items()]
    # losses alone, at the first step and at the end: no arm is compared with another on the way
    end = settings.steps - tail_of(settings.steps + 1)
    lockstep = Lockstep(arms, make_loss(settings), seed=seed, logged=lambda step: step == 0 or step > end)
    for step in range(settings.steps + 1):
        if not lockstep.live(step):
            break
        lockstep.forward_backward(step, *batches.batch(step))
        lockstep.update(step)
    lockstep.flush()
    return [{"rate": rate, **_ended(settings, lockstep, arm, batches, end)} for arm in arms]


def _ended(settings: DictConfig, lockstep: Lockstep, arm: Arm, batches: Batches, end: int) -> dict:
    losses = {
        step: row[f"loss/{arm.name}"] for step, row in lockstep.rows.items() if f"loss/{arm.name}" in row
    }
    blown = arm.blown_up_at is not None
    return {
        "arm": arm.role,
        "blown_up_at": arm.blown_up_at,
        "first": losses[0] if math.isfinite(losses[0]) else None,
        "tail": [] if blown else [losses[step] for step in sorted(losses) if step > end],
        "accuracy": None if blown else _accuracy(settings, lockstep, arm, batches),
    }


def _accuracy(settings: DictConfig, lockstep: Lockstep, arm: Arm, batches: Batches) -> float:
    """The share of test images that the arm classifies rightly at its end."""
    logits, targets = lockstep.predictions(
        arm, batches.test_batches(settings.eval_images, settings.batch_size)
    )
    return float((logits.argmax(1) == targets).double().mean())


def _said(findings: list[Finding]) -> dict:
    """What the probes, which train nothing, say of a pair."""
    settled = settled_by(findings)
    if settled is None:
        return {"verdict": None, "reading": None}
    verdict, finding = settled
    return {"verdict": str(verdict), "reading": finding.evidence.reading}
