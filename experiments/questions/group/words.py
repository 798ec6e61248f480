"""How the answer about groups says counts, shares and kinds of channels."""

from __future__ import annotations

ASKED = "the conv asked about"
PLAIN, GROUPED, INTERLEAVED = "groups=1", "grouped", "interleaved"


def kind_label(kind: str, groups: int) -> str:
    return {PLAIN: PLAIN, GROUPED: f"groups={groups}", INTERLEAVED: f"groups={groups}, interleaved"}[kind]


def seeds_text(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def percent(share: float) -> str:
    """Never rounded to 100 %, or to 0, where it is not."""
    if 0 < share < 1:
        share = min(max(share, 1e-4), 0.9999)
    return f"{100 * share:.4g} %"


def between(low: float, high: float) -> str:
    """Two numbers as a range, or as one where they read the same."""
    texts = f"{low:.2g}", f"{high:.2g}"
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"
