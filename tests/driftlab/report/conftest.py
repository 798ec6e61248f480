"""Seeds that were never trained: drift as it is measured, written and read in the public format."""

import math
import random

import pytest

from driftlab.record import seed_record as records

ROLES = ("reference", "candidate", "control")
HORIZONS = {"float64": 24, "float32": 120}


def against(role, dtype, horizons):
    if role != "reference":
        return f"reference.{dtype}"
    return "reference.float64" if dtype == "float32" and "float64" in horizons else None


def drift(dtype, step, noise, kinks):
    """It creeps, leaps four decades at the first sign flip (float32), and saturates."""
    leap = 4 * min(1.0, max(0, step - 17 - int(6 * noise)) / 15) if dtype == "float32" else 0
    start, unit = {"float32": (4e-8, 2.0**-24), "float64": (6e-17, 2.0**-53)}[dtype]
    weights = start * 10 ** (noise + leap) * (1 + step) ** 0.8 if step else 0.0
    values = {
        "weight_distance": weights,
        "gradient_distance": 3 * weights + unit,
        "logit_distance": 2 * weights,
    }
    return values | ({"sign_flips": int(10**leap) if leap else 0} if kinks else {})


def loss(step, batch, wobble, end):
    """A falling loss; in an arm that blows up, eight decades up in the last eight steps, then NaN."""
    if step == end:
        return math.nan
    growth = 10 ** max(0, step - end + 8) if end else 1
    return (2.3 * math.exp(-step / 60) + 0.1 + abs(batch) + 0.002 * min(step, 99) * wobble) * growth


def curves(seed, roles, horizons, blown, kinks, steps):
    generator = random.Random(seed)
    noise = {role: generator.random() for role in roles}
    for step in steps:
        row, batch = {"step": step, "epoch": 0}, generator.gauss(0, 0.12)
        for role, dtype in ((r, d) for d in horizons for r in roles):
            name, end = f"{role}.{dtype}", blown.get(f"{role}.{dtype}")
            if step > horizons[dtype] or (end is not None and step > end):
                continue
            row[f"loss/{name}"] = loss(step, batch, noise[role] * generator.random(), end)
            if against(role, dtype, horizons):
                values = drift(dtype, step, noise[role], kinks)
                row |= {f"{kind}/{name}": math.inf if step == end else v for kind, v in values.items()}
        yield row


def evaluation(seed, arms, step):
    row = {f"test_accuracy/{a}": 0.71 + 0.001 * (seed % 7) for a in arms}
    row |= {f"disagreement/{a}": 0.1 + 0.003 * (seed % 5) for a in arms if a != "reference.float32"}
    return {"step": step, "epoch": 0, **row}


def run(seed, roles, horizons, blown):
    def arm(role, dtype):
        end = blown.get(f"{role}.{dtype}")
        outcome = {"outcome": "finished" if end is None else "blew_up", "blown_up_at": end}
        return outcome | {"horizon": horizons[dtype], "against": against(role, dtype, horizons)}

    return {
        **{"schema": records.SCHEMA, "seed": seed, "digest": "0123456789"},
        **{"command": "python train.py", "dataset": {}},
        "arms": {f"{role}.{dtype}": arm(role, dtype) for dtype in horizons for role in roles},
        "environment": {
            "python": "3.11",
            "versions": {"torch": "2.12"},
            "device": "cpu",
            "tf32": {"cudnn": False},
        },
        "times": {"seconds": 12.5},
    }


@pytest.fixture(scope="session")
def make_seed():
    """``make_seed(folder, seed, ...)`` writes a seed and reads it back."""

    def make(folder, seed, *, roles=ROLES, horizons=HORIZONS, blown=None, kinks=True, steps=None):
        blown, home, last = blown or {}, records.seed_folder(folder, seed), max(horizons.values())
        record = run(seed, roles, horizons, blown)
        rows = curves(seed, roles, horizons, blown, kinks, steps or range(last + 1))
        records.write_table(home / "curves.csv", records.columns(records.CURVES, record["arms"]), rows)
        living = [a for a in record["arms"] if a not in blown and a.endswith("float32")]
        header = records.columns(records.EVALUATIONS, record["arms"])
        records.write_table(home / "evaluations.csv", header, [evaluation(seed, living, last)])
        records.write_json(home / "run.json", record)
        return records.read_seed(folder, seed)

    return make
