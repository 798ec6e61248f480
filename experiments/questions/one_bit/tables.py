"""The two tables: rows by measures with intervals, and what differs from the published experiment."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig

from driftlab.report.sections import Table
from experiments.questions.one_bit.intervals import LEVEL, Estimate
from experiments.questions.one_bit.summary import PUBLISHED, THEIR_EPOCHS, THEIR_RUNS, Summary
from experiments.questions.one_bit.words import between

COLUMNS = {
    "row": "varied from run to run",
    "n": "runs (n)",
    "accuracy": "accuracy, mean (%)",
    "spread": "accuracy SD (points)",
    "disagreement": "disagreement of two runs (%)",
    "over_all": "over that of all three (ratio)",
    "correlation": "correlation of two runs (Spearman)",
    "gain": "gain of two averaged (points)",
    "published": "published: SD, disagreement, correlation",
}


def variation(found: Mapping[str, Summary]) -> Table:
    """One line a row, each measure with its interval."""
    rows = [_line(summary) for summary in found.values()]
    return Table("variation", "What each source of variation does", COLUMNS, rows, _conclusion(found))


def _line(s: Summary) -> dict:
    published = PUBLISHED.get(s.key)
    return {
        "row": s.row.name,
        "n": s.runs.n,
        "accuracy": None if s.accuracy is None else f"{s.accuracy:.1f}",
        "spread": _cell(s.spread, 2),
        "disagreement": _cell(s.disagreement, 1),
        "over_all": None if s.key == "all" else _cell(s.over_all, 3),
        "correlation": _cell(s.correlation, 3),
        "gain": _cell(s.gain, 2),
        "published": published
        and f"{published.spread:g}, {published.disagreement:g} %, {published.correlation:g}",
    }


def _cell(found: Estimate, digits: int) -> str | None:
    return None if found.value is None else f"{found.value:.{digits}f}" + between(found, digits)


def _conclusion(found: Mapping[str, Summary]) -> str:
    others = [s for s in found.values() if s.key not in ("nothing", "all") and s.told_apart is not None]
    alike = [s.row.name for s in others if not s.told_apart]
    unlike = [f"{s.row.name} ({s.over_all.value:.3f} times)" for s in others if s.told_apart]
    same = sum(len(s.runs.same_as_base) for s in found.values() if s.row.round_off)
    parts = [
        f"Not to be told from all three together by disagreement: {', '.join(alike)}." if alike else "",
        f"Told apart: {', '.join(unlike)}{_by_chance(len(others))}." if unlike else "",
        f"{same} of the runs that differ by round-off alone ended as with nothing varied." if same else "",
        f"In brackets {100 * LEVEL:.0f} % intervals over runs (jackknife); the rest is the same in all runs.",
    ]
    return " ".join(part for part in parts if part)


def _by_chance(comparisons: int) -> str:
    """How often so many 95 % intervals tell equal rows apart: at most the sum of each (Bonferroni)."""
    most = min(1.0, comparisons * (1 - LEVEL))
    return f"; {comparisons} comparisons of equal rows tell one apart in up to {100 * most:.0f} % of cases"


def differences(settings: DictConfig, found: Mapping[str, Summary], epochs: float) -> Table:
    """The settings beside those of Summers and Dinneen's code."""
    pixels = (
        "32 x 32" if settings.shrink == 1 else f"averaged over {settings.shrink} x {settings.shrink} pixels"
    )
    width = settings.model.get("width", "as set")
    theirs_and_ours = {
        "network": ("ResNet14, width 16", f"{settings.model._target_.rpartition('.')[2]}, width {width}"),
        "last scale of a block at first": ("0", "0" if settings.model.get("zero_scale", True) else "1"),
        "epochs": (str(THEIR_EPOCHS), f"{epochs:.3g}"),
        "runs a row": (str(THEIR_RUNS), str(max(s.runs.n for s in found.values()))),
        "images": ("32 x 32", pixels),
        "batch": ("512", str(settings.batch_size)),
        "peak rate, of norms and biases": ("0.4, 0.04", _rates(settings)),
        "warm-up (epochs)": ("3", f"{epochs * settings.warmup_steps / settings.steps:.2g}"),
        "momentum, weight decay": ("0.9, 0.0005", _of_optimizer(settings)),
        "one bit": ("up or down, in the first conv", f"away from zero, in {settings.nudged or 'any layer'}"),
        "all sources": (
            "also cuDNN's own",
            "initial weights, order, augmentation; kernels repeat themselves",
        ),
    }
    rows = [{"what": k, "theirs": t, "here": o} for k, (t, o) in theirs_and_ours.items() if t != o]
    columns = {"what": "setting", "theirs": "published (ICML 2021)", "here": "here"}
    same = [k for k, (t, o) in theirs_and_ours.items() if t == o]
    alike = f"Alike: {', '.join(same)}. " if same else ""
    said = (
        f"{alike}SGD with a cosine to 0, crops and flips are theirs too. Their code keeps the last, partial "
        "batch, and divides pixels by other deviations. It prints Spearman's and Pearson's correlation; the "
        "published one is taken for Spearman's."
    )
    return Table("differences", "What differs from the published experiment", columns, rows, said)


def _rates(settings: DictConfig) -> str:
    return f"{settings.optimizer.lr:g}, {settings.optimizer.lr * settings.norm_rate:g}"


def _of_optimizer(settings: DictConfig) -> str:
    found = [settings.optimizer.get(key) for key in ("momentum", "weight_decay")]
    return ", ".join("none" if value is None else f"{value:g}" for value in found)
