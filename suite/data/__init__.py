"""The data sets, by name. Each is a file: cifar10, shapes (drawn, the stand-in), folder (your own images)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from omegaconf import DictConfig

from suite.data.images import DataError, Images, UnobtainableError

__all__ = ["CHOICES", "DataError", "Images", "UnobtainableError", "load", "load_images"]

CHOICES = ("auto", "cifar10", "shapes", "folder")
AUTO_TIME_LIMIT_S = 120.0  # shorter than where CIFAR-10 was asked for by name, as there is a way on


def load_images(settings: DictConfig, say: Callable[[str], None]) -> Images:
    """Those that the settings choose; their name and digest become part of them. Raises ``DataError``."""
    chosen = settings.data
    images = load(chosen.name, chosen.get("root"), time_limit_s=chosen.get("time_limit"), say=say)
    chosen.name, chosen.sha256 = images.name, images.sha256
    return images


def load(
    name: str,
    root: str | Path | None = None,
    *,
    time_limit_s: float | None = None,
    say: Callable[[str], None] = print,
) -> Images:
    """The data set of this name: one of ``CHOICES``.

    ``auto`` is CIFAR-10 where it is on disk or can be fetched, else shapes: the reason goes to ``say`` and
    into ``Images.source``. ``root`` is the folder that holds the data; ``cifar10.default_root()`` where None.
    ``time_limit_s`` (seconds) is for fetching. Raises ``DataError``, in ``auto`` too where a CIFAR-10 on disk
    is damaged.
    """
    if name not in CHOICES:
        raise DataError(f"data={name}: choose one of {', '.join(CHOICES)}")
    if name == "folder":
        return _folder(root)
    if name == "shapes":
        return _shapes()
    from suite.data import cifar10

    if time_limit_s is None:
        time_limit_s = AUTO_TIME_LIMIT_S if name == "auto" else cifar10.TIME_LIMIT_S
    try:
        return cifar10.load(cifar10.default_root() if root is None else root, time_limit_s, say)
    except UnobtainableError as error:
        if name == "cifar10":
            raise
        say(f"the drawn shapes stand in for CIFAR-10: {error}")
        images = _shapes()
        return replace(images, source=f"{images.source}, in place of CIFAR-10: {error.reason}")


@cache
def _shapes() -> Images:
    from suite.data import shapes

    return shapes.draw()


def _folder(root: str | Path | None) -> Images:
    from suite.data import folder

    if root is None:
        raise DataError("data=folder: write data.root=FOLDER, the folder of your images")
    return folder.load(Path(root))
