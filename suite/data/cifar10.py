"""CIFAR-10, from the cache, from torchvision's files, or from outside; verified to the byte every time."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from suite.data.cifar10_fetch import fetch
from suite.data.cifar10_official import CLASSES, FINGERPRINT, TRAIN_IMAGES, verify
from suite.data.cifar10_sources import TORCHVISION_FOLDER, read_torchvision
from suite.data.images import DataError, Images, UnobtainableError

CACHE = "cifar10.safetensors"
TIME_LIMIT_S = 300.0


def default_root() -> Path:
    """The folder for data: ``DRIFTLAB_DATA``, else ``XDG_CACHE_HOME/driftlab``, else ``~/.cache/driftlab``.

    Raises ``DataError`` where there is no home folder to put it in.
    """
    if chosen := os.environ.get("DRIFTLAB_DATA"):
        return _expand(chosen)
    return _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "driftlab"


def _expand(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: there is no such home folder; name one by DRIFTLAB_DATA=…") from error


def load(root: str | Path, time_limit_s: float = TIME_LIMIT_S, say: Callable[[str], None] = print) -> Images:
    """CIFAR-10 from ``root/cifar10.safetensors``, else ``root/cifar-10-batches-py``, else fetched and cached.

    Several processes may start at once: one fetches, the others wait for it and read the cache. ``say`` is
    called with a line of text before anything that takes long. Raises ``DataError`` when what lies on disk
    is damaged (it is neither used nor replaced), and ``UnobtainableError``, a ``DataError`` too, when nothing
    is on disk and no source delivers within ``time_limit_s`` seconds, or ``root`` cannot be written.
    """
    root = _expand(root)
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
    with _locked(root / f"{CACHE}.lock", time_limit_s, say):
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


def _locked(file: Path, time_limit_s: float, say: Callable[[str], None]) -> AbstractContextManager:
    """The lock on this file, held, after waiting for whoever fetches under it."""
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is fetching CIFAR-10 into {file.parent}: waiting for it")
    try:
        # The other may need its whole time limit, and then some time to write.
        return lock.acquire(timeout=time_limit_s + 60)
    except Timeout as error:
        reason = f"another process has been fetching it for over {time_limit_s:g} s"
        raise UnobtainableError(f"CIFAR-10 in {file.parent}: {reason}; end that process", reason) from error


def _write_cache(cache: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write the cache whole or not at all; only under the lock, for all writers use one temporary name."""
    from safetensors.numpy import save

    part = cache.with_name(f".{cache.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(save({"images": pixels, "labels": labels}))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, cache)
    finally:
        part.unlink(missing_ok=True)


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
