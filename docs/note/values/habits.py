"""What people do today, on the same pairs: the pairs of real bugs, and trainings with planted faults."""

from __future__ import annotations

from docs.note.values.published import parts, proportion, rows, share, short
from driftlab.verdict.statistics import mcnemar_exact

HABITS = "real_bugs/habits.csv"
NAMES = ("outputs", "gradients", "two_updates", "loss_curves", "float64")
RULES = {
    "tail_loss": "mean loss of the last tenth of steps within 1 %",
    "outputs": "torch.isclose of the mean of the first outputs",
    "accuracy": "test accuracy within 1 point",
    "final_loss": "final training loss within 1 %",
    "allclose": "torch.allclose of all weights after one update",
    "float64": "rerun in float64: final loss equal to 4 decimals",
    "driftlab": "driftlab's verdict",
}


def numbers() -> dict[str, dict]:
    return {"real": _on_real_bugs(), "training": {key: _rule(name) for key, name in RULES.items()}}


def _on_real_bugs() -> dict:
    """The habits beside driftlab's verdicts at first sight, and how well the two can be told apart."""
    expected = {"right": "same", "wrong": "other"}
    answers = {
        name: {row["case"]: row[name] == expected[row["kind"]] for row in rows(HABITS)} for name in NAMES
    }
    kinds = {row["case"]: row["kind"] for row in rows(HABITS)}
    driftlab = {row["case"]: row["right at first sight"] == "True" for row in rows("real_bugs/cases.csv")}
    if driftlab.keys() != kinds.keys():
        raise ValueError("results/published/real_bugs: cases.csv and habits.csv are not of the same cases")
    found = {name: _score(right, kinds) for name, right in (answers | {"driftlab": driftlab}).items()}
    for name, right in answers.items():
        pairs = [(driftlab[case], right[case]) for case in kinds]
        found[name]["p"] = short(mcnemar_exact([a for a, _ in pairs], [b for _, b in pairs]))
    return found


def _score(right: dict[str, bool], kinds: dict[str, str]) -> dict:
    return {
        "right": share(right.values()),
        "not_cleared": share(not ok for case, ok in right.items() if kinds[case] == "right"),
        "not_caught": share(not ok for case, ok in right.items() if kinds[case] == "wrong"),
    }


def _rule(name: str) -> dict:
    found = next(row for row in rows("loss_curves_do_not_tell/tables/rules.csv") if row["rule"] == name)
    return {
        "right": proportion(*parts(found["right"])),
        "not_cleared": proportion(*parts(found["right networks not cleared"])),
        "not_caught": proportion(*parts(found["bugs not caught"])),
    }
