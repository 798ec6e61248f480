"""Your own images, from folders with one class each, as torchvision's ImageFolder has them."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from suite.data.images import DataError, Images, fingerprint

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as in ImageFolder
TEST_EVERY = 6  # without a test folder every sixth image of a class is a test image, as in CIFAR-10


def load(root: Path, size: int = 32) -> Images:
    """Read ``root/train/<class>/`` and ``root/test/<class>/`` (or ``val``), else split ``root/<class>/``.

    The split takes each class's images in the order of their paths, and every sixth of them for testing.
    Images become RGB; the shorter side is resized to ``size`` pixels (bilinear, antialiased) and the middle
    is cut out. The pixels depend on Pillow's decoder and resampling: the digest tells whether they differ.
    Raises ``DataError``, naming the folder or file, where there is nothing to train on or an image cannot be
    read.
    """
    import torch

    root = Path(root).expanduser()
    if size < 1:
        raise DataError(f"image size {size}: give at least 1 pixel")
    if not root.is_dir():
        raise DataError(
            f"{root} is not a folder: give one that holds train/<class>/ and test/<class>/, or <class>/"
        )
    train, test, classes = _separate(root) if (root / "train").is_dir() else _split(root)
    tensors = []
    for samples in (train, test):
        tensors.append(torch.from_numpy(np.stack([_read(file, size) for file, _ in samples])))
        tensors.append(torch.tensor([label for _, label in samples], dtype=torch.int64))
    return Images(
        "folder",
        *tensors,
        classes=tuple(classes),
        sha256=fingerprint(*tensors),
        source=f"image folder {root.resolve().name}",
        stand_in=False,
    )


_Samples = list[tuple[str, int]]


def _separate(root: Path) -> tuple[_Samples, _Samples, list[str]]:
    test = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    if test is None:
        raise DataError(
            f"{root} holds train/ but neither test/ nor val/: add one, with the same class folders"
        )
    train_samples, classes = _list(root / "train")
    test_samples, test_classes = _list(test)
    if classes != test_classes:
        odd = sorted(set(classes) ^ set(test_classes))
        raise DataError(
            f"{root}/train and {test} differ in the class folders {', '.join(odd)}: both need the same ones"
        )
    return train_samples, test_samples, classes


def _split(root: Path) -> tuple[_Samples, _Samples, list[str]]:
    samples, classes = _list(root)
    parts = ([], [])
    for label, name in enumerate(classes):
        of_class = [sample for sample in samples if sample[1] == label]
        if len(of_class) < TEST_EVERY:
            raise DataError(
                f"{root / name} holds {len(of_class)} images: give at least {TEST_EVERY} "
                f"(every {TEST_EVERY}th is for testing), or make train/ and test/ folders"
            )
        for number, sample in enumerate(of_class, start=1):
            parts[number % TEST_EVERY == 0].append(sample)
    return *parts, classes


def _list(folder: Path) -> tuple[_Samples, list[str]]:
    """(file, label) of every image below ``folder/<class>/``, sorted by class and path; and the classes."""
    try:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        found = [sorted(_images(folder, name)) for name in classes]
    except OSError as error:
        raise _no_classes(folder, str(error)) from error
    if not classes:
        raise _no_classes(folder, "it holds no folder")
    if len(classes) < 2:
        raise DataError(f"{folder} holds only the class {classes[0]}: give at least two class folders")
    return [(file, label) for label, files in enumerate(found) for _, _, file in files], classes


def _images(folder: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """Every image of a class, at any depth: its folder and its name, by which it is sorted, and its path.

    Links are followed, but none that leads to a folder above this one, or to one that was listed before: such
    a listing would hardly end. Raises DataError where there is no image, before any other class is listed.
    """
    above, none = {_identity(place) for place in (folder, *folder.resolve().parents)}, True
    for place, folders, files in os.walk(folder / name, followlinks=True):
        if _identity(place) in above:
            folders.clear()
            continue
        above.add(_identity(place))
        for file in files:
            if file.lower().endswith(EXTENSIONS):
                none = False
                yield place, file, os.path.join(place, file)
    if none:
        raise _no_classes(folder, f"{name} holds no image: {', '.join(EXTENSIONS)}")


def _identity(place: str | Path) -> tuple[int, int]:
    about = os.stat(place)
    return about.st_dev, about.st_ino


def _no_classes(folder: Path, why: str) -> DataError:
    return DataError(f"{folder} is no folder of classes ({why}): put the images into one folder a class")


def _read(file: str, size: int) -> np.ndarray:
    """One image as uint8 [3, size, size]."""
    from PIL import Image

    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # who opens a pipe waits for a writer
            raise ValueError("it is no regular file")
        with Image.open(file) as opened:
            if opened.mode[0] in "IF":  # converting these would cut off all above 255
                raise ValueError("its pixels have more than 8 bits a channel")
            image = opened.convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        raise DataError(f"{file} cannot be read as an image ({error}): replace or remove it") from error
    scale = size / min(image.size)
    width, height = (max(size, round(extent * scale)) for extent in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1)
