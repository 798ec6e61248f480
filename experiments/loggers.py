"""Lightning's loggers with the names of ``curves.csv``, on the step axis ``step``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property, partial
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlparse

from omegaconf import DictConfig, OmegaConf

from experiments.errors import ConfigurationError


class MetricsLogger:
    """Hands rows to the chosen logger; NaN and inf are left out, since W&B turns them into strings."""

    def __init__(self, settings: DictConfig, digest: str, seed: int, home: Path):
        self.kind = settings.logger.name
        makers = {"wandb": _wandb, "tensorboard": _tensorboard, "csv": _csv, "none": lambda *_: None}
        if self.kind not in makers:
            raise ConfigurationError(f"logger={self.kind} is unknown: choose from {', '.join(makers)}")
        os.environ.setdefault("WANDB_SILENT", "true")  # before anybody imports wandb
        self._make = partial(makers[self.kind], settings, digest, seed, home)

    @cached_property
    def lightning(self):
        """Lightning's logger, made when the first row comes: a run that cannot start leaves none."""
        return self._make()

    def log(self, step: int, row: Mapping[str, float]) -> None:
        if self.lightning is None:
            return
        numbers = {k: v for k, v in row.items() if math.isfinite(v)}
        if self.kind == "wandb":
            self.lightning.experiment.log({**numbers, "step": step})
        else:
            self.lightning.log_metrics(numbers, step=step)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Close the run: without it the next seed of this process would go on in it."""
        if self.lightning is None:
            return
        if self.kind == "wandb":
            self.lightning.experiment.summary.update(dict(summary))
            self.lightning.experiment.finish()
        else:
            self.lightning.finalize("success")


def _wandb(settings: DictConfig, digest: str, seed: int, home: Path):
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    home.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=settings.logger.project,
        entity=settings.logger.entity,
        name=f"{settings.name} seed={seed}",
        group=f"{settings.name}-{digest}",
        id=f"{digest}-{seed}",
        resume="allow" if mode == "online" else None,
        dir=home,
        mode=mode,
        config=_searchable(settings) | {"seed": seed, "digest": digest},
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, x_disable_meta=True, x_disable_stats=True
        ),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return WandbLogger(experiment=run)


def _searchable(settings: DictConfig) -> dict:
    """The settings less the paths of this machine."""
    config = OmegaConf.to_container(settings)
    config.pop("results")
    config["data"].pop("root", None)
    return config


def _logged_in() -> bool:
    """Whether W&B has a key here, in its variable or in the netrc file. Asked so that it never prompts."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


def _tensorboard(settings: DictConfig, digest: str, seed: int, home: Path):
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(home, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"logger=tensorboard: {error}: pip install tensorboard") from None


def _csv(settings: DictConfig, digest: str, seed: int, home: Path):
    from lightning.pytorch.loggers import CSVLogger

    return CSVLogger(home, name="csv", version="")
