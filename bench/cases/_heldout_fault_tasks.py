"""The tasks of the held-out faults; some batches differ in size, as those of real data do."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._heldout_fault_sequence import MaskedEncoder, Siamese, Tagger, Translator
from bench.cases._heldout_fault_tables import MixtureNet, Recommender
from bench.cases._heldout_fault_vision import VGG, Frozen, MobileNet, PreActNet, UNet
from bench.tasks import _classes, _task, _tokens_loss


def _images(n: int, channels: int, size: int, classes: int):
    return lambda: (torch.randn(n, channels, size, size), _classes(n, classes))


def _ragged_images() -> tuple[Tensor, Tensor]:
    n = int(torch.randint(12, 16, ()))
    return torch.randn(n, 2, 8, 8), _classes(n, 4)


def _segments() -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 2, 12, 12)
    return x, (F.avg_pool2d(x, 3, 1, 1).sum(1) * 2).clamp(-1, 1).round().long() + 1


def _sentence() -> tuple[Tensor, Tensor]:
    n, steps = int(torch.randint(5, 8, ())), int(torch.randint(6, 11, ()))
    return torch.randint(37, (n, steps)), torch.randint(5, (n, steps))


def _translation() -> tuple[tuple[Tensor, Tensor], Tensor]:
    target = torch.randint(31, (5, 8))
    return (torch.randint(31, (5, 9)), target[:, :7]), target[:, 1:]


def _masked() -> tuple[dict[str, Tensor], Tensor]:
    lengths = torch.randint(2, 9, (9, 1))
    mask = torch.arange(8) < lengths
    return {"tokens": torch.randint(41, (9, 8)), "mask": mask}, _classes(9, 4)


def _signals() -> tuple[tuple[Tensor, Tensor], Tensor]:
    left, same = torch.randn(13, 2, 9), _classes(13, 2)
    return (
        left,
        torch.where(same[:, None, None] > 0, left + 0.3 * torch.randn(13, 2, 9), torch.randn(13, 2, 9)),
    ), same


def _ratings() -> tuple[dict[str, Tensor], Tensor]:
    history = torch.randint(1, 90, (10, 6)) * (torch.arange(6) < torch.randint(0, 40, (10, 1)))
    return {"user": _classes(10, 150), "item": _classes(10, 90), "history": history}, torch.randn(10)


preact = _task("preact", PreActNet, _images(10, 3, 12, 5))
rezero = _task("rezero", lambda: PreActNet(gain=0.0), _images(10, 3, 12, 5))
mobile = _task("mobile", MobileNet, _images(10, 3, 12, 6))
droppath = _task("droppath", lambda: MobileNet(drop=0.2), _images(10, 3, 12, 6))
unet = _task("unet", UNet, _segments)
vgg = _task("vgg", VGG, _ragged_images)
frozen = _task("frozen", Frozen, _images(11, 3, 12, 4))
tagger = _task("tagger", Tagger, _sentence, _tokens_loss)
translator = _task("translator", Translator, _translation, _tokens_loss)
masked = _task("masked", MaskedEncoder, _masked)
dropout_masked = _task("dropout_masked", lambda: MaskedEncoder(p=0.1), _masked)
siamese = _task("siamese", Siamese, _signals)
dropout_siamese = _task("dropout_siamese", lambda: Siamese(p=0.2, norm=partial(nn.GroupNorm, 2)), _signals)
recommender = _task("recommender", Recommender, _ratings, F.mse_loss)
mixture = _task("mixture", MixtureNet, lambda: (torch.randn(24, 10), _classes(24, 5)))
