"""The networks of an experiment: the reference by config, the candidate by its rewrite, and the arms."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils import _pytree as pytree

from driftlab.arm import DTYPES, Arm, Fold, MakeOptimizer, MakeScheduler, grow, unfolded
from driftlab.copying import copied
from driftlab.fold import FoldError, find_fold
from driftlab.lockstep import evaluation_mode
from driftlab.subject import Subject
from experiments.data.images import Images
from experiments.errors import ConfigurationError, one_line

Rewrite = Callable[[nn.Module], nn.Module]


def build_reference(settings: DictConfig, images: Images, seed: int) -> nn.Module:
    """The network in float32 on the CPU, initialised from ``seed`` whatever its arms' device and dtype."""
    torch.manual_seed(seed)
    try:
        return hydra.utils.instantiate(settings.model, classes=len(images.classes))
    except Exception as error:
        raise ConfigurationError(f"model: {one_line(error.__cause__ or error)}") from None


def load_rewrite(settings: DictConfig) -> Rewrite:
    """The function that ``rewrite.target`` names, with those of ``rewrite.options`` that it takes."""
    target = settings.rewrite.target
    function = imported("rewrite.target", target)
    options = dict(settings.rewrite.options or {})
    accepted = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return partial(function, **options)
    # an experiment's options stay behind when another target takes the place of its own
    return partial(function, **{k: v for k, v in options.items() if k in accepted})


def imported(setting: str, target: str) -> Callable:
    """The function that a setting names. Raises ConfigurationError."""
    module_name, _, function_name = str(target).rpartition(".")
    if not module_name:
        raise ConfigurationError(f"{setting}={target}: write package.module.function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise ConfigurationError(f"{setting}={target} cannot be imported: {one_line(error)}") from None
    if not callable(function):
        raise ConfigurationError(f"{setting}={target} is a {type(function).__name__}, not a function")
    return function


def source_digest(target: str | None) -> str | None:
    """The SHA-256 of the file that holds a rewrite: an edited rewrite is another experiment."""
    if not target:
        return None
    try:
        source = Path(inspect.getsourcefile(inspect.unwrap(imported("rewrite.target", target)))).read_bytes()
    except (TypeError, OSError):
        return None
    return hashlib.sha256(source).hexdigest()[:12]


def apply_rewrite(rewrite: Rewrite, target: str, reference: nn.Module) -> nn.Module:
    """The candidate, from a deep copy of the reference. Raises ConfigurationError where there is none."""
    try:
        candidate = rewrite(copy.deepcopy(reference))
    except (MemoryError, torch.OutOfMemoryError):
        raise  # not the rewrite's fault: fewer seeds at a time may fit
    except Exception as error:
        raise ConfigurationError(f"rewrite.target={target} failed: {one_line(error)}") from None
    if not isinstance(candidate, nn.Module):
        got = type(candidate).__name__
        raise ConfigurationError(f"rewrite.target={target} returned a {got}: it must return an nn.Module")
    return candidate


def check_same_shapes(reference: nn.Module, candidate: nn.Module, inputs: torch.Tensor, target: str) -> None:
    """Both networks on one batch, in eval mode: one that fails or changes the shape is no rewrite."""
    with evaluation_mode(reference):
        wanted = pytree.tree_map_only(torch.Tensor, lambda t: tuple(t.shape), reference(inputs))
    try:
        with evaluation_mode(candidate):
            got = pytree.tree_map_only(torch.Tensor, lambda t: tuple(t.shape), candidate(inputs))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"rewrite.target={target}: its network fails on a batch: {one_line(error)}"
        ) from None
    if got != wanted:
        raise ConfigurationError(f"rewrite.target={target} changes the output's shape from {wanted} to {got}")


def build_arms(
    settings: DictConfig, images: Images, seeds: dict[str, int], inputs: torch.Tensor
) -> tuple[list[Arm], Subject | None]:
    """All arms of one seed on their device, and the pair that is judged, where there is a candidate.

    ``inputs`` is a float32 CPU batch to try the networks on.
    """
    reference = build_reference(settings, images, seeds["init"])
    subject = _subject(settings, reference, seeds["order"], inputs) if "candidate" in settings.roles else None
    arms = grow(
        reference,
        subject.candidate if subject else None,
        optimizer=make_optimizer(settings),
        horizons={d: settings.float64_steps if d == "float64" else settings.steps for d in settings.dtypes},
        roles=settings.roles,
        fold=fold_of(subject) if subject else unfolded,
        scheduler=make_scheduler(settings),
        nudge_seed=seeds["nudge"],
        device=settings.device,
        float64_candidate=subject is None or _runs_in_float64(subject.candidate, inputs),
    )
    if subject:
        subject.reference.to(settings.device)
        subject.candidate.to(settings.device)
    return arms, subject


def _subject(settings: DictConfig, reference: nn.Module, seed: int, inputs: torch.Tensor) -> Subject:
    target, rewrite = settings.rewrite.target, load_rewrite(settings)
    candidate = apply_rewrite(rewrite, target, reference)
    check_same_shapes(reference, candidate, inputs, target)
    return make_subject(settings, reference, candidate, rewrite, target, seed)


def make_subject(
    settings: DictConfig, reference: nn.Module, candidate: nn.Module, rewrite: Rewrite, target: str, seed: int
) -> Subject:
    """The pair with its fold, loss and optimizers. Raises ConfigurationError where no fold is found."""
    try:
        fold = find_fold(reference, candidate, rewrite)
    except FoldError as error:
        raise ConfigurationError(f"rewrite.target={target}: {one_line(error)}") from None
    make = make_optimizer(settings)

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return make(module.parameters())

    return Subject(reference, candidate, fold, F.cross_entropy, optimizer, optimizer, seed=seed)


def fold_of(subject: Subject) -> Fold:
    """Of what can be compared: less the weights that the candidate holds otherwise."""
    return subject.comparable if subject.written_otherwise else subject.fold


def make_arm(settings: DictConfig, role: str, dtype: str, network: nn.Module, horizon: int) -> Arm:
    """An arm of a copy of ``network``, on its device, compared with nothing yet."""
    module = copied(network).to(device=settings.device, dtype=DTYPES[dtype])
    optimizer, schedule = make_optimizer(settings)(module.parameters()), make_scheduler(settings)
    arm = Arm(role, dtype, module, optimizer, unfolded, horizon)
    arm.scheduler = schedule(optimizer, settings.steps) if schedule else None
    return arm


def _runs_in_float64(candidate: nn.Module, inputs: torch.Tensor) -> bool:
    try:
        wide = copy.deepcopy(candidate).double()
        with evaluation_mode(wide):
            wide(inputs.double())
    except Exception:  # whatever a stranger's forward raises
        return False
    return True


def make_optimizer(settings: DictConfig) -> MakeOptimizer:
    """From parameters to optimizer; what it refuses (a rate that is no number) is the user's to mend."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return hydra.utils.instantiate(settings.optimizer)(parameters)
        except Exception as error:
            raise ConfigurationError(f"optimizer: {one_line(error.__cause__ or error)}") from None

    return make


def make_scheduler(settings: DictConfig) -> MakeScheduler | None:
    """Makes an arm's learning-rate scheduler from its optimizer; None where the rate is constant."""
    if settings.learning_rate_schedule == "constant":
        return None
    return partial(_cosine, settings.steps)


def _cosine(steps: int, optimizer: torch.optim.Optimizer, _longest: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps)))
