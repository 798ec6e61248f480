"""The networks of an experiment: the reference by config, the candidate by its rewrite, and the arms."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import hydra
import hydra.errors
import torch
from omegaconf import DictConfig
from torch import nn
from torch.utils import _pytree as pytree

from driftlab.blame import described
from driftlab.fold import FoldError, find_fold
from driftlab.lockstep.arm import Arm, grow, unfolded
from driftlab.lockstep.arm import make_arm as arm_of
from driftlab.lockstep.control import ONE_WEIGHT
from driftlab.network.calling import calling, cast, evaluation_mode
from driftlab.network.pair import Pair
from driftlab.precision import FLOAT32, PRECISIONS, Precision
from driftlab.process import REWRITE, noticed
from driftlab.words import DiagnoseError
from suite.command.command_line import instead
from suite.command.configuration import steps_in
from suite.command.errors import ConfigurationError, one_line
from suite.command.users_code import let_end
from suite.data.samples import DataSet
from suite.running.importing import class_count, imported, parameters
from suite.running.updates import make_clip, make_loss, make_optimizer, make_scheduler

Rewrite = Callable[[nn.Module], nn.Module]


def build_reference(settings: DictConfig, data_set: DataSet, seed: int) -> nn.Module:
    """The network in float32 on the CPU, initialised from ``seed`` whatever its arms' device and dtype."""
    name = class_count(imported("model._target_", settings.model._target_))
    try:
        with noticed("the model"):
            model = _made(settings, seed, {name: len(data_set.classes)} if name and data_set.classes else {})
    except BaseException as error:
        let_end(error)
        said = described(error.__cause__ or error, 200) + _meant(settings.model._target_, error.__cause__)
        raise ConfigurationError(f"model: {said}") from None
    if not isinstance(model, nn.Module):
        got = f"model._target_={settings.model._target_} made a {type(model).__name__}"
        raise ConfigurationError(f"{got}: name a class of networks, or a function that returns one")
    return model


def _made(settings: DictConfig, seed: int, counts: dict[str, int]) -> object:
    """The network from its initial seed; without ``counts`` where it takes any keyword but that."""
    torch.manual_seed(seed)
    try:
        return hydra.utils.instantiate(settings.model, **counts, _convert_="all")
    except hydra.errors.InstantiationException as error:
        unknown = next((f"unexpected keyword argument '{name}'" for name in counts), None)
        if unknown is None or unknown not in str(error.__cause__):
            raise
    return _made(settings, seed, {})


