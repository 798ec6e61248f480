"""Right, but suspicious: other results besides, other containers, counters, leftovers, missing gradients."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_images import Transfer, UNet, transfer, unet
from experiments.calibration.cases._heldout_sequences import MaskedEncoder, masked_encoder, tagger
from experiments.calibration.cases._heldout_tables import Codebook, Regression, codebook, regression
from experiments.calibration.cases._heldout_tasks import ConvNext, PreActNet, convnext, preact
from experiments.calibration.cases._lowbits import recast

EQUAL = ("bit_identical", "round_off")
Normal = namedtuple("Normal", ["mean", "log_variance"])


@case(EQUAL, "no graph for what is frozen", on=transfer)
def backbone_without_a_graph(model: nn.Module) -> nn.Module:
    """The frozen backbone runs under ``no_grad``: no weight before the head is trained."""

    class NoGrad(Transfer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.backbone(x)
            return self.fc2(torch.tanh(self.fc1(features.mean((2, 3)))))

    return recast(model, "", NoGrad)


@case(EQUAL, "more results", on=codebook)
def chosen_codes_returned_as_well(model: nn.Module) -> nn.Module:
    """The dict of results holds the indices of the codes and how often each was used, besides."""

    class Reporting(Codebook):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            results = super().forward(x)
            with torch.no_grad():
                chosen = self.nearest(self.encode(x))
            return results | {"codes": chosen, "usage": chosen.bincount(minlength=8) / len(x)}

    return recast(model, "", Reporting)


@case(EQUAL, "another container", on=codebook)
def results_in_an_ordered_dict(model: nn.Module) -> nn.Module:
    """The same results under the same keys, the last first."""

    class Ordered(Codebook):
        def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
            return OrderedDict(reversed(super().forward(x).items()))

    return recast(model, "", Ordered)


@case(EQUAL, "another container", on=regression)
def results_in_a_named_tuple(model: nn.Module) -> nn.Module:
    """Mean and variance have names; the layers are declared in the opposite order."""

    class Named(nn.Module):
        def __init__(self, model: Regression):
            super().__init__()
            for name, child in reversed(list(model.named_children())):
                self.add_module(name, child)
            for name, buffer in reversed(list(model.named_buffers())):
                self.register_buffer(name, buffer.clone())

        def forward(self, x: Tensor) -> Normal:
            return Normal(*Regression.forward(self, x))

    return Named(model)


@case(EQUAL, "wrapped", on=masked_encoder)
def network_inside_a_wrapper(model: nn.Module) -> nn.Module:
    """All names get a prefix, arguments are passed by name; tokens come as 32-bit, the mask as a number."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

        def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
            named["tokens"], named["segments"] = named["tokens"].int(), named["segments"].int()
            return self.module(*inputs, **(named | {"mask": named["mask"].float().bool()}))

    return Wrapper(model)


@case(EQUAL, "another buffer", on=unet)
def calls_counted_in_buffers(model: nn.Module) -> nn.Module:
    """Two buffers that no result depends on: how many images were seen, and their mean."""

    class Counting(UNet):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += len(x)
                self.average.lerp_(x.detach().mean(), 0.01)
            return super().forward(x)

    model.register_buffer("seen", torch.zeros((), dtype=torch.long))
    model.register_buffer("average", torch.zeros(()))
    return recast(model, "", Counting)


@case(EQUAL, "weights left over", on=convnext, optimizer=partial(AdamW, lr=2e-3, weight_decay=0.1))
def old_head_kept_for_old_checkpoints(model: nn.Module) -> nn.Module:
    """The head of another data set stays, never called; without a gradient the optimizer leaves it alone."""

    class TwoHeads(ConvNext):
        def forward(self, x: Tensor) -> Tensor:
            features = self.norm(self.blocks(self.stem(x)).mean((2, 3)))
            return (self.head if self.current == "new" else self.old_head)(features)

    model.old_head, model.current = nn.Linear(12, 100), "new"
    return recast(model, "", TwoHeads)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by ``factor``."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@case(EQUAL, "gradient scaled and scaled back", on=tagger)
def gradients_scaled_inside(model: nn.Module) -> nn.Module:
    """Gradients run through the last layer 1024 times too large; its weights and its input see them right."""

    class ScaledLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x, weight, bias = (_Scaled.apply(t, 1 / 1024) for t in (x, self.weight, self.bias))
            return _Scaled.apply(F.linear(x, weight, bias), 1024.0)

    return recast(model, "fc", ScaledLinear)


@case(("round_off", "bit_identical"), "row that is zero anyway", on=tagger)
def padding_cut_to_zero(model: nn.Module) -> nn.Module:
    """The padding's row, zero and never trained, is multiplied by zero instead of being an exception."""

    class Zeroed(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.embedding(tokens, self.weight) * tokens.ne(0).unsqueeze(-1)

    return recast(model, "embed", Zeroed)


@case(EQUAL, "checkpointing", on=preact)
def block_checkpointed_the_old_way(model: nn.Module) -> nn.Module:
    """A block is run without a graph and again in the backward pass, by the reentrant checkpoint."""

    class Reentrant(PreActNet):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.block2, self.block1(self.stem(x)), use_reentrant=True)
            return self.fc(F.relu(self.norm(x)).mean((2, 3)))

    return recast(model, "", Reentrant)


@case(EQUAL, "result in another memory order", on=masked_encoder)
def scores_with_other_strides(model: nn.Module) -> nn.Module:
    """The scores come as a view into a larger tensor, and the hidden states as copies of copies."""

    class Strided(MaskedEncoder):
        def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
            scores = super().forward(tokens.clone(), mask.contiguous().clone(), segments)
            room = scores.new_zeros(scores.shape[1], 2 * scores.shape[0])
            room[:, ::2] = scores.T
            return room[:, ::2].T

    return recast(model, "", Strided)
