"""Batches as a pure function of the seeds and the step, made on the device that the images live on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from suite.data.images import DataError, Images

PADDING = 4  # pixels of zeros on every side, of which the crop takes some
_ORDER, _AUGMENTATION = 0, 1  # streams: equal seeds for order and augmentation still give independent bits


def philox_words(seed: int, stream: int, epoch: int, count: int) -> np.ndarray:
    """The first raw words of the Philox-4x64 stream of (seed, stream, epoch): uint64 [count].

    The epoch is the counter's highest word, so the streams of two epochs never meet.
    """
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    counter = np.array([0, 0, 0, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def channel_statistics(images: torch.Tensor) -> tuple[list[float], list[float]]:
    """Mean and (population) standard deviation per channel of uint8 [N, C, H, W], in units of 0..255.

    The sums are exact integers; only the last division and square root round, in float64. A channel without
    any variation gets the standard deviation 1, so that it can be divided by.
    """
    # how often each value occurs: a fifth of the time of two sums over all pixels
    occurs = torch.stack([torch.bincount(c.flatten(), minlength=256) for c in images.unbind(1)])
    values = torch.arange(256)
    count = images.numel() // images.shape[1]
    pairs = list(zip((occurs @ values).tolist(), (occurs @ values**2).tolist(), strict=True))
    variances = [(count * square - value * value) / count**2 for value, square in pairs]
    return [value / count for value, _ in pairs], [math.sqrt(variance) or 1.0 for variance in variances]


class ByEpoch:
    """Batches in an order that is drawn anew every epoch; the last, partial one of an epoch is dropped.

    ``what`` the ``count`` things are that batches are made of. Raises ``DataError`` where ``batch_size`` is
    below 1 or above their number.
    """

    def __init__(self, what: str, count: int, batch_size: int, device: torch.device | str, *seeds: int):
        if not 1 <= batch_size <= count:
            raise DataError(f"batch_size={batch_size}: give 1 to {count}, the number of training {what}")
        self.batch_size, self.batches_per_epoch = batch_size, count // batch_size
        self.device = torch.device(device)
        self._seeds = seeds  # of order and augmentation
        self._drawn_epoch: int | None = None

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that this step belongs to."""
        return step // self.batches_per_epoch

    def _chosen(self, step: int) -> Sequence:
        """The numbers of those that this step (from 0) takes, drawn with their epoch."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        if self.epoch(step) != self._drawn_epoch:
            self._draw(self.epoch(step))
            self._drawn_epoch = self.epoch(step)
        start = step % self.batches_per_epoch * self.batch_size
        return self._order[start : start + self.batch_size]


class Batches(ByEpoch):
    """Training batches of a data set: random crops and flips, normalised, in an order that a seed fixes.

    ``batch(step)`` depends on the seeds and the step alone, never on what was asked for before, so a resumed
    run sees the same bits as one that was never interrupted. An epoch visits its images in the order of raw
    Philox words drawn for (order_seed, epoch); crop and flip come from one word for each image, drawn for
    (augmentation_seed, epoch).

    The images stay on ``device`` as uint8. A new epoch sends its draws over once; a batch is made of index
    arithmetic there, and nothing waits for the device.
    """

    def __init__(
        self,
        images: Images,
        batch_size: int,
        order_seed: int,
        augmentation_seed: int,
        device: torch.device | str,
        augment: bool = True,
    ):
        count = len(images.train_images)
        super().__init__("images", count, batch_size, device, order_seed, augmentation_seed)
        self.augment = augment
        mean, std = channel_statistics(images.train_images)
        self.mean = torch.tensor(mean, dtype=torch.float64).div(255).float()
        self.std = torch.tensor(std, dtype=torch.float64).div(255).float()
        self._shift = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1).to(self.device)
        self._scale = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1).to(self.device)
        self._train = images.train_images.to(self.device), images.train_labels.to(self.device)
        self._test = images.test_images.to(self.device), images.test_labels.to(self.device)
        self._rows = torch.arange(images.train_images.shape[2], device=self.device)
        self._columns = torch.arange(images.train_images.shape[3], device=self.device)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of this step (from 0), on the device: inputs float32 [B, C, H, W], targets int64 [B]."""
        chosen = self._chosen(step)
        pixels = self._train[0].index_select(0, chosen)
        if self.augment:
            pixels = self._crop_and_flip(pixels, chosen)
        return self._normalise(pixels), self._train[1].index_select(0, chosen)

    def test_batches(
        self, images: int | None, batch_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The first ``images`` test images (all, where None or more than there are), normalised, unaugmented.

        Yields inputs float32 [B, C, H, W] and targets int64 [B]; the last batch may be smaller. Raises
        ``DataError`` where ``images`` or ``batch_size`` is below 1.
        """
        if (images is not None and images < 1) or batch_size < 1:
            raise DataError(f"test images={images}, batch_size={batch_size}: give at least 1 of each")
        pixels, labels = (tensor[:images].split(batch_size) for tensor in self._test)
        return ((self._normalise(part), targets) for part, targets in zip(pixels, labels, strict=True))

    def _draw(self, epoch: int) -> None:
        """Draw the order, crops and flips of an epoch, and send them to the device."""
        count = len(self._train[0])
        keys = philox_words(self._seeds[_ORDER], _ORDER, epoch, count)
        self._order = self._send(np.argsort(keys, kind="stable"))
        if self.augment:
            words = philox_words(self._seeds[_AUGMENTATION], _AUGMENTATION, epoch, count)
            places = np.uint64(2 * PADDING + 1)
            top = (words >> np.uint64(33)) * places >> np.uint64(31)
            left = (words & np.uint64(2**31 - 1)) * places >> np.uint64(31)
            flip = words >> np.uint64(31) & np.uint64(1)
            self._draws = self._send(np.stack([top, left, flip]).astype(np.int64))

    def _send(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":  # from pinned memory the host need not wait for the copy
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _crop_and_flip(self, pixels: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Crop at each image's (top, left) of the zero-padded image, then mirror where its flip says so."""
        top, left, flip = self._draws.index_select(1, chosen).unsqueeze(2)
        width = pixels.shape[3]
        columns = torch.where(flip.bool(), width - 1 - self._columns, self._columns) + left
        rows = self._rows + top
        padded = pad(pixels, (PADDING, PADDING, PADDING, PADDING)).flatten(2)
        places = (rows[:, :, None] * (width + 2 * PADDING) + columns[:, None, :]).view(len(pixels), 1, -1)
        return padded.gather(2, places.expand(-1, pixels.shape[1], -1)).view(-1, *pixels.shape[1:])

    def _normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.float() - self._shift) / self._scale
