"""The jobs of a sweep, each held to its schema before the first one begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from suite.command.configuration import resolve
from suite.command.errors import ConfigurationError
from suite.command.explaining import explain
from suite.command.machine import as_on_the_node
from suite.command.rewrites import each

GPUS = ("gpus_per_node", "gpus_per_task", "gres")  # how a job asks Slurm for one


def check(
    jobs: Sequence[Sequence[str]],
    names: Sequence[Sequence[str]],
    compose: Callable[[list[str]], DictConfig],
    launcher: DictConfig,
) -> None:
    """Compose and resolve each job; of those that differ in their seeds alone, the first.

    On this machine the network is looked at too. A node of a cluster may hold other packages than this one.

    Args:
        names: what tells the jobs apart.
        compose: settings from overrides.

    Raises:
        ConfigurationError: in one line, with what tells the job from the others.
    """
    here = "poll_seconds" not in launcher
    checked = set()
    with as_on_the_node(None if here else any(launcher.get(name) for name in GPUS)):
        for job, own in zip(jobs, names, strict=True):
            settings = tuple(o for o in job if not o.startswith("seed="))
            if settings in checked:
                continue
            checked.add(settings)
            try:
                _check_one(compose(list(job)), here=here)
            except (ConfigurationError, OmegaConfBaseException) as error:
                told = " ".join(o for o in own if not o.startswith("seed=")) if len(jobs) > 1 else ""
                which = f" (job {told}; none was begun)" if told else ""
                raise ConfigurationError(f"{explain(error)}{which}") from None


def _check_one(config: DictConfig, *, here: bool) -> None:
    from suite.running.arguments import check_network

    with _as_its_job(config):
        for own in each(config):
            settings = resolve(own, lambda line: None)
            if here and "data" in settings:
                check_network(settings)


@contextmanager
def _as_its_job(config: DictConfig) -> Iterator[None]:
    """Inside, Hydra knows the overrides of the job; its own settings are taken out, as a job finds them."""
    hydra, before = HydraConfig.instance(), HydraConfig.instance().cfg
    hydra.set_config(config)
    with open_dict(config):
        config.pop("hydra")
    try:
        yield
    finally:
        hydra.cfg = before
