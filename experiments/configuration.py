"""From Hydra's composed configuration to settings that were checked, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from driftlab.arm import DTYPES, ROLES
from driftlab.verdict import Verdict
from experiments.cores import seeds_at_once, threads_chosen
from experiments.errors import ConfigurationError, one_line
from experiments.outcome import in_sweep

CONF = Path(__file__).resolve().parent.parent / "conf"

# What does not change a seed's curves, and so is not part of the experiment's identity: seeds, paths,
# loggers, and how a run is carried out.
_NOT_IDENTITY = (
    *("seed", "results", "logger", "rerun", "fail_on", "checkpoint_every"),
    *("keep_checkpoint", "threads", "workers"),
    *("hypothesis", "question", "expected"),
)
_WHOLE_NUMBERS = {
    **{"steps": 1, "float64_steps": 1, "batch_size": 1, "eval_every": 0, "checkpoint_every": 0},
    "eval_images": 1,
}
_MAY_BE_NULL = ("eval_images",)


def scale_of_this_machine(device: str) -> DictConfig:
    """``scale=auto``: full on a GPU, small on a CPU, where the job runs."""
    gpu = device != "cpu" and torch.cuda.is_available()
    chosen = OmegaConf.load(CONF / "scale" / ("full.yaml" if gpu else "small.yaml"))
    chosen["why"] = f"auto: {'a GPU' if gpu else 'the CPU'} runs this job"
    return chosen


def register_resolvers() -> None:
    OmegaConf.register_new_resolver("scale_of_this_machine", scale_of_this_machine, replace=True)


def resolve(config: DictConfig) -> DictConfig:
    """Every interpolation replaced by its value, on this machine, and checked. Raises ConfigurationError."""
    register_resolvers()
    config = config.copy()
    config.device = chosen_device(config.device)
    try:
        _take_own_sizes(config)
        settings = OmegaConf.create(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"the configuration cannot be resolved: {one_line(error)}") from None
    settle_threads(settings)
    check_tf32(settings)
    _check_arms(settings)
    _check_numbers(settings)
    for key, least in (("dense", 1), ("per_decade", 0)):
        check_whole(f"log_schedule.{key}", settings.log_schedule[key], least)
    settings.float64_steps = min(settings.float64_steps, settings.steps)
    return settings


def _take_own_sizes(config: DictConfig) -> None:
    """What an experiment means by each scale (``sizes``), where it has sizes of its own."""
    OmegaConf.set_struct(config, False)
    own = config.pop("sizes", None)
    if own is None:
        return
    scale = OmegaConf.create(OmegaConf.to_container(config.scale, resolve=True))
    if scale.name not in own:
        raise ConfigurationError(f"scale={scale.name}: {config.name} has sizes for {', '.join(own)}")
    config.scale = OmegaConf.merge(scale, own[scale.name])


def digest(settings: DictConfig) -> str:
    """A short hash of the settings less seeds, paths and loggers; a seed that is set alone stays in."""
    identity = OmegaConf.to_container(settings)
    if "seeds" in identity:
        identity["seeds"] = {k: v for k, v in identity["seeds"].items() if v is not None}
    for key in _NOT_IDENTITY:
        identity.pop(key, None)
    for key in ("root", "time_limit"):
        identity.get("data", {}).pop(key, None)
    identity.get("scale", {}).pop("why", None)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]


def chosen_device(wanted: str) -> str:
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(f"device={wanted} is unknown: write auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device=cuda, but torch finds no CUDA device here: write device=cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def settle_threads(settings: DictConfig) -> None:
    """``threads`` and ``workers`` as numbers, for this machine. Raises ConfigurationError."""
    settings.threads = threads_chosen(settings.threads)
    if settings.threads is not None:
        check_whole("threads", settings.threads, 1)
    if settings.workers == "auto":
        settings.workers = 1 if in_sweep() else seeds_at_once(settings.threads, settings.device)
    check_whole("workers", settings.workers, 1)


def check_tf32(settings: DictConfig) -> None:
    """Raises ConfigurationError where TF32 is asked of a device without it: nothing would be measured."""
    if settings.tf32 and settings.device == "cpu":
        raise ConfigurationError("tf32=true: a CPU has no TF32; run it on a GPU, or write tf32=false")


def _check_arms(settings: DictConfig) -> None:
    check_choices({k: settings[k] for k in _CHOICES})
    if settings.subject not in (*settings.roles, "reference"):
        raise ConfigurationError(f"subject={settings.subject} is not among roles={list(settings.roles)}")
    if settings.subject == "candidate" and not settings.rewrite.target:
        raise ConfigurationError("rewrite.target is not set: write rewrite.target=package.module.function")


_CHOICES = {
    "dtypes": DTYPES,
    "roles": ROLES,
    "subject": ROLES,
    "fail_on": list(Verdict),
    "learning_rate_schedule": ("constant", "cosine"),
}


def check_choices(chosen: Mapping[str, object]) -> None:
    """Settings with a fixed list of values, one or several of them. Raises ConfigurationError."""
    for key, values in chosen.items():
        known = _CHOICES[key]
        values = [values] if isinstance(values, str) else values
        unknown = [v for v in values if v not in [str(k) for k in known]]
        if unknown:
            raise ConfigurationError(f"{key}: {unknown[0]} is unknown: choose from {', '.join(known)}")
        if not values and key != "fail_on":
            raise ConfigurationError(f"{key}=[] is empty: choose from {', '.join(known)}")


def _check_numbers(settings: DictConfig) -> None:
    for key, least in _WHOLE_NUMBERS.items():
        value = settings[key]
        if value is None and key in _MAY_BE_NULL:
            continue
        check_whole(key, value, least)


def check_whole(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{key}={value} must be a whole number of at least {least}")
