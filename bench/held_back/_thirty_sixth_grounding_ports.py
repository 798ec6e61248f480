"""What both ports of a small Grounding DINO compute alike."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.held_back import _thirty_sixth_grounding as made
from bench.held_back._sixth_ports import few

task = few("thirty_sixth_grounding", made.GroundingDINO, made.phrases, made.logits_and_boxes)
SHAPES, H, P, L = made.SHAPES, 2, 3, 2


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, seen: Tensor | None = None) -> Tensor:
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    like = torch.einsum("nqhd,nkhd->nqkh", q, k) / math.sqrt(q.shape[-1])
    if seen is not None:
        like = like + torch.where(seen, 0.0, float("-inf")).to(like)[..., None]
    return torch.einsum("nqkh,nkhd->nqhd", like.softmax(2), v).flatten(2)


def sines(x: Tensor, width: int, base: float) -> Tensor:
    angle = x[..., None] * torch.exp(-math.log(base) * torch.arange(0, width, 2).to(x) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def phrase(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Who sees whom, and the place in a phrase: a phrase starts after a special word."""
    start, index = F.pad((ids > 0) & (ids < 4), (1, -1), value=True) | (ids == 0), torch.arange(ids.shape[1])
    first = torch.where(start, index.to(ids), 0).cummax(1)[0]
    return first[:, :, None] == first[:, None], index.to(ids) - first


def spots(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all levels: sines, middles and the logits of first boxes."""
    found = []
    for i, (h, w) in enumerate(SHAPES):
        y, z = (k.flatten() for k in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
        waves = [sines((k + 1).to(x) * math.tau / (n + 1e-6), 8, 20) for k, n in ((y, h), (z, w))]
        middle = torch.stack([(z.to(x) + 0.5) / w, (y.to(x) + 0.5) / h], 1)
        first = torch.cat([middle, torch.full_like(middle, 0.05 * 2**i)], 1)
        found.append((torch.cat(waves, 1), middle, torch.log(first / (1 - first))))
    return tuple(torch.cat(k) for k in zip(*found, strict=True))


def likeness(x: Tensor, text: Tensor, seen: Tensor) -> Tensor:
    like = torch.where(seen[:, None], torch.einsum("nqd,ntd->nqt", x, text), made.LOW)
    return torch.cat([like, like.new_full((*like.shape[:2], made.LONGEST - made.LONG), made.LOW)], 2)


def choose(like: Tensor, box: Tensor) -> tuple[Tensor, Tensor]:
    best, row = like.amax(2).topk(made.QUERIES).indices, torch.arange(len(like))[:, None]
    return like[row, best], box[row, best].sigmoid()
