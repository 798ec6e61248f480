"""The settings as they are written down: without the paths of the machine, which may name a person."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf


def as_yaml(settings: DictConfig) -> str:
    """All settings but where results and data lie, which the folder itself and the next machine know."""
    kept = OmegaConf.to_container(settings)
    for key in ("results", "workers"):  # and how many seeds it had room for at a time
        kept.pop(key, None)
    if isinstance(kept.get("data"), dict):
        kept["data"].pop("root", None)
    return OmegaConf.to_yaml(OmegaConf.create(kept))
