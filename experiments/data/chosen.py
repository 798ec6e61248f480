"""The data set that the settings choose."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig

from experiments import data
from experiments.data.images import Images


def load_images(settings: DictConfig, say: Callable[[str], None]) -> Images:
    """The images; their name and digest become part of the settings. Raises ``DataError``."""
    chosen = settings.data
    images = data.load(chosen.name, chosen.get("root"), time_limit_s=chosen.get("time_limit"), say=say)
    chosen.name, chosen.sha256 = images.name, images.sha256
    return images
