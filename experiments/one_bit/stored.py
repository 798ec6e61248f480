"""What the seeds stored of their runs, and how those vary: their accuracy, and what two of them agree on.

The measures of Summers and Dinneen, "Nondeterminism and instability in neural network optimization"
(ICML 2021), as their code defines them: disagreement of classes, Spearman's correlation of all logits, the
accuracy of two averaged networks (their logits) less that of each.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from suite.showing.wording import Values, first_of


def packed(array: np.ndarray, dtype: str) -> dict:
    """``array`` in little-endian ``dtype`` ("i2", "f2") as base64 with its shape: compact, and JSON."""
    little = np.ascontiguousarray(array, dtype=f"<{dtype}")
    text = base64.b64encode(little.tobytes()).decode()
    return {"dtype": dtype, "shape": list(little.shape), "base64": text}


def unpacked(stored: dict) -> np.ndarray:
    """What ``packed`` was given, in the precision that it was stored in. Raises ValueError where damaged."""
    flat = np.frombuffer(base64.b64decode(stored["base64"], validate=True), dtype=f"<{stored['dtype']}")
    return flat.reshape(stored["shape"])


@dataclass(frozen=True)
class Runs:
    """The finite runs of one row.

    Attributes:
        seeds: of the runs, in order.
        classes: predicted, int [runs, images].
        logits: float [runs, images, classes].
        labels: int [images].
        blown_up: the seeds whose training was not finite; they are in none of the arrays.
        same_as_base: the seeds whose weights ended bit for bit as with nothing varied.
        endings: how many different weights, bit for bit, the finite runs ended at.
    """

    seeds: list[int]
    classes: np.ndarray
    logits: np.ndarray
    labels: np.ndarray
    blown_up: list[int]
    same_as_base: list[int]
    endings: int

    @property
    def n(self) -> int:
        return len(self.seeds)

    @cached_property
    def accuracies(self) -> np.ndarray:
        """Test accuracy of each run, percent."""
        return 100 * (self.classes == self.labels).mean(axis=1)

    @cached_property
    def disagreements(self) -> np.ndarray:
        """[runs, runs]: share of test images on which two runs predict different classes, percent."""
        return _pairwise(self.n, lambda i, j: 100 * (self.classes[i] != self.classes[j]).mean())

    @cached_property
    def correlations(self) -> np.ndarray:
        """[runs, runs]: Spearman's rank correlation of two runs' logits, all images and classes in one."""
        ranks = [_standard_ranks(logits.ravel()) for logits in self.logits]
        return _pairwise(self.n, lambda i, j: float(ranks[i] @ ranks[j]))

    @cached_property
    def gains(self) -> np.ndarray:
        """[runs, runs]: accuracy of the mean of two runs' logits less their mean accuracy, points.

        All three from the logits as they are stored, in 11 bits, where a few images have two largest ones.
        """
        alone = (self.logits.argmax(axis=2) == self.labels).mean(axis=1)

        def gain(i: int, j: int) -> float:
            together = (self.logits[i] + self.logits[j]).argmax(axis=1)
            return 100 * ((together == self.labels).mean() - alone[[i, j]].mean())

        return _pairwise(self.n, gain)


def runs_of(values: Values, key: str) -> Runs:
    """All seeds' runs of one row."""
    rows = {seed: v["rows"][key] for seed, v in values.items()}
    kept = [seed for seed, row in rows.items() if row["finite"]]
    labels = unpacked(first_of(values)["labels"])
    classes = [unpacked(rows[s]["classes"]) for s in kept]
    logits = [unpacked(rows[s]["logits"]).astype(np.float32) for s in kept]
    return Runs(
        kept,
        np.array(classes).reshape(len(kept), len(labels)),
        np.array(logits).reshape(len(kept), len(labels), -1) if kept else np.zeros((0, len(labels), 1)),
        labels,
        [seed for seed in rows if seed not in kept],
        [seed for seed in kept if rows[seed]["weights"] == values[seed]["rows"]["nothing"]["weights"]],
        len({rows[seed]["weights"] for seed in kept}),
    )


def _pairwise(n: int, of: Callable[[int, int], float]) -> np.ndarray:
    """A symmetric matrix of ``of(i, j)``; its diagonal, where a run would meet itself, is NaN."""
    matrix = np.full((n, n), np.nan)
    for i, j in _pairs(n):
        matrix[i, j] = matrix[j, i] = of(i, j)
    return matrix


def _pairs(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(i)]


def _standard_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks with mean 0 and length 1, equal numbers sharing their mean rank; zeros where all are equal."""
    _, places, counts = np.unique(x, return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum() - (counts - 1) / 2
    ranks = mean_rank[places] - (len(x) + 1) / 2
    length = np.linalg.norm(ranks)
    return ranks / length if length else ranks


def curves(values: Values, key: str) -> np.ndarray:
    """Mean disagreement over the pairs of finite runs at each look on the way, percent; empty where none."""
    seen = _seen(values, key)
    if len(seen) < 2:
        return np.zeros(0)
    return 100 * np.mean([(seen[i] != seen[j]).mean(axis=1) for i, j in _pairs(len(seen))], axis=0)


def accuracy_curve(values: Values, key: str) -> np.ndarray:
    """Mean accuracy of the finite runs at each look, percent; empty where none.

    On the images of a look whose labels are stored: those of the end (``eval_images``) may be fewer.
    """
    seen = _seen(values, key)
    if not len(seen):
        return np.zeros(0)
    labels = unpacked(first_of(values)["labels"])
    images = min(len(labels), seen.shape[-1])
    return 100 * (seen[..., :images] == labels[:images]).mean(axis=(0, 2))


def _seen(values: Values, key: str) -> np.ndarray:
    """Classes, int [finite runs, looks, images]."""
    rows = [v["rows"][key] for v in values.values() if v["rows"][key]["finite"]]
    return np.array([unpacked(row["on_the_way"]) for row in rows])
