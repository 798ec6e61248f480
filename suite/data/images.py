"""What a data set is once it is loaded: images, labels, and what identifies them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DataError(ValueError):
    """A data set cannot be had as asked; the message is one line, fit to be shown to the user as it is."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


class UnobtainableError(DataError):
    """The data set is neither on disk nor to be had from outside; nothing that is on disk is wrong.

    ``reason`` says why without naming any folder of this machine, so it can stand in a record.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Images:
    """A labelled image data set, whole and in memory (on the CPU).

    train_images, test_images: uint8 [N, 3, H, W], channels in the order red, green, blue.
    train_labels, test_labels: int64 [N], indices into ``classes``.
    sha256: ``fingerprint`` of the four tensors, which identifies the data set wherever it came from.
    source: where it came from, in words.
    stand_in: whether it stands in for the real data set that was wanted.
    """

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    sha256: str
    source: str
    stand_in: bool

    @property
    def train_count(self) -> int:
        return len(self.train_images)

    @property
    def test_count(self) -> int:
        return len(self.test_images)


def fingerprint(
    train_images: torch.Tensor,
    train_labels: torch.Tensor,
    test_images: torch.Tensor,
    test_labels: torch.Tensor,
) -> str:
    """SHA-256 over all pixels and labels, as a hex digest.

    Hashed are, first for the training and then for the test images: the ASCII line ``"N C H W\\n"``, the
    pixels in C order (uint8, [N, C, H, W]), and the labels as little-endian int64.
    """
    digest = hashlib.sha256()
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        digest.update((" ".join(str(extent) for extent in images.shape) + "\n").encode())
        digest.update(images.contiguous().numpy())
        digest.update(labels.contiguous().numpy().astype("<i8"))
    return digest.hexdigest()
