"""CIFAR-10, from the cache, from torchvision's files, or from outside; verified to the byte every time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from suite.data.cache import default_root, expanded, locked, written_whole
from suite.data.cifar10_fetch import fetch
from suite.data.cifar10_official import CLASSES, FINGERPRINT, TRAIN_IMAGES, verify
from suite.data.cifar10_sources import TORCHVISION_FOLDER, read_torchvision
from suite.data.images import DataError, Images, UnobtainableError

__all__ = ["CACHE", "TIME_LIMIT_S", "default_root", "load"]

CACHE = "cifar10.safetensors"
TIME_LIMIT_S = 300.0


def load(root: str | Path, time_limit_s: float = TIME_LIMIT_S, say: Callable[[str], None] = print) -> Images:
    """CIFAR-10 from ``root/cifar10.safetensors``, else ``root/cifar-10-batches-py``, else fetched and cached.

    Several processes may start at once: one fetches, the others wait for it and read the cache. ``say`` is
    called with a line of text before anything that takes long. Raises ``DataError`` when what lies on disk
    is damaged (it is neither used nor replaced), and ``UnobtainableError``, a ``DataError`` too, when nothing
    is on disk and no source delivers within ``time_limit_s`` seconds, or ``root`` cannot be written.
    """
    root = expanded(root)
    if not 0 < time_limit_s <= 86_400:
        raise DataError(f"time limit of {time_limit_s:g} s for fetching: give more than 0 and at most 86400")
    try:
        return _on_disk(root) or _fetched(root, time_limit_s, say)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UnobtainableError(
            f"CIFAR-10 cannot be kept in {root} ({reason}): choose a folder that can be written "
            "(DRIFTLAB_DATA=…), or data=shapes",
            reason=f"its folder cannot be written ({reason})",
        ) from error


def _on_disk(root: Path) -> Images | None:
    cache, files = root / CACHE, root / TORCHVISION_FOLDER
    if cache.exists():
        return _read_cache(cache)
    if files.exists():
        pixels, labels = read_torchvision(root)
        remedy = "put the official files there, or delete it to have CIFAR-10 fetched"
        verify(pixels, labels, str(files), remedy)
        return _images(pixels, labels, "torchvision files on disk")
    return None


def _read_cache(cache: Path) -> Images:
    from safetensors import SafetensorError, safe_open

    remedy = "delete it to have CIFAR-10 fetched again"
    try:
        with safe_open(cache, framework="np") as content:
            pixels, labels = content.get_tensor("images"), content.get_tensor("labels")
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{cache} cannot be read ({error}); {remedy}") from error
    verify(pixels, labels, str(cache), remedy)
    return _images(pixels, labels, "read from the cache")


def _fetched(root: Path, time_limit_s: float, say: Callable[[str], None]) -> Images:
    root.mkdir(parents=True, exist_ok=True)
    with locked("CIFAR-10", root / f"{CACHE}.lock", time_limit_s, say):
        if present := _on_disk(root):
            return present
        say(f"CIFAR-10 is not in {root}: fetching it (about 150 MB, at most {time_limit_s:g} s)")
        try:
            pixels, labels, source = fetch(root, time_limit_s)
        except UnobtainableError as error:
            remedy = f"put torchvision's {TORCHVISION_FOLDER} into {root}, or choose data=shapes"
            raise UnobtainableError(f"{error}: {remedy}", error.reason) from error
        _write_cache(root / CACHE, pixels, labels)
    return _images(pixels, labels, source)


def _write_cache(cache: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    from safetensors.numpy import save

    written_whole(cache, save({"images": pixels, "labels": labels}))


def _images(pixels: np.ndarray, labels: np.ndarray, source: str) -> Images:
    import torch

    images, targets = torch.from_numpy(pixels), torch.from_numpy(labels).to(torch.int64)
    return Images(
        name="cifar10",
        train_images=images[:TRAIN_IMAGES],
        train_labels=targets[:TRAIN_IMAGES],
        test_images=images[TRAIN_IMAGES:],
        test_labels=targets[TRAIN_IMAGES:],
        classes=CLASSES,
        sha256=FINGERPRINT,
        source=source,
        stand_in=False,
    )
