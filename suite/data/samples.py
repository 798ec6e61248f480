"""Anybody's own data set: numbered samples, in an order and with an augmentation that our seeds rule."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from suite.data.batches import ByEpoch, philox_words
from suite.data.images import DataError, Images

Batch = tuple[object, object]
TEST_EVERY = 6  # of one set without a test set every sixth sample is for testing, as in a folder of images
LOOKED_AT = 256  # samples of each set that the digest is made of, evenly spread
_FIXED = 2  # a stream beside those of an epoch


@dataclass(frozen=True, eq=False)
class Samples:
    """A training and a test set, each ``[number] -> (inputs, targets)``, and how samples become a batch.

    sha256: of some samples of both, which identifies the data set.
    classes: of a classification; None of anything else.
    """

    name: str
    train: Any
    test: Any
    collate: Callable[[list], Any]
    classes: tuple[str, ...] | None
    sha256: str
    source: str
    stand_in: bool = False

    @property
    def train_count(self) -> int:
        return len(self.train)

    @property
    def test_count(self) -> int:
        return len(self.test)


DataSet = Images | Samples  # what a training may be of


def samples(name: str, train: Any, test: Any | None, collate: Callable[[list], Any], source: str) -> Samples:
    """Of two data sets, or of one, of which every sixth sample is for testing.

    Raises:
        DataError: one is no data set of numbered samples, holds none, or gives another sample when it is
            asked again from the same random state.
    """
    for part in (train, test):
        if part is not None:
            _check_is_numbered(name, part)
    classes = _classes(train)
    if test is None:
        train, test = _split(train)
    if min(len(train), len(test)) < 1:
        raise DataError(
            f"{name}: {len(train)} training and {len(test)} test samples: give at least 1 of each"
        )
    found = [_digest(part, collate) for part in (train, test)]
    if found != [_digest(part, collate) for part in (train, test)]:
        raise DataError(
            f"{name} gives other samples when it is asked again: draw what is random from the global state "
            "of torch, NumPy or random, which is seeded for each sample"
        )
    sha256 = hashlib.sha256(" ".join(found).encode()).hexdigest()
    return Samples(name, train, test, collate, classes, sha256, source)


def _check_is_numbered(name: str, part: Any) -> None:
    if isinstance(part, IterableDataset) or not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        kind = type(part).__name__
        raise DataError(
            f"{name} is a {kind}, whose order nobody rules: give a data set with [number] and len()"
        )


def _split(whole: Any) -> tuple[Any, Any]:
    from torch.utils.data import Subset

    tested = range(TEST_EVERY - 1, len(whole), TEST_EVERY)
    rest = [i for i in range(len(whole)) if i % TEST_EVERY != TEST_EVERY - 1]
    return Subset(whole, rest), Subset(whole, tested)


def _classes(part: Any) -> tuple[str, ...] | None:
    """As torchvision's data sets have them, through the subsets of one."""
    while part is not None:
        named, count = getattr(part, "classes", None), getattr(part, "num_classes", None)
        if isinstance(named, Sequence) and not isinstance(named, str):
            return tuple(map(str, named))
        if isinstance(count, int):
            return tuple(map(str, range(count)))
        part = getattr(part, "dataset", None)
    return None


def _digest(part: Any, collate: Callable[[list], Any]) -> str:
    digest = hashlib.sha256(f"{len(part)}\n".encode())
    step = max(1, len(part) // LOOKED_AT)
    with drawing() as seeded:
        for number in range(0, len(part), step):
            seeded(number)
            for leaf in pytree.tree_leaves(collate([part[number]])):
                if isinstance(leaf, torch.Tensor):
                    digest.update(f"{leaf.dtype} {list(leaf.shape)}\n".encode())
                    leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                digest.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return digest.hexdigest()


@contextmanager
def drawing() -> Iterator[Callable[[int], None]]:
    """Gives what seeds torch, NumPy and random; afterwards their states are as they were."""
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def seeded(word: int) -> None:
        torch.default_generator.manual_seed(word)
        np.random.seed(word % 2**32)
        random.seed(word)

    try:
        yield seeded
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


class SampleBatches(ByEpoch):
    """Batches of somebody's own data set, as ``suite.data.batches.Batches`` are of images.

    ``batch(step)`` depends on the seeds and the step alone. An epoch visits the samples in the order of raw
    Philox words drawn for (order_seed, epoch). What a sample draws while it is fetched, from torch, NumPy or
    random, is drawn after seeding them with one word for each sample, of (augmentation_seed, epoch).

    Raises ``DataError`` for a batch that is no pair.
    """

    def __init__(
        self,
        of: Samples,
        batch_size: int,
        order_seed: int,
        augmentation_seed: int,
        device: torch.device | str,
    ):
        super().__init__("samples", of.train_count, batch_size, device, order_seed, augmentation_seed)
        self._of = of

    def batch(self, step: int) -> Batch:
        """Inputs and targets of this step (from 0), on the device."""
        return self._fetched(self._of.train, self._chosen(step), self._words)

    def test_batches(self, images: int | None, batch_size: int) -> Iterator[Batch]:
        """The first ``images`` test samples, all where None; the last batch may be smaller.

        Raises ``DataError`` where either is below 1.
        """
        if (images is not None and images < 1) or batch_size < 1:
            raise DataError(f"test samples={images}, batch_size={batch_size}: give at least 1 of each")
        count = min(images or self._of.test_count, self._of.test_count)
        words = philox_words(0, _FIXED, 0, count)
        starts = range(0, count, batch_size)
        return (self._fetched(self._of.test, range(s, min(s + batch_size, count)), words) for s in starts)

    def _draw(self, epoch: int) -> None:
        order, self._words = (
            philox_words(seed, stream, epoch, self._of.train_count) for stream, seed in enumerate(self._seeds)
        )
        self._order = np.argsort(order, kind="stable")

    def _fetched(self, part: Any, numbers: Iterable[int], words: np.ndarray) -> Batch:
        found = []
        with drawing() as seeded:
            for number in map(int, numbers):
                seeded(int(words[number]))
                found.append(part[number])
            batch = self._of.collate(found)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            kind = type(batch).__name__ + (f" of {len(batch)}" if hasattr(batch, "__len__") else "")
            raise DataError(
                f"{self._of.name}: a batch is a {kind}: give each sample as a pair (inputs, targets)"
            )
        inputs, targets = pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), batch)
        return inputs, targets
