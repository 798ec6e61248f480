"""What one seed gives: at every learning rate, who trained and who fell over."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from driftlab.arm import Arm, nudge
from driftlab.copying import copied
from driftlab.examination import examined
from driftlab.lockstep import Lockstep
from driftlab.outcomes import tail_of
from driftlab.probes.sizes import fewer_samples
from driftlab.records import SeedRecord
from driftlab.rules import settled_by
from driftlab.subject import Subject
from driftlab.verdict import Finding
from experiments.configuration import check_whole
from experiments.data.batches import Batches
from experiments.data.images import Images
from experiments.errors import ConfigurationError
from experiments.networks import build_arms, make_arm
from experiments.questions.edge.judged import outcome_findings
from experiments.questions.edge.outcomes import ARMS
from experiments.questions.question import Measured
from experiments.seed_run import make_batches, own_seeds


def about(settings: DictConfig) -> str:
    """Raises ConfigurationError where the learning rates are none."""
    rates = _rates(settings)
    if not isinstance(settings.get("bug"), Mapping) or not settings.bug.get("target"):
        raise ConfigurationError("bug.target is not set: write the rewrite that is wrong on purpose")
    return f"{len(ARMS)} arms at {len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}"


def measure(settings: DictConfig, seed: int, images: Images) -> Measured:
    """Train every arm at every rate, from the same weights on the same batches; probe candidate and bug."""
    rates, seeds = _rates(settings), own_seeds(settings, seed)
    batches = make_batches(settings, images, seeds)
    first = batches.batch(0)
    pairs = {
        role: _pair(settings, rewrite, images, seeds, first[0][:2].cpu())
        for role, rewrite in (("candidate", settings.rewrite), ("bug", settings.bug))
    }
    few = fewer_samples(first, settings.probe_images) or first
    found = {role: examined(pair, few).findings for role, pair in pairs.items()}
    networks = _networks(pairs, seeds["nudge"])
    runs = [run for rate in rates for run in _trained(settings, rate, networks, batches, seeds["order"])]
    probes = [*found["candidate"], *outcome_findings(runs)]
    record = SeedRecord(seed, [], [], {"arms": {}, "probes": [f.as_dict() for f in probes]})
    return Measured(record, {"runs": runs, "probes": {role: _said(f) for role, f in found.items()}})


def _rates(settings: DictConfig) -> list[float]:
    """In rising order. Raises ConfigurationError."""
    check_whole("probe_images", settings.probe_images, 1)
    given = settings.get("learning_rates")
    known = isinstance(given, ListConfig | list) and len(given) > 0
    if not known or any(isinstance(r, bool) or not isinstance(r, int | float) for r in given):
        raise ConfigurationError(f"learning_rates={given} must be a list of numbers, one at least")
    if not all(0 < r < math.inf for r in given) or len(set(given)) < len(given):
        raise ConfigurationError(f"learning_rates={list(given)} must be finite, above 0 and each given once")
    return sorted(float(r) for r in given)


def _pair(
    settings: DictConfig, rewrite: Mapping, images: Images, seeds: dict[str, int], few: torch.Tensor
) -> Subject:
    """Reference and rewritten network on the device. Raises ConfigurationError where there is no rewrite."""
    asked = settings.copy()
    asked.rewrite = rewrite
    asked.roles, asked.dtypes = ["reference", "candidate"], ["float32"]
    return build_arms(asked, images, seeds, few)[1]


def _networks(pairs: Mapping[str, Subject], nudge_seed: int) -> dict[str, nn.Module]:
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
    lockstep = Lockstep(arms, F.cross_entropy, seed=seed, logged=lambda step: step == 0 or step > end)
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
