"""The data set of an experiment: one of the suite's by its name, or anybody's own (``data._target_``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from driftlab.blame import described
from driftlab.process import noticed
from suite import data
from suite.command.errors import ConfigurationError
from suite.command.users_code import let_end
from suite.data.images import DataError, Images
from suite.running.importing import imported, parameters

# By what a training and a test set are asked for, where the signature has it and the settings do not.
PARTS = {"train": (True, False), "split": ("train", "test")}
OF_RUN = ("_target_", "sha256")


def load_data(settings: DictConfig, say: Callable[[str], None] = lambda line: None):
    """Of the settings; its digest becomes part of them.

    Returns:
        ``suite.data.images.Images`` or ``suite.data.samples.Samples``.

    Raises:
        DataError, ConfigurationError: it cannot be had.
    """
    chosen = settings.data
    if chosen.get("_target_") is None:
        return data.load_images(settings, say)
    found = _own(settings, say)
    chosen.sha256 = found.sha256
    return found


def only_images(found: object, settings: DictConfig) -> Images:
    """Raises ConfigurationError where a kind that looks into images is given anything else."""
    if isinstance(found, Images):
        return found
    raise ConfigurationError(
        f"data._target_={settings.data._target_} is no set of images in memory, which kind={settings.kind} "
        "takes: write data=folder data.root=FOLDER, or an experiment of kind=training"
    )


def part_argument(function: Callable, given: object) -> str | None:
    """The parameter by which training and test set are asked for, where the settings do not set it."""
    taken = parameters(function) or {}
    return next((name for name in PARTS if name in taken and name not in given), None)


def _own(settings: DictConfig, say: Callable[[str], None]):
    from torch.utils.data import default_collate

    from suite.data.samples import drawing, samples

    target = settings.data._target_
    name = str(target).rpartition(".")[2]
    part = part_argument(imported("data._target_", target), settings.data)
    try:
        with noticed("the data set"), drawing() as seeded:
            seeded(0)  # one that is drawn is the same in every worker
            made = [_made(settings, {part: value}) for value in PARTS[part]] if part else _made(settings, {})
            train, test, collate = _parts(made, lambda line: say(f"{target}: {line}"))
            return samples(name, train, test, collate or default_collate, f"made by {target}")
    except DataError as error:
        raise ConfigurationError(f"data._target_: {error}") from None
    except BaseException as error:
        let_end(error)
        raise ConfigurationError(f"data: {described(error.__cause__ or error, 200)}") from None


def _made(settings: DictConfig, more: dict) -> Any:
    own = {k: v for k, v in settings.data.items() if k not in OF_RUN[1:]}
    return hydra.utils.instantiate(own, **more, _convert_="all")


def _parts(made: Any, say: Callable[[str], None]) -> tuple[Any, Any, Callable | None]:
    """Training set, test set and collation: of a DataModule, a pair, or one set that is still to be split."""
    if hasattr(made, "train_dataloader"):
        return _of_module(made, say)
    pair = isinstance(made, tuple | list) and len(made) == 2
    return (made[0], made[1], None) if pair else (made, None, None)


def _of_module(module: Any, say: Callable[[str], None]) -> tuple[Any, Any, Callable]:
    """Training set, test set (or that of validation) and collation of a LightningDataModule."""
    module.prepare_data()
    module.setup("fit")
    train = module.train_dataloader()
    _say_ruled_here(train, say)
    tested = "test" if _is_own(module.test_dataloader) else "val" if _is_own(module.val_dataloader) else None
    if tested is None:
        return train.dataset, None, train.collate_fn
    if tested == "test":
        module.setup("test")
    test = getattr(module, f"{tested}_dataloader")()
    return train.dataset, test.dataset, train.collate_fn


def _say_ruled_here(loader: Any, say: Callable[[str], None]) -> None:
    """Samples come in an order of our seeds: one line where a DataLoader has a sampler of its own."""
    samplers = {type(getattr(loader, name, None)).__name__ for name in ("sampler", "batch_sampler")}
    own = sorted(samplers - {"RandomSampler", "SequentialSampler", "BatchSampler", "NoneType"})
    if own:
        say(f"its {' and its '.join(own)} is not taken: seeds.order rules the order, batch_size the batches")


def _is_own(method: Callable) -> bool:
    return not method.__module__.startswith(("lightning.", "pytorch_lightning."))
