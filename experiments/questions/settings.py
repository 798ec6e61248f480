"""The settings of a kind of experiment that trains no network of the config on no data set of it."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.configuration import (
    CONF,
    check_choices,
    check_tf32,
    chosen_device,
    register_resolvers,
    settle_threads,
)
from experiments.errors import ConfigurationError, one_line
from experiments.experiment_folder import overrides

# Settings of conf/config.yaml that mean something to every kind.
SHARED = (
    *("name", "kind", "hypothesis", "question", "expected", "seed", "scale", "device", "threads", "workers"),
    "tf32",
    *("logger", "results", "rerun", "fail_on"),
)


def resolve_question(config: DictConfig, say: Callable[[str], None]) -> DictConfig:
    """The shared settings and the experiment's own, resolved on this machine. Raises ConfigurationError.

    A setting that trainings alone have changes nothing here, and is left out; where somebody set it, that is
    said.
    """
    register_resolvers()
    config = config.copy()
    config.device = chosen_device(config.device)
    unused = {key for key in OmegaConf.load(CONF / "config.yaml") if key not in SHARED}
    unused |= {"model", "data", "optimizer"}
    for override in overrides(config):
        if override.lstrip("+~").partition("=")[0].partition(".")[0] in unused:
            say(f"{override} changes nothing: {config.name} trains no network of the config")
    try:
        kept = OmegaConf.masked_copy(config, [key for key in config if key not in unused])
        kept.scale = {k: v for k, v in kept.scale.items() if k in ("name", "why")}
        settings = OmegaConf.create(OmegaConf.to_container(kept, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"the configuration cannot be resolved: {one_line(error)}") from None
    check_choices({"fail_on": settings.fail_on})
    settle_threads(settings)
    check_tf32(settings)
    return settings
