"""What one seed of ``one_bit`` gives: a run of every row, and plain and split side by side, for a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from driftlab.calling import whole
from driftlab.diagnosis import diagnosed
from driftlab.pair import the_pair
from driftlab.records import SeedRecord
from driftlab.subject import Subject
from driftlab.verdict import Evidence, Finding
from experiments.configuration import check_whole
from experiments.data.batches import Batches
from experiments.data.images import Images
from experiments.errors import ConfigurationError
from experiments.networks import build_reference
from experiments.questions.one_bit.packing import packed, unpacked
from experiments.questions.one_bit.rows import ROWS, Row, network_of, seeds_of, split_by_chance
from experiments.questions.one_bit.training import as_seen, laid_out, make_groups, trained
from experiments.questions.question import Measured
from experiments.seed_run import make_batches

APART = "apart_from_base"  # the probes that hold how far a run is from the one with nothing varied,
BASE_WEIGHTS = "base_weights"  # and where that one ends


def about(settings: DictConfig) -> str:
    """Raises ConfigurationError where a setting of this experiment is not what it should be."""
    check_whole("warmup_steps", settings.warmup_steps, 0)
    check_whole("shrink", settings.shrink, 1)
    _check("progress", settings.get("progress"), ("points", "images"))
    check_whole("progress.points", settings.progress.points, 1)
    check_whole("progress.images", settings.progress.images, 1)
    _check("window", settings.get("window"), ("steps", "learning_rate"))
    check_whole("window.steps", settings.window.steps, 1)
    for name, rate in (
        ("window.learning_rate", settings.window.learning_rate),
        ("norm_rate", settings.norm_rate),
    ):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise ConfigurationError(f"{name}={rate} must be a finite number above 0")
    return f"{len(ROWS)} trainings of {settings.steps:,} updates a seed, each with another thing varied"


def _check(name: str, given: object, keys: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping) or set(given) != set(keys):
        raise ConfigurationError(f"{name}={given} must hold {' and '.join(keys)}, and nothing else")


def measure(settings: DictConfig, seed: int, images: Images) -> Measured:
    """Raises ConfigurationError where the network or the optimizer cannot be made."""
    with torch.random.fork_rng():
        runs = {key: _run(row, settings, seed, images) for key, row in ROWS.items()}
        record = _pair(settings, seed, images)
    labels = images.test_labels[: settings.eval_images].numpy()
    values = {"rows": runs, "labels": packed(labels, "i2"), "train_images": len(images.train_images)}
    probes = [_base(runs).as_dict(), *(_apart(key, runs).as_dict() for key in ("split", "one_ulp"))]
    run = record.run | {"probes": record.run["probes"] + probes}
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
    rate = settings.window.learning_rate

    def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
        return make_groups(settings, module, rate)

    batches = _window(settings, make_batches(settings, images, seeds))
    subject = Subject(mine, theirs, fold, F.cross_entropy, optimizer, optimizer, whole, seed)
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
