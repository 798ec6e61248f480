"""One of several processes that carry out seeds side by side, seen from within."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from traceback import format_exception

from omegaconf import OmegaConf

from experiments import data
from experiments.cores import settle_process
from experiments.data.images import DataError, Images
from experiments.errors import ConfigurationError, Unfinished, is_out_of_memory
from experiments.experiment_folder import Experiment, owned


@dataclass(frozen=True)
class How:
    """How a seed ended. Handed back instead of raised, so that the other seeds go on.

    Attributes:
        kind: "done", "elsewhere" (another process is at it), "refused", "unfinished", "memory", "crashed".
        text: the line for the user; a traceback where it crashed.
    """

    kind: str
    text: str = ""

    @classmethod
    def failed(cls, error: Exception) -> How:
        kinds = {
            "refused": (ConfigurationError, DataError),
            "unfinished": (Unfinished,),
        }
        if is_out_of_memory(error):
            return cls("memory", str(error))
        for kind, types in kinds.items():
            if isinstance(error, types):
                return cls(kind, str(error))
        return cls("crashed", "".join(format_exception(error)))


def carried_out(
    experiment: Experiment,
    seed: int,
    work: Callable[[Experiment, int, Path], None],
    source: str | None,
) -> How:
    """``work`` on the seed, unless another process is at it.

    Args:
        experiment: as the parent opened it, less its images, which each worker reads for itself.
        source: where the parent has the images from, None where the experiment trains on none.
    """
    settings = experiment.settings
    try:
        settle_process(settings)
        if source is not None:
            images = replace(_images(OmegaConf.to_yaml(settings.data)), source=source)
            experiment = replace(experiment, images=images)
        return How("done" if owned(experiment, seed, work, wait=False) else "elsewhere")
    except Exception as error:
        return How.failed(error)


@cache
def _images(chosen: str) -> Images:
    settings = OmegaConf.create(chosen)
    return data.load(settings.name, settings.get("root"), say=lambda text: None)
