"""The answer to ``one_bit``: what one bit does beside everything else, from the stored predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from driftlab.report.sections import Answer, Table
from experiments.one_bit.figures import variation_figure
from experiments.one_bit.rows import ROWS
from experiments.one_bit.stored import accuracy_curve, curves
from experiments.one_bit.summary import (
    LEVEL,
    PUBLISHED,
    THEIR_EPOCHS,
    THEIR_RUNS,
    Estimate,
    Summary,
    disagreement_ratio,
    summaries,
)
from experiments.one_bit.training import look_steps
from suite.showing.wording import Column, Values, first_of, sentences, table


def answer(settings: DictConfig, values: Values) -> Answer:
    """From at least one seed; pairs are formed across seeds."""
    found = summaries(values)
    epochs = settings.steps / (first_of(values)["train_images"] // settings.batch_size)
    looks = look_steps(settings.steps, settings.progress.points)
    seen = {key: curves(values, key) for key in ROWS if key != "nothing"}
    figure = variation_figure(found, looks, seen, settings.progress.images)
    right = accuracy_curve(values, "all")
    on_the_way = _on_the_way(looks, epochs, seen, right, settings)
    tables = [_variation(found), on_the_way, _differences(settings, found, epochs)]
    return Answer(sentences(_sentence(found, epochs), _falls(looks, epochs, seen, right)), tables, [figure])


def _sentence(found: Mapping[str, Summary], epochs: float) -> str:
    """One bit beside all sources, the split beside one bit, nothing varied, what limits it."""
    ulp, split, everything = (found[k] for k in ("one_ulp", "split", "all"))
    if any(s.disagreement.value is None for s in (ulp, split, everything)):
        return sentences("There are no two finished runs to compare: run more seeds.", _of_nothing(found))
    if everything.disagreement.value == 0:
        return "There is nothing to compare: not even all three sources together change a prediction."
    ratio = f"; the first is {ulp.over_all.text(3, ' times')} the second" if ulp.over_all.value else ""
    return sentences(
        f"{_verdict(ulp)}: two runs that differ in one bit of one weight disagree on "
        f"{_percent(ulp)} of the test images, two that share neither initial weights, order nor "
        f"augmentation on {_percent(everything)}{ratio}.",
        _of_split(split, ulp),
        _of_nothing(found),
        _of_blown_up(found),
        _limits(everything, epochs),
    )


def _falls(looks: Sequence[int], epochs: float, seen: Mapping, right: Sequence[float]) -> str:
    """From where disagreement by round-off is greatest to the end; nothing where it ends there."""
    apart = seen["one_ulp"]
    most = max(range(len(apart)), key=apart.__getitem__, default=0)
    if not len(apart) or not len(right) or most == len(apart) - 1:
        return ""
    epoch = epochs * looks[most] / looks[-1]
    return (
        f"While they train, two runs that differ in one bit disagree most at epoch {epoch:.2g} "
        f"({apart[most]:.0f} %, at {right[most]:.0f} % accuracy), and at the end on {apart[-1]:.0f} % "
        f"(at {right[-1]:.0f} %)."
    )


def _percent(summary: Summary) -> str:
    return summary.disagreement.text(1, " %")


def _verdict(ulp: Summary) -> str:
    if ulp.disagreement.value == 0:
        return "No"
    if ulp.told_apart is None:
        return "Too few runs to say"
    if not ulp.told_apart:
        return "Yes, as far as these runs can tell"
    return "Not quite" if ulp.over_all.high < 1 else "Yes, and more"


def _of_split(split: Summary, ulp: Summary) -> str:
    ratio = disagreement_ratio(split.runs, ulp.runs)
    opening = f"A right rewrite, convs split by chance, gives {_percent(split)}"
    if not ratio.bounded:
        return f"{opening}."
    said = "the same as one bit, as far as these runs can tell"
    if not ratio.low <= 1 <= ratio.high:
        said = f"{'more' if ratio.low > 1 else 'less'} than one bit"
    return f"{opening}, {said} ({ratio.text(3, ' times')})."


def _of_nothing(found: Mapping[str, Summary]) -> str:
    """What the runs with nothing varied say."""
    nothing = found["nothing"].runs
    if nothing.n < 2:
        return ""
    if nothing.endings == 1:
        return f"With nothing varied all {nothing.n} runs end at the same weights, bit for bit."
    return (
        f"With nothing varied {nothing.n} runs end at {nothing.endings} different weights and disagree on "
        f"{found['nothing'].disagreement.value:.1f} %: something else varies, so no row is about its source "
        "alone."
    )


def _of_blown_up(found: Mapping[str, Summary]) -> str:
    lost = [f"{s.row.name} {len(s.runs.blown_up)}" for s in found.values() if s.runs.blown_up]
    return f"Left out, because the training blew up: {', '.join(lost)}." if lost else ""


def _limits(everything: Summary, epochs: float) -> str:
    """What keeps the numbers from those that were published."""
    said = (
        f"Published, of networks trained for {THEIR_EPOCHS} epochs: {PUBLISHED['one_ulp'].disagreement:g} % "
        f"and {PUBLISHED['all'].disagreement:g} %; these trained for {epochs:.3g}, to "
        f"{everything.accuracy:.0f} % accuracy (where more is wrong, more can differ)"
    )
    known = everything.spread
    if not known.bounded or not known.low:
        return f"{said}."
    factor = math.sqrt(known.high / known.low)
    return f"{said}, and {everything.runs.n} runs tell an accuracy SD to a factor of {factor:.1f} only."


def _published(s: Summary) -> str | None:
    return "{:g}, {:g} %, {:g}".format(*PUBLISHED[s.key]) if s.key in PUBLISHED else None


COLUMNS = (
    Column("row", "varied from run to run", lambda s: s.row.name),
    Column("n", "runs (n)", lambda s: s.runs.n),
    Column("accuracy", "accuracy, mean (%)", lambda s: Estimate(s.accuracy).text(1)),
    Column("spread", "accuracy SD (points)", lambda s: s.spread.text(2)),
    Column("disagreement", "disagreement of two runs (%)", lambda s: s.disagreement.text(1)),
    Column(
        "over_all", "over that of all three (ratio)", lambda s: s.over_all.text(3) if s.key != "all" else None
    ),
    Column("correlation", "correlation of two runs (Spearman)", lambda s: s.correlation.text(3)),
    Column("gain", "gain of two averaged (points)", lambda s: s.gain.text(2)),
    Column("published", "published: SD, disagreement, correlation", _published),
)


def _variation(found: Mapping[str, Summary]) -> Table:
    """One line a row, each measure with its interval."""
    title = "What each source of variation does"
    return table("variation", title, found.values(), COLUMNS, _conclusion(found))


def _conclusion(found: Mapping[str, Summary]) -> str:
    others = [s for s in found.values() if s.key not in ("nothing", "all") and s.told_apart is not None]
    alike = [s.row.name for s in others if not s.told_apart]
    unlike = [f"{s.row.name} ({s.over_all.value:.3f} times)" for s in others if s.told_apart]
    same = sum(len(s.runs.same_as_base) for s in found.values() if s.row.round_off)
    return sentences(
        f"Not to be told from all three together by disagreement: {', '.join(alike)}." if alike else "",
        f"Told apart: {', '.join(unlike)}{_by_chance(len(others))}." if unlike else "",
        f"{same} of the runs that differ by round-off alone ended as with nothing varied." if same else "",
        f"In brackets {100 * LEVEL:.0f} % intervals over runs (jackknife); the rest is the same in all runs.",
    )


def _by_chance(comparisons: int) -> str:
    """How often so many 95 % intervals tell equal rows apart: at most the sum of each (Bonferroni)."""
    most = min(1.0, comparisons * (1 - LEVEL))
    return f"; {comparisons} comparisons of equal rows tell one apart in up to {100 * most:.0f} % of cases"


def _on_the_way(
    looks: Sequence[int],
    epochs: float,
    seen: Mapping[str, Sequence[float]],
    right: Sequence[float],
    settings: DictConfig,
) -> Table:
    """Disagreement (``seen``) beside accuracy (``right``), percent at each of ``looks``, while they train."""
    rows = {"one_ulp": "one ulp in one weight", "all": "all three"}
    lines = range(len(looks)) if all(len(seen[key]) for key in rows) else ()
    columns = [
        Column("updates", "updates", lambda i: looks[i]),
        Column("epoch", "epoch", lambda i: f"{epochs * looks[i] / looks[-1]:.2g}"),
        Column("accuracy", "accuracy, all three (%)", lambda i: f"{right[i]:.1f}"),
        *(
            Column(key, f"disagreement, {words} (%)", lambda i, key=key: f"{seen[key][i]:.1f}")
            for key, words in rows.items()
        ),
    ]
    images, known = settings.progress.images, settings.eval_images
    said = f"Means over runs and their pairs, on the first {images:,} test images"
    said += f"; the accuracy on the first {known:,}." if known and known < images else "."
    return table("on_the_way", "Disagreement as the accuracy rises", lines, columns, said)


def _differences(settings: DictConfig, found: Mapping[str, Summary], epochs: float) -> Table:
    """The settings beside those of Summers and Dinneen's code."""
    shrink, model, rate = settings.shrink, settings.model, settings.optimizer.lr
    of_optimizer = [settings.optimizer.get(key) for key in ("momentum", "weight_decay")]
    theirs_and_ours = {
        "network": (
            "ResNet14, width 16",
            f"{model._target_.rpartition('.')[2]}, width {model.get('width', 'as set')}",
        ),
        "last scale of a block at first": ("0", "0" if model.get("zero_scale", True) else "1"),
        "epochs": (str(THEIR_EPOCHS), f"{epochs:.3g}"),
        "runs a row": (str(THEIR_RUNS), str(max(s.runs.n for s in found.values()))),
        "images": ("32 x 32", "32 x 32" if shrink == 1 else f"averaged over {shrink} x {shrink} pixels"),
        "batch": ("512", str(settings.batch_size)),
        "peak rate, of norms and biases": ("0.4, 0.04", f"{rate:g}, {rate * settings.norm_rate:g}"),
        "warm-up (epochs)": ("3", f"{epochs * settings.warmup_steps / settings.steps:.2g}"),
        "momentum, weight decay": (
            "0.9, 0.0005",
            ", ".join("none" if value is None else f"{value:g}" for value in of_optimizer),
        ),
        "one bit": ("up or down, in the first conv", f"away from zero, in {settings.nudged or 'any layer'}"),
        "all sources": (
            "also cuDNN's own",
            "initial weights, order, augmentation; kernels repeat themselves",
        ),
    }
    rows = [{"what": k, "theirs": t, "here": o} for k, (t, o) in theirs_and_ours.items() if t != o]
    columns = {"what": "setting", "theirs": "published (ICML 2021)", "here": "here"}
    same = [k for k, (t, o) in theirs_and_ours.items() if t == o]
    said = sentences(
        f"Alike: {', '.join(same)}." if same else "",
        "SGD with a cosine to 0, crops and flips are theirs too. Their code keeps the last, partial batch, "
        "and divides pixels by other deviations. It prints Spearman's and Pearson's correlation; the "
        "published one is taken for Spearman's.",
    )
    return Table("differences", "What differs from the published experiment", columns, rows, said)
