"""The answer to ``one_bit``: what one bit does beside everything else, from the stored predictions."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from experiments.questions.one_bit.figures import variation_figure
from experiments.questions.one_bit.pairs import curves
from experiments.questions.one_bit.rows import ROWS
from experiments.questions.one_bit.summary import summaries
from experiments.questions.one_bit.tables import differences, variation
from experiments.questions.one_bit.training import look_steps
from experiments.questions.one_bit.words import sentence


def answer(settings: DictConfig, values: Mapping[int, dict]) -> Answer:
    """From at least one seed; pairs are formed across seeds."""
    found = summaries(values)
    images = next(iter(values.values()))["train_images"]
    epochs = settings.steps / (images // settings.batch_size)
    looks = look_steps(settings.steps, settings.progress.points)
    seen = {key: curves(values, key) for key in ROWS if key != "nothing"}
    figure = variation_figure(found, looks, seen, settings.progress.images)
    tables = [variation(found), differences(settings, found, epochs)]
    return Answer(sentence(found, epochs), tables, [figure])
