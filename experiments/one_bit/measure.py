"""What one seed of ``one_bit`` gives: a run of every row, and plain and split side by side, for a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch.nn.functional as F
from omegaconf import DictConfig

from driftlab.diagnosis import diagnosed
from driftlab.network.calling import whole
from driftlab.network.pair import Pair, the_pair
from driftlab.process import random_state_kept
from driftlab.record.seed_record import SeedRecord
from driftlab.words import Evidence, Finding
from experiments.one_bit.rows import ROWS, Row, network_of, seeds_of, split_by_chance
from experiments.one_bit.stored import packed, unpacked
from experiments.one_bit.training import as_seen, laid_out, make_groups, trained
from suite.command.errors import ConfigurationError
from suite.data.batches import Batches
from suite.data.images import Images
from suite.running.asking import Measured
from suite.running.building import make_batches, own_seeds
from suite.running.networks import build_reference

APART = "apart_from_base"  # the probes that hold how far a run is from the one with nothing varied,
BASE_WEIGHTS = "base_weights"  # and where that one ends


def about(settings: DictConfig) -> str:
    return f"{len(ROWS)} trainings of {settings.steps:,} updates a seed, each with another thing varied"


def check(settings: DictConfig, seed: int, images: Images) -> None:
    """Raises ConfigurationError where the network or the optimizer cannot be made."""
    for row in ROWS.values():
        module, _ = network_of(row, settings, images, seeds_of(row, settings, seed), seed)
    make_groups(settings, module)
    largest = images.train_images.shape[-1]
    if settings.shrink > largest:
        raise ConfigurationError(f"shrink={settings.shrink} leaves nothing of {largest} pixels: write less")
    make_batches(settings, images, own_seeds(settings, seed))


def measure(settings: DictConfig, seed: int, images: Images) -> Measured:
    """Raises ConfigurationError where the network or the optimizer cannot be made."""
    with random_state_kept():
        runs = {key: _run(row, settings, seed, images) for key, row in ROWS.items()}
        record = _pair(settings, seed, images)
    labels = images.test_labels[: settings.eval_images].numpy()
    values = {"rows": runs, "labels": packed(labels, "i2"), "train_images": len(images.train_images)}
    findings = [*record.found(), _base(runs), *(_apart(key, runs) for key in ("split", "one_ulp"))]
    run = record.run | {"probes": [finding.as_dict() for finding in findings]}
    return Measured(SeedRecord(seed, record.curves, record.evaluations, run), values)


def _run(row: Row, settings: DictConfig, seed: int, images: Images) -> dict:
    seeds = seeds_of(row, settings, seed)
    module, changed = network_of(row, settings, images, seeds, seed)
    batches = make_batches(settings, images, seeds)
    return {"changed": changed} | trained(settings, module, batches, seeds["order"])


def _pair(settings: DictConfig, seed: int, images: Images) -> SeedRecord:
    """Plain and split in lockstep for a few steps, in both dtypes, with the probes that need no training."""
    seeds = seeds_of(ROWS["split"], settings, seed)
    plain = laid_out(build_reference(settings, images, seeds["init"]).to(settings.device), settings)
    mine, theirs, fold = the_pair(plain, lambda model: split_by_chance(model, seed)[0], None)
    optimizer = partial(make_groups, settings, rate=settings.window.learning_rate)
    batches = _window(settings, make_batches(settings, images, seeds))
    subject = Pair(mine, theirs, fold, F.cross_entropy, optimizer, optimizer, whole, seed)
    return diagnosed(subject, batches, settings.window.steps)


def _window(settings: DictConfig, batches: Batches) -> list:
    steps = range(settings.window.steps + 1)
    return [(as_seen(x, settings), y) for x, y in map(batches.batch, steps)]


def _base(runs: Mapping[str, dict]) -> Finding:
    question = "Where does the training end with nothing varied?"
    return Finding(Evidence(BASE_WEIGHTS, question, None, None, None, runs["nothing"]["weights"]))


def _apart(key: str, runs: Mapping[str, dict]) -> Finding:
    """On how many test images a run and the one with nothing varied predict different classes."""
    mine, base = (unpacked(runs[k]["classes"]) for k in (key, "nothing"))
    known = runs[key]["finite"] and runs["nothing"]["finite"]
    share = float((mine != base).mean()) if known else None
    words = "not measured: a training blew up" if share is None else f"{100 * share:.1f} %"
    question = (
        f"On how many test images does the run with {ROWS[key].name} differ from that with nothing varied?"
    )
    return Finding(Evidence(f"{APART}_{key}", question, share, None, None, words))
