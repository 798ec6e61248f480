"""Text that needs no download: sentences of a small grammar, drawn from a seed, letter by letter."""

from __future__ import annotations

import numpy as np
import torch

from suite.data.images import DataError
from suite.data.text import Windows

GRAMMAR = {
    "sentence": ("{noun phrase} {verb} {noun phrase}. ", "{noun phrase} {verb} that {sentence}"),
    "noun phrase": ("the {noun}", "a {adjective} {noun}", "the {noun} of {noun phrase}"),
    "noun": ("gradient", "weight", "kernel", "matrix", "bit", "seed", "curve", "layer"),
    "adjective": ("small", "wrong", "right", "late", "sparse", "old"),
    "verb": ("moves", "sums", "rounds", "follows", "splits", "sees"),
}
LETTERS = tuple(" .abcdefghijklmnopqrstuvwxyz")


class Grammar(Windows):
    """Windows of a text of this grammar.

    Args:
        train: the training or the test text, drawn from streams of their own.
        count: windows.
        context: tokens of each.
        seed: of the text, whatever the seed of a training.

    Raises:
        DataError: a number is below 1.
    """

    def __init__(self, train: bool = True, count: int = 4000, context: int = 32, seed: int = 0):
        if min(count, context) < 1:
            raise DataError(f"grammar: count={count}, context={context}: give at least 1 of each")
        dice = np.random.Generator(np.random.Philox(key=np.array([seed, train], dtype=np.uint64)))
        own, length = {letter: i for i, letter in enumerate(LETTERS)}, count * context + 1
        letters: list[int] = []
        while len(letters) < length:
            letters += [own[letter] for letter in sentence(dice)]
        super().__init__(torch.tensor(letters[:length]), context, LETTERS)


def sentence(dice: np.random.Generator, symbol: str = "sentence", depth: int = 0) -> str:
    """One drawn from the grammar; the deeper, the rather the first way to go on, so that it ends."""
    ways = GRAMMAR[symbol]
    ends = symbol in ("sentence", "noun phrase") and depth > 4
    text = ways[0] if ends else ways[int(dice.integers(len(ways)))]
    while "{" in text:
        before, _, rest = text.partition("{")
        inner, _, behind = rest.partition("}")
        text = before + sentence(dice, inner, depth + 1) + behind
    return text
