"""TensorBoard and CSV files, through Lightning's loggers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from driftlab.report.sections import Answer, Table, shown
from suite.command.errors import ConfigurationError
from suite.showing.loggers.contents import figures, searchable, seed_summary, tables, verdict_summary
from suite.showing.wording import markdown_row


class TensorBoardSeed:
    """One seed as an event file: scalars by the names of ``curves.csv``, settings and outcome as text."""

    def __init__(self, settings: DictConfig, digest: str, seed: int, home: Path, _: object = None):
        self._logger = _tensorboard(home)
        self._add_text("config", searchable(settings, digest) | {"seed": seed})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._logger.log_metrics(numbers, step=step)

    def finish(self, record: Mapping) -> None:
        about = {key: record[key] for key in ("dataset", "environment")}
        self._add_text("summary", seed_summary(record) | about)
        _finish(self._logger)

    def crash(self, why: str) -> None:
        self._add_text("crashed", {"why": why})
        _finish(self._logger, "failed")

    def _add_text(self, tag: str, values: Mapping) -> None:
        self._logger.experiment.add_text(tag, _as_yaml(values))


class CsvSeed:
    """One seed in Lightning's CSV form."""

    def __init__(self, settings: DictConfig, digest: str, seed: int, home: Path, _: object = None):
        from lightning.pytorch.loggers import CSVLogger

        shutil.rmtree(home / "csv", ignore_errors=True)
        self._logger = CSVLogger(home, name="csv", version="")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._logger.log_metrics(numbers, step=step)

    def finish(self, record: Mapping) -> None:
        self._logger.finalize("success")

    def crash(self, why: str) -> None:
        self._logger.finalize("failed")


def tells_of_crashes(settings: DictConfig) -> bool:
    """Files tell nobody."""
    return False


SEEDS = {"tensorboard": TensorBoardSeed, "csv": CsvSeed}


def log_verdict(
    settings: DictConfig, digest: str, folder: Path, verdict: Mapping, answer: Answer | None, _: object = None
) -> dict[str, str]:
    """The verdict as an event file of its own: summary and tables as text, figures as images.

    The settings are hyperparameters, so that TensorBoard's HParams tab compares experiments; its numbers are
    the evidence's, by the probe's name.
    """
    from matplotlib.image import imread

    logger = _tensorboard(folder / "verdict")
    writer = logger.experiment
    config, summary = searchable(settings, digest), verdict_summary(verdict, settings.expected)
    writer.add_text("config", _as_yaml(config))
    writer.add_text("verdict", _as_yaml(summary))
    measured = {e["probe"]: e["measured"] for e in verdict["evidence"] if e["measured"] is not None}
    logger.log_hyperparams(config | summary, {f"evidence/{name}": n for name, n in measured.items()})
    for name, table in tables(verdict, answer).items():
        writer.add_text(name, "\n".join(_as_markdown(table)))
    for name, (file, _) in figures(folder, answer).items():
        writer.add_image(name, imread(file), dataformats="HWC")
    _finish(logger)
    return {}


def _tensorboard(home: Path):
    """A new event file in place of what an earlier process left, whose steps would come twice."""
    from lightning.pytorch.loggers import TensorBoardLogger

    shutil.rmtree(home / "tensorboard", ignore_errors=True)
    try:
        return TensorBoardLogger(home, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"logger=tensorboard: {error}: pip install tensorboard") from None


def _finish(logger, status: str = "success") -> None:
    logger.finalize(status)
    for number, file in enumerate(sorted(Path(logger.log_dir).glob("events.out.tfevents.*"))):
        began = file.name.split(".")[3]
        file.rename(file.with_name(f"events.out.tfevents.{began}.{number}"))  # it was named after the host


def _as_yaml(values: Mapping) -> str:
    return f"```yaml\n{OmegaConf.to_yaml(OmegaConf.create(dict(values)))}```"


def _as_markdown(table: Table) -> Iterable[str]:
    """A table and what it says."""
    text = shown(table)
    for cells in (text.headings, ["---"] * len(text.headings), *text.rows):
        yield markdown_row(cells)
    if text.conclusion:
        yield f"\n{text.conclusion}"
