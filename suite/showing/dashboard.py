"""The W&B workspace and report of a project, as specs built from code.

Both show verdicts first (the runs of job type ``verdict``), then the curves of all seeds (job type ``seed``):
a line an experiment and arm, its median over seeds, the band from the lowest seed to the highest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

from driftlab.measures import Measure, by_section
from driftlab.measures.measure import DRIFT, Scale
from driftlab.measures.weight_distance import MEASURE as WEIGHT_DISTANCE
from driftlab.precision import TRAINED_IN

TITLE = "driftlab: round-off, unstable training, or a bug in the rewrite"

# float64 stands behind the others, of which W&B shows those that a run has.
_NARROWER = [precision for precision in TRAINED_IN if precision != "float64"]
# What a distance is measured on, or anything else between two arms; against which, the names say.
DRIFTING = (
    *(f"{role}.{p}" for p in (*_NARROWER, "float64") for role in ("candidate", "control")),
    *(f"reference.{p}" for p in _NARROWER),
)
# What of the others tells most.
NARROW = tuple(f"{role}.{p}" for p in _NARROWER for role in ("reference", "candidate", "control"))

# What a seed tells of its local windows, at the step where each begins.
LOCAL = (
    replace(
        WEIGHT_DISTANCE, name="local/weight_distance", title="Weight distance at the end of a local window"
    ),
    replace(
        WEIGHT_DISTANCE,
        name="local/growth",
        title="Growth of it, an update",
        unit="factor",
        scale=Scale.VALUE,
    ),
)

# The data set stands beside every verdict: a stand-in must not be taken for the real one. W&B's own names of
# columns: `.value` comes after the first part of a config key.
COLUMNS = (
    *("summary:verdict", "summary:headline", "summary:expected", "summary:seeds"),
    *("summary:where.module", "summary:where.pass", "summary:where.step"),
    *("config:name.value", "config:label.value", "config:digest.value", "config:seed.value"),
    *("config:dataset.value.name", "config:dataset.value.stand_in"),
    *("config:device.value", "config:scale.value.name"),
)


def workspace(project: str, entity: str) -> ws.Workspace:
    """Verdicts on top, then a section for each group of curves; runs in groups of one experiment's digest."""
    return ws.Workspace(
        entity=entity,
        project=project,
        name="driftlab",
        sections=[
            ws.Section("Verdicts", _verdicts(), is_open=True),
            *(ws.Section(name, charts, is_open=True) for name, charts in _sections()),
        ],
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=100),
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Metric("Group")],
            pinned_columns=list(COLUMNS),
        ),
    )


def report(project: str, entity: str) -> wr.Report:
    """The same to read from top to bottom, with the words that it takes."""

    def grid(job_type: str, panels: list) -> wr.PanelGrid:
        runs = wr.Runset(  # of the report's own project
            name=f"{job_type}s",
            filters=f"JobType = '{job_type}'",
            pinned_columns=list(COLUMNS),
        )
        return wr.PanelGrid(runsets=[runs], panels=panels)

    blocks = [wr.MarkdownBlock(INTRODUCTION), wr.H2("Verdicts"), grid("verdict", _verdicts())]
    for name, charts in _sections():
        blocks += [wr.H2(name), grid("seed", charts)]
    return wr.Report(
        project=project,
        entity=entity,
        title=TITLE,
        description="Verdicts and curves of every experiment in the project.",
        blocks=blocks,
        width="fluid",
    )


def specs(space: ws.Workspace, page: wr.Report) -> dict[str, dict]:
    """What would be sent, as JSON can hold it."""
    written = {"workspace": space._to_model(), "report": page._to_model()}
    return {name: model.model_dump(mode="json", by_alias=True) for name, model in written.items()}


def saved(space: ws.Workspace, page: wr.Report, space_url: str | None, page_url: str | None) -> list[str]:
    """Send both to W&B, in place of those at the two addresses where they are given; where they are now."""
    if space_url:
        earlier = ws.Workspace.from_url(space_url)
        space._internal_name, space._internal_id = earlier._internal_name, earlier._internal_id
    if page_url:
        page.id = wr.Report.from_url(page_url).id
    return [space.save().url, page.save().url]


INTRODUCTION = """\
Two networks that should compute the same function are trained in lockstep, next to a *control*: the
reference with one weight moved by one ulp, which differs by rounding and nothing else.

- The candidate drifts as the control does, and 2^-29 times less in float64: **round-off**.
- The control diverges as the candidate does: **unstable** training.
- The candidate leaves its control in float64: a **bug**, in the module and the pass that the verdict names.

Charts are sampled by W&B and leave out NaN and inf; all rows are in `curves.csv`. Column `dataset.stand_in`
says where a drawn stand-in took the place of the images.
"""


def _verdicts() -> list:
    wide = {"w": 24, "x": 0}
    return [
        wr.WeavePanelSummaryTable(table_name="evidence", layout=wr.Layout(y=0, h=10, **wide)),
        wr.MediaBrowser(title="Report", media_keys=["report"], layout=wr.Layout(y=10, h=16, **wide)),
    ]


def _sections() -> Iterator[tuple[str, list[wr.LinePlot]]]:
    """Name and charts of each; local drift stands behind the free-running one."""
    for name, drawn in by_section().items():
        yield name, list(_charts(drawn))
        if name == DRIFT:
            yield "Local windows", list(_charts(LOCAL))


def _arms(measure: Measure) -> Iterable[str]:
    if measure.dtype:
        return [arm for arm in NARROW if arm.endswith(f".{measure.dtype}")]
    return DRIFTING if measure.compared else NARROW


def _charts(drawn: Iterable[Measure]) -> Iterable[wr.LinePlot]:
    """A distance of exactly 0 has no place on a logarithmic axis: curves.csv holds it."""
    for place, measure in enumerate(drawn):
        yield wr.LinePlot(
            title=measure.label,
            x="step",
            y=[f"{measure.name}/{arm}" for arm in _arms(measure)],
            log_y=measure.logarithmic,
            title_x="step (updates)",
            title_y=measure.label,
            groupby=wr.Config("run"),
            groupby_aggfunc="median",
            groupby_rangefunc="minmax",
            smoothing_factor=0,
            max_runs_to_show=100,
            layout=wr.Layout(x=12 * (place % 2), y=10 * (place // 2), w=12, h=10),
        )
