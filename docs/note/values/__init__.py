"""The numbers of the note: one group a file, each from committed tables or from driftlab's own constants.

``numbers()`` is all of them as text, as the note prints it. ``docs/note/build.py`` writes them to
numbers.json.
"""

from __future__ import annotations

from docs.note.values import calibration, findings, habits, threads, thresholds


def numbers() -> dict[str, dict]:
    """Every number of the note, by group and name: strings, ready to print, in nested dicts."""
    return {
        "thresholds": thresholds.numbers(),
        "calibration": calibration.numbers(),
        "habits": habits.numbers(),
        "findings": findings.numbers(),
        "threads": threads.numbers(),
    }
