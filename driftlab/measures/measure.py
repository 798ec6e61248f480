"""What a measure is: one curve, declared once, and how its number is made of what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from driftlab.lockstep.seen import Seen


class Scale(Enum):
    """What the values are, and so which axis they are drawn on."""

    DISTANCE = "relative to the reference: logarithmic, with a line for 0"
    COUNT = "a whole number, also in the tables: logarithmic above 1"
    VALUE = "any other number: linear while it stays within two decades"


class Moment(Enum):
    """When it is measured, with the table that its column stands in."""

    STEP = "curves"
    EVALUATION = "evaluations"


# The sections of a dashboard, in their order, and so that of the figures on a page.
DRIFT, TRAINING, TEST_SET = SECTIONS = ("Drift", "Training", "On the test set")


@dataclass(frozen=True)
class Measure:
    """A curve of every arm; ``MEASURE`` of a file in this folder is found by itself.

    Judging and reports read the declarations and do not wait for torch: what ``measure`` needs of it is
    imported inside the function.

    Attributes:
        name: of its columns, ``<name>/<arm>``.
        title: a few words.
        unit: as on axes and dashboards; "" where the title says it.
        order: its rank among the columns of its table.
        section: of the dashboard, one of ``SECTIONS``.
        measure: the number of an arm, of what was seen of it and, where it is ``compared``, of its against:
            a scalar that stays on the device, None where it does not apply.
        compared: whether only arms that are compared with another have it.
        moment: measured at each logged step, or at each evaluation.
        figure: whether it is drawn on the page and for a paper.
        dtype: the precision whose arms alone have it; "" where all do.
        axis: what stands at the axis of the page's figure, where that is not title and unit.

    Raises:
        ValueError: the section is unknown, so that no dashboard would show the curve.
    """

    name: str
    title: str
    unit: str
    order: int
    section: str
    measure: Callable[[Seen, Seen | None], Tensor | None]
    compared: bool = False
    scale: Scale = Scale.VALUE
    moment: Moment = Moment.STEP
    figure: bool = False
    dtype: str = ""
    axis: str = ""

    def __post_init__(self) -> None:
        if self.section not in SECTIONS:
            raise ValueError(f"{self.name}: there is no section {self.section!r} among {', '.join(SECTIONS)}")

    @property
    def label(self) -> str:
        """Title with unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def axis_label(self) -> str:
        """What stands at the axis of the page's figure."""
        return self.axis or self.label[0].lower() + self.label[1:]

    @property
    def logarithmic(self) -> bool:
        return self.scale is not Scale.VALUE
