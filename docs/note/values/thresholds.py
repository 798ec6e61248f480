"""What driftlab's thresholds are made of, and what the tables say of each."""

from __future__ import annotations

from math import erfc, sqrt

from docs.note.values.published import exponent, proportion, rows, short, thousands
from driftlab.finite.differences import LIMIT
from driftlab.probes.random_streams import DRAWS, SIGMAS
from driftlab.rounding import (
    BESIDE_16_BITS,
    HALFWAY,
    HALFWAY_BITS,
    NARROWER,
    UNIT_IN_16_BITS,
    UNIT_ROUND_OFF,
)
from driftlab.verdict.outcomes import FALLEN, SIGNIFICANT

U32, U64 = UNIT_ROUND_OFF["float32"], UNIT_ROUND_OFF["float64"]
FIRST_UPDATE = "float64 drift after one update"
SAME = ("control", "right")


def numbers() -> dict[str, object]:
    return _derived() | {
        "first_update": _first_update(),
        "half": _fewer_bits_in_half(),
        "bound": _bound(),
        "integers": _integers(),
    }


def _derived() -> dict[str, str]:
    half, bfloat = UNIT_IN_16_BITS["16"], UNIT_IN_16_BITS["bf16"]
    return {
        "unit_float32": exponent(U32),
        "unit_float64": exponent(U64),
        "units": exponent(U64 / U32),
        "wider": exponent(U32 / U64),
        "halfway": exponent(HALFWAY),
        "halfway_value": thousands(HALFWAY),
        "least": short(HALFWAY * U64),
        "bits_float32": exponent(1 / U32),
        "bits_half": exponent(1 / half),
        "bits_bfloat": exponent(1 / bfloat),
        "lost_bits": exponent(half / U32),
        "halfway_bits": exponent(HALFWAY_BITS),
        "halfway_bits_value": short(HALFWAY_BITS, 3),
        "unit_bfloat": exponent(bfloat),
        "beside_half": short(BESIDE_16_BITS),
        "beside_half_exponent": exponent(BESIDE_16_BITS),
        "narrower": short(NARROWER),
        "sigmas": short(SIGMAS),
        "draws": f"{DRAWS}",
        "chance": short(erfc(SIGMAS / sqrt(2))),
        "diverged": short(FALLEN),
        "significant": short(SIGNIFICANT),
        "gradient_limit": short(LIMIT),
    }


def _first_update() -> dict[str, str]:
    """After one update, next to the control of the same seed: where the threshold lies between."""
    seeds = rows("loss_curves_do_not_tell/tables/seeds.csv")
    control = {row["seed"]: float(row[FIRST_UPDATE]) for row in seeds if row["network"] == "control"}
    beside = [(row["network"], float(row[FIRST_UPDATE]) / control[row["seed"]]) for row in seeds]
    right = [ratio for name, ratio in beside if name == "right"]
    wrong = [ratio for name, ratio in beside if name not in SAME]
    return {
        "right": short(max(right), 3),
        "right_n": f"{len(right)}",
        "wrong": short(min(wrong)),
        "wrong_n": f"{len(wrong)}",
    }


def _fewer_bits_in_half() -> dict[str, str]:
    """The least error beside the reference's among the pairs that do compute in fewer bits."""
    cases = rows("low_precision/cases.csv")
    fewer = [r for r in cases if r["label"] == "fewer_bits" and r["said"] == "fewer_bits" and r["measured"]]
    return {"least": short(min(float(r["measured"]) for r in fewer), 3), "n": f"{len(fewer)}"}


def _bound() -> dict[str, object]:
    """The share of the a-priori bound that right rewrites of convolutions use up."""
    sweep = rows("group_semantics/tables/sweep.csv")
    used = [float(r["largest share of the bound, entry by entry"]) for r in sweep]
    n = sum(int(r["convolutions (count)"]) for r in sweep)
    return {"most": short(max(used)), "n": thousands(n)}


def _integers() -> dict[str, str]:
    sweep = rows("group_semantics/tables/sweep.csv")
    equal = sum(int(r["integers equal in every bit (count)"]) for r in sweep)
    return proportion(equal, sum(int(r["integers asked (count)"]) for r in sweep))
