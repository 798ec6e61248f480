"""True rewrites of the update, and of networks under other optimizers than plain SGD."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.optim import Adagrad, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LinearLR

from bench.case import case
from bench.cases._heldout_images import fine_tuned, transfer, unet
from bench.cases._heldout_optimizers import (
    CenteredRMSprop,
    ClippedSGD,
    DecayingAdagrad,
    FlatAdamW,
    Lion,
    MasterSGD,
    NesterovByLookahead,
    WarmSGD,
)
from bench.cases._heldout_sequences import masked_encoder, seq2seq, temporal
from bench.cases._heldout_tables import recommender
from bench.cases._heldout_tasks import convnext, mobile, preact, vgg
from bench.cases._rewritten import SAME, rewritten
from bench.cases.heldout_rewrites_convnext import _ChannelsFirst, _Patches
from bench.cases.heldout_rewrites_cross import _Heads
from bench.cases.heldout_rewrites_frozen import _FrozenNorm
from bench.cases.heldout_rewrites_masked import _FloatMask
from bench.cases.heldout_rewrites_preact import _FlatPreAct
from bench.cases.heldout_rewrites_tables import _OneTable
from bench.optimizers import UsualSGD, of, sgd

EQUAL = ("bit_identical", "round_off")
adamw = partial(AdamW, lr=3e-3, weight_decay=0.05)


@case(SAME, "clipping by the global norm", on=seq2seq, optimizer=ClippedSGD)
def heads_apart_under_global_clipping(model: nn.Module) -> nn.Module:
    """Attention in modules by head; the norm of all gradients together does not see how they are cut."""
    return rewritten(model, "attention", _Heads)


SETTINGS = {"lr": 1e-3, "alpha": 0.95, "momentum": 0.5}
RMSPROP = {
    "optimizer": partial(RMSprop, **SETTINGS, centered=True),
    "candidate_optimizer": of(CenteredRMSprop, **SETTINGS),
}


@case(SAME, "optimizer by hand", on=temporal, **RMSPROP)
def centered_rmsprop_by_hand(model: nn.Module) -> nn.Module:
    """RMSprop with mean and momentum written out; the network is as it was."""
    return model


RATES = {"lr": 0.05, "lr_decay": 0.01}
ADAGRAD = {"optimizer": partial(Adagrad, **RATES), "candidate_optimizer": of(DecayingAdagrad, **RATES)}


@case(SAME, "optimizer by hand", on=recommender, **ADAGRAD)
def joined_tables_under_adagrad(model: nn.Module) -> nn.Module:
    """Adagrad by hand on embeddings that are joined in one table; rows that are not met stay."""
    return _OneTable(model)


@case(SAME, "rewrite trained by NAdam", on=convnext, optimizer=partial(NAdam, lr=2e-3, foreach=False))
def channels_first_under_nadam(model: nn.Module) -> nn.Module:
    """The block whose weights have other shapes, under NAdam."""
    return rewritten(model, "blocks.0", _ChannelsFirst)


NESTEROV = {
    "optimizer": sgd(0.05, weight_decay=1e-3, nesterov=True),
    "candidate_optimizer": of(NesterovByLookahead, lr=0.05, momentum=0.9, decay=1e-3),
}


@case(SAME, "optimizer by hand", on=vgg, **NESTEROV)
def nesterov_momentum_by_hand(model: nn.Module) -> nn.Module:
    """Nesterov's momentum with decay, of a network with dropout."""
    return model


FLAT = {"optimizer": adamw, "candidate_optimizer": of(FlatAdamW, lr=3e-3, decay=0.05)}


@case(SAME, "all weights in one vector", on=preact, **FLAT)
def adamw_on_one_long_vector(model: nn.Module) -> nn.Module:
    """AdamW steps on all weights at once, of a network without modules."""
    return _FlatPreAct(model)


@case(EQUAL, "master copies", on=unet, candidate_optimizer=of(MasterSGD))
def weights_copied_from_masters(model: nn.Module) -> nn.Module:
    """The optimizer keeps weights of its own and copies them into the network."""
    return model


def _decay_matrices(params) -> Optimizer:
    params = list(params)
    vectors = [p for p in params if p.squeeze().ndim < 2]
    matrices = [p for p in params if p.squeeze().ndim > 1]
    return AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3, weight_decay=0.1)


def _decay_by_name(model: nn.Module) -> Optimizer:
    spared, decayed = [], []
    for name, p in model.named_parameters():
        plain = name.endswith(("bias", "gamma", "layer_scale")) or name in ("norm.weight", "blocks.1.weight")
        (spared if plain or "norm" in name else decayed).append(p)
    return AdamW([{"params": spared, "weight_decay": 0.0}, {"params": decayed}], lr=3e-3, weight_decay=0.1)


@case(SAME, "groups by name", on=convnext, optimizer=_decay_matrices, candidate_optimizer=_decay_by_name)
def decay_by_name_for_other_shapes(model: nn.Module) -> nn.Module:
    """Norms, scales and biases are spared from decay by their names; in a rewritten block they are 3-D."""
    return rewritten(rewritten(model, "blocks.1", _ChannelsFirst), "stem", _Patches)


@case("round_off", "sign of a vanishing gradient", on=masked_encoder, optimizer=partial(Lion, lr=1e-3))
def keys_bias_under_lion(model: nn.Module) -> nn.Module:
    """The keys' bias has a gradient of rounding alone, whose sign Lion follows; softmax does not see it."""
    return _FloatMask(model)


@case(SAME, "rewrite trained by Lion", on=fine_tuned, optimizer=partial(Lion, lr=1e-3))
def frozen_norms_under_lion(model: nn.Module) -> nn.Module:
    """Norms with frozen statistics by hand, under steps of one size."""
    return rewritten(rewritten(model, "bn1", _FrozenNorm), "bn2", _FrozenNorm)


def _scheduled(model: nn.Module) -> Optimizer:
    """SGD that steps its own scheduler."""

    class Scheduled(UsualSGD):
        def step(self, closure=None) -> None:
            super().step(closure)
            schedule.step()

    optimizer = Scheduled(model.parameters())
    schedule = LinearLR(optimizer, start_factor=0.1, total_iters=10)
    return optimizer


@case(SAME, "schedule by the library", on=mobile, optimizer=WarmSGD, candidate_optimizer=_scheduled)
def warm_up_by_a_scheduler(model: nn.Module) -> nn.Module:
    """The rate's rise comes from the library's scheduler instead of a formula."""
    return model


HEAD = partial(AdamW, lr=1e-2, weight_decay=0.1)


def _head_alone(model: nn.Module) -> Optimizer:
    return HEAD([p for p in model.parameters() if p.requires_grad])


@case(EQUAL, "optimizer without what is frozen", transfer, optimizer=HEAD, candidate_optimizer=_head_alone)
def frozen_weights_not_in_the_optimizer(model: nn.Module) -> nn.Module:
    """The optimizer is given the head alone; it did nothing to the frozen weights before."""
    return model
