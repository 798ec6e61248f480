"""Capsules: parts of a picture vote for what they belong to, by turns, and the winner draws it again."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import Stats, right, tapped
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

KINDS, SIZE = 3, 6


class Squash(nn.Module):
    """Short vectors nearly to nothing, long ones nearly to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-6).sqrt()


class Primary(nn.Module):
    """[N, C, H, W] -> capsules [N, types H W, size]."""

    def __init__(self, channels: int, types: int, size: int):
        super().__init__()
        self.types, self.size = types, size
        self.conv = nn.Conv2d(channels, types * size, 3, stride=2, padding=1)
        self.squash = Squash()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).unflatten(1, (self.types, self.size))
        return self.squash(x.movedim(2, -1).flatten(1, 3))


class Digits(nn.Module):
    """Capsules [N, P, C] -> one for each kind [N, K, D]; only the last turn's votes carry a gradient."""

    def __init__(self, parts: int, before: int, after: int, turns: int = 3):
        super().__init__()
        self.turns, self.squash = turns, Squash()
        self.weight = nn.Parameter(1.5 * torch.randn(KINDS, parts, after, before))

    def forward(self, parts: Tensor) -> Tensor:
        votes = (self.weight @ parts[:, None, ..., None]).squeeze(-1)
        held = votes.detach()
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(self.turns - 1):
            found = self.squash((logits.softmax(1)[..., None] * held).sum(2))
            logits = logits + (held * found[:, :, None]).sum(-1)
        return self.squash((logits.softmax(1)[..., None] * votes).sum(2))


class Mask(nn.Module):
    """All but one capsule become zeros: the label's while it learns, the longest afterwards."""

    def forward(self, digits: Tensor, labels: Tensor) -> Tensor:
        if not self.training:
            labels = digits.norm(dim=-1).argmax(1)
        return (digits * F.one_hot(labels, KINDS)[..., None]).flatten(1)


class Capsules(nn.Module):
    """Pictures [N, 1, 6, 6] and labels [N] -> the lengths [N, 3] and the pictures drawn again [N, 36]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.primary, self.digits = Primary(6, 3, 4), Digits(27, 4, 5)
        self.mask = Mask()
        self.decode = nn.Sequential(nn.Linear(15, 20), nn.ReLU(), nn.Linear(20, SIZE**2), nn.Sigmoid())

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        digits = self.digits(self.primary(self.stem(x)))
        return {"lengths": digits.norm(dim=-1), "drawn": self.decode(self.mask(digits, labels))}


def _bars() -> tuple[dict[str, Tensor], Tensor]:
    """A row, a column or a diagonal in noise; the target is the kind, then the picture."""
    labels, x = torch.randint(KINDS, (12,)), 0.3 * torch.rand(12, 1, SIZE, SIZE)
    for picture, label in zip(x[:, 0], labels, strict=True):
        at = int(torch.randint(SIZE, ()))
        (picture[at], picture[:, at], picture.roll(at, 0).diagonal())[label].add_(0.7)
    target = torch.cat([F.one_hot(labels, KINDS), x.flatten(1)], 1)
    return {"x": x, "labels": labels}, target


def _margins(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """Margins of the lengths, and the squared error of the pictures."""
    lengths, true, drawn = outputs["lengths"], target[:, :KINDS], target[:, KINDS:]
    margins = true * F.relu(0.9 - lengths).square() + 0.5 * (1 - true) * F.relu(lengths - 0.1).square()
    return margins.sum(1).mean() + 0.5 * F.mse_loss(outputs["drawn"], drawn.to(lengths))


capsules = few("seventh_capsules", Capsules, _bars, _margins)


def shortened(x: Tensor) -> Tensor:
    length = (x * x).sum(-1, keepdim=True)
    return x * (length * (length + 1e-6).rsqrt() / (length + 1))


class VotesInOneProduct(Port):
    """Channels last; all votes of a part from one matrix, parts before kinds."""

    def take(self, model: Capsules) -> None:
        conv, norm, _ = model.stem
        self.look, self.look_shift, self.stats = leaf(conv.weight), leaf(conv.bias), Stats(norm)
        self.part, self.part_shift = leaf(model.primary.conv.weight), leaf(model.primary.conv.bias)
        self.vote = leaf(model.digits.weight.permute(1, 3, 0, 2).flatten(2))
        self.draw = nn.ParameterList(leaf(w.T) for w in (model.decode[0].weight, model.decode[2].weight))
        self.draw_shift = nn.ParameterList(leaf(model.decode[i].bias) for i in (0, 2))

    def parts(self, x: Tensor) -> Tensor:
        x = self.stats(tapped(x.movedim(1, -1), self.look) + self.look_shift).relu()
        x = tapped(x, self.part, stride=2) + self.part_shift
        if self.fault == "types_and_sizes_in_the_other_order":
            return shortened(x.unflatten(3, (4, 3)).permute(0, 4, 1, 2, 3).reshape(len(x), -1, 4))
        return shortened(x.unflatten(3, (3, 4)).permute(0, 3, 1, 2, 4).reshape(len(x), -1, 4))

    def agreed(self, votes: Tensor) -> Tensor:
        """Votes [N, P, K, D] -> capsules [N, K, D]."""
        rest = votes if self.fault == "every_turn_carries_a_gradient" else votes.detach()
        heights = torch.zeros_like(rest[..., 0])
        for _ in range(2):
            found = shortened(torch.einsum("npk,npkd->nkd", heights.softmax(2), rest))
            agreement = torch.einsum("npkd,nkd->npk", rest, found)
            heights = agreement if self.fault == "agreement_of_the_last_turn_alone" else heights + agreement
        return shortened(torch.einsum("npk,npkd->nkd", heights.softmax(2), votes))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        votes = torch.einsum("npc,pcv->npv", self.parts(x), self.vote).unflatten(2, (KINDS, 5))
        digits = self.agreed(votes)
        lengths = (digits * digits).sum(2).sqrt()
        by_label = self.training or self.fault == "the_label_draws_in_eval"
        shown = labels if by_label else lengths.argmax(1)
        chosen = digits[torch.arange(len(x), device=x.device), shown]
        rows = self.draw[0].unflatten(0, (KINDS, 5))[shown]
        h = ((chosen[:, None] @ rows).squeeze(1) + self.draw_shift[0]).relu()
        return {"lengths": lengths, "drawn": torch.sigmoid(h @ self.draw[1] + self.draw_shift[1])}


right(
    capsules, "capsules_with_parts_before_kinds", "all votes in one product, channels last", VotesInOneProduct
)
wrong(
    capsules,
    VotesInOneProduct,
    types_and_sizes_in_the_other_order=("swapped axes of a reshape", "primary"),
    agreement_of_the_last_turn_alone=("a sum that is not kept", "digits"),
    every_turn_carries_a_gradient=("a detach too few", "digits", ("input gradient", "weight gradient")),
    the_label_draws_in_eval=("wrong in eval mode alone", "mask", "eval"),
)
