"""What the trainings showed: kinks, one bit, loss curves, the edge of stability, lockstep."""

from __future__ import annotations

import re
from statistics import median

from docs.note.values.published import (
    Row,
    parts,
    proportion,
    ranged,
    row,
    rows,
    share,
    short,
    spread,
    thousands,
)

KINKS = {"relu": "ReLU, max-pool", "silu_max": "SiLU, max-pool", "silu": "SiLU, average-pool"}
VARIED = {"bit": "one ulp in one weight", "split": "convs split", "all": "all three", "none": "nothing"}
ARMS = {"control": "control", "candidate": "candidate (split_conv)"}
BUG = "bug (split_linear_with_every_bias)"
EDGE = "edge_of_stability/tables/edge_by_"
LOCKSTEP = "lockstep_curves/tables/arms.csv"
ARMS_APART = {"distance": "weight distance at the end (relative)", "apart": "disagreement (% of test images)"}
PAIRS = ("candidate.float32", "control.float32", "candidate.float64", "control.float64")


def numbers() -> dict[str, dict]:
    return {
        "kinks": _kinks(),
        "one_bit": _one_bit("one_bit"),
        "one_bit_longer": _one_bit("one_bit_ten_epochs"),
        "losses": _losses(),
        "edge": _edge(),
        "lockstep": _lockstep(),
    }


def _kinks() -> dict:
    networks = {key: _network(row("kinks/tables/drift.csv", network=name)) for key, name in KINKS.items()}
    signs = row("kinks/tables/flips.csv", what_changes="signs, ReLU")
    return networks | {
        "ratio": spread(signs["counted / predicted, median (middle 90 %)"]),
        "steps": signs["steps with 10 or more"],
    }


def _network(found: Row) -> dict:
    return {
        "seeds": proportion(*parts(found["seeds with a flip"])),
        "before": spread(found["growth of float32 drift in the 5 steps before it (times a step)"]),
        "after": spread(found["in the 5 steps after it"]),
        "float64": spread(found["of float64 drift, same steps"]),
        "ratio": spread(found["float64 / float32 drift before the flip"].replace("2^", "")),
    }


def _one_bit(page: str) -> dict:
    table = f"{page}/tables/variation.csv"
    found = {key: row(table, varied_from_run_to_run=name) for key, name in VARIED.items()}
    ratio = "over that of all three (ratio)"
    apart = "disagreement of two runs (%)"
    numbers = {
        k: {"apart": spread(found[k][apart]), "runs": found[k]["runs (n)"]} for k in ("bit", "split", "all")
    }
    numbers |= {"nothing": found["none"][apart], "accuracy": short(float(found["all"]["accuracy, mean (%)"]))}
    for key in ("bit", "split"):
        numbers[key]["ratio"] = spread(found[key][ratio])
    published = "published: SD, disagreement, correlation"
    return (
        numbers
        | {f"published_{k}": re.search(r"([\d.]+) %", found[k][published])[1] for k in ("bit", "all")}
        | {
            "epochs": _setting(page, "epochs", "here"),
            "published_epochs": _setting(page, "epochs", "published (ICML 2021)"),
        }
    )


def _setting(page: str, name: str, column: str) -> str:
    return row(f"{page}/tables/differences.csv", setting=name)[column]


def _losses() -> dict:
    """How many wrong networks end as near to the reference as a right one does."""
    seeds = rows("loss_curves_do_not_tell/tables/seeds.csv")
    right = [r for r in seeds if r["network"] in ("control", "right")]
    wrong = [r for r in seeds if r["network"] not in ("control", "right")]
    ends = {"loss": "final training loss off (%)", "accuracy": "test accuracy off (points)"}
    hidden = {}
    for key, column in ends.items():
        most = max(abs(float(r[column])) for r in right)
        hidden[key] = share(abs(float(r[column])) <= most for r in wrong)
    drift = "float64 drift at the end"
    apart = min(float(r[drift]) for r in wrong) / max(float(r[drift]) for r in right)
    return hidden | {
        "seeds": f"{len({r['seed'] for r in seeds})}",
        "faults": f"{len({r['network'] for r in wrong})}",
        "apart": short(apart, 1),
    }


def _edge() -> dict:
    rates = [r for r in rows(f"{EDGE}rate.csv") if 0 < int(r["reference diverged (of 20)"]) < 20]
    half = min(rates, key=lambda r: abs(int(r["reference diverged (of 20)"]) - 10))
    worst = max(rates, key=lambda r: parts(r["only reference / only bug diverged"])[1])
    arm = {key: row(f"{EDGE}arm.csv", arm=name) for key, name in (ARMS | {"bug": BUG}).items()}
    column = f"ends unlike the reference at {half['learning rate']} (95 % interval)"
    return {
        "rate": half["learning rate"],
        "reference": half["reference diverged (of 20)"],
        **{key: proportion(*parts(arm[key][column])) for key in ARMS},
        **{f"p_{key}": short(float(found["p, all rates"])) for key, found in arm.items()},
        "bug_rate": worst["learning rate"],
        "bug": worst["bug diverged (of 20)"],
        "bug_reference": worst["reference diverged (of 20)"],
        "bug_found": arm["bug"]["called a bug by the probes (of 20)"],
        "candidate_found": arm["candidate"]["called a bug by the probes (of 20)"],
        "seeds": f"{parts(arm['control'][column])[1]}",
    }


def _lockstep() -> dict:
    """How far the arms are from their reference at the end, and how well they do: medians and ranges."""
    found = {}
    for arm in (*PAIRS, "reference.float32"):
        seeds = [r for r in rows(LOCKSTEP) if r["arm"] == arm]
        key = arm.replace(".", "_")
        found[key] = {
            "accuracy": _over(seeds, "test accuracy (%)"),
            "steps": thousands(int(seeds[0]["steps"])),
        }
        if arm in PAIRS:
            found[key] |= {name: _over(seeds, column) for name, column in ARMS_APART.items()} | _flips(seeds)
    return found | {"seeds": f"{len(seeds)}"}


def _over(seeds: list[Row], column: str) -> dict[str, str]:
    values = [float(r[column]) for r in seeds]
    return {"mid": short(median(values), 3), **ranged(values)}


def _flips(seeds: list[Row]) -> dict:
    """In how many seeds a sign changed, and when where it is one step."""
    steps = [r["first sign flip (step)"] for r in seeds if r["first sign flip (step)"]]
    return {"flipped": proportion(len(steps), len(seeds)), "flip": steps[0] if len(set(steps)) == 1 else ""}