def _meant(target: str, error: BaseException | None) -> str:
    """The nearest argument of the class that a function of any keyword hands a misspelt one to."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    module = sys.modules[imported("model._target_", target).__module__]
    if found is None or (made := getattr(module, found[1], None)) is None:
        return ""
    return f": {instead(found[2], [*(parameters(made) or [])])}"


def load_rewrite(settings: DictConfig) -> Rewrite:
    """The function that ``rewrite.target`` names, with those of ``rewrite.options`` that it takes."""
    target = settings.rewrite.target
    function = imported("rewrite.target", target)
    options = dict(settings.rewrite.options or {})
    accepted = parameters(function)
    if accepted is None or any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return partial(function, **options)
    # an experiment's options stay behind when another target takes the place of its own
    return partial(function, **{k: v for k, v in options.items() if k in accepted})


def apply_rewrite(rewrite: Rewrite, target: str, reference: nn.Module) -> nn.Module:
    """The candidate, from a deep copy of the reference. Raises ConfigurationError where there is none."""
    try:
        candidate = rewrite(copy.deepcopy(reference))
    except BaseException as error:
        let_end(error)
        raise ConfigurationError(f"rewrite.target={target} failed: {described(error, 200)}") from None
    if not isinstance(candidate, nn.Module):
        got = type(candidate).__name__
        raise ConfigurationError(f"rewrite.target={target} returned a {got}: it must return an nn.Module")
    return candidate


def check_same_shapes(reference: nn.Module, candidate: nn.Module, inputs: object, target: str) -> None:
    """Both networks on one batch, in eval mode: one that fails or changes the shape is no rewrite."""
    call = calling(reference, inputs)
    with evaluation_mode(reference):
        wanted = pytree.tree_map_only(torch.Tensor, lambda t: tuple(t.shape), call(reference, inputs))
    try:
        with evaluation_mode(candidate):
            got = pytree.tree_map_only(torch.Tensor, lambda t: tuple(t.shape), call(candidate, inputs))
    except BaseException as error:
        let_end(error)
        raise ConfigurationError(
            f"rewrite.target={target}: its network fails on a batch: {described(error, 200)}"
        ) from None
    if got != wanted:
        raise ConfigurationError(f"rewrite.target={target} changes the output's shape from {wanted} to {got}")


def build_arms(
    settings: DictConfig, data_set: DataSet, seeds: dict[str, int], inputs: object
) -> tuple[list[Arm], Pair | None]:
    """All arms of one seed on their device, and the pair that is judged, where there is a candidate.

    ``inputs`` are those of a float32 CPU batch to try the networks on.
    """
    reference = build_reference(settings, data_set, seeds["init"])
    pair = _rewritten(settings, reference, seeds["order"], inputs) if "candidate" in settings.roles else None
    arms = grow(
        reference,
        pair.candidate if pair else None,
        optimizer=_of_module(settings),
        horizons={d: steps_in(settings, d) for d in settings.dtypes},
        controls=[ONE_WEIGHT] if "control" in settings.roles else [],
        fold=pair.comparable if pair else unfolded,
        scheduler=make_scheduler(settings),
        clip=make_clip(settings),
        nudge_seed=seeds["nudge"],
        device=settings.device,
        float64_candidate=pair is None or _runs_in_float64(pair.candidate, inputs),
    )
    if pair:
        pair.reference.to(settings.device)
        pair.candidate.to(settings.device)
    return arms, pair and pair.as_held()


def _rewritten(settings: DictConfig, reference: nn.Module, seed: int, inputs: object) -> Pair:
    target, rewrite = settings.rewrite.target, load_rewrite(settings)
    with noticed(REWRITE):
        candidate = apply_rewrite(rewrite, target, reference)
    check_same_shapes(reference, candidate, inputs, target)
    pair = make_pair(settings, reference, candidate, rewrite, target, seed)
    return replace(pair, call=calling(reference, inputs))


def make_pair(
    settings: DictConfig, reference: nn.Module, candidate: nn.Module, rewrite: Rewrite, target: str, seed: int
) -> Pair:
    """The pair with its fold, loss and optimizers. Raises ConfigurationError where no fold is found."""
    try:
        with noticed("another run of the rewrite"):  # which finds the fold
            fold = find_fold(reference, candidate, rewrite)
        optimizer = _of_module(settings)
        loss, clip = make_loss(settings), make_clip(settings)
        own = {"precision": (run_in := probed_in(settings)), "judged": run_in.name}
        return Pair(reference, candidate, fold, loss, optimizer, optimizer, seed=seed, clip=clip, **own)
    except (FoldError, DiagnoseError) as error:
        raise ConfigurationError(f"rewrite.target={target}: {one_line(error)}") from None


def probed_in(settings: DictConfig) -> Precision:
    """In which probes and local windows ask of the code: the first of 16 bits that arms train in.

    A mixed one before one that holds weights in 16 bits: more trainings run in it.
    """
    in_16_bits = [found for d in settings.dtypes if (found := PRECISIONS[d]).in_16_bits]
    return next((p for p in in_16_bits if p.autocast), next(iter(in_16_bits), FLOAT32))


def make_arm(settings: DictConfig, role: str, dtype: str, network: nn.Module, horizon: int) -> Arm:
    """An arm of a copy of ``network``, on its device, compared with nothing yet."""
    own = {"scheduler": make_scheduler(settings), "clip": make_clip(settings), "device": settings.device}
    return arm_of(role, dtype, network, _of_module(settings), horizon, **own)


def _of_module(settings: DictConfig) -> Callable[[nn.Module], torch.optim.Optimizer]:
    make = make_optimizer(settings)
    return lambda module: make(module.parameters())


def _runs_in_float64(candidate: nn.Module, inputs: object) -> bool:
    try:
        wide = copy.deepcopy(candidate).double()
        with evaluation_mode(wide):
            calling(wide, inputs)(wide, cast(inputs, torch.float64))
    except BaseException as error:  # whatever a stranger's forward raises
        let_end(error)
        return False
    return True
