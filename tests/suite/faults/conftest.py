import json

from tests.suite.programs import ONE_BLOCK

# A training of a second or two: every step leaves a checkpoint.
TINY = "scale=smoke data=shapes logger=none steps=8 float64_steps=2 eval_every=5 eval_images=8 batch_size=4"
TRAINING = [
    *TINY.split(),
    ONE_BLOCK,
    "local={windows: [2], updates: 2}",
    "checkpoint_every=0",
    "probe_images=2",
    "threads=1",
    "workers=1",
]
QUESTION = (
    "scale=smoke logger=none faults=false case.points=4 curve.points=2 curve.decades=3 threads=1 workers=1"
)
QUESTION = QUESTION.split()


def folder_of(results):
    """The one experiment in a results folder."""
    (file,) = results.glob("*/*/experiment.yaml")
    return file.parent


def assert_same(a, b, what=""):
    """Two seeds' folders hold the same tables and the same state, to the bit."""
    import torch
    from safetensors.torch import load_file

    for name in ("curves.csv", "evaluations.csv", "local.csv"):
        if name != "local.csv" or (a / name).exists():
            assert (a / name).read_bytes() == (b / name).read_bytes(), f"{name} of {b.name} {what}"
    if (a / "checkpoint").exists():
        mine, theirs = (load_file(p / "checkpoint" / "state.safetensors") for p in (a, b))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine), f"state of {b.name} {what}"
    else:
        mine, theirs = (json.loads((p / "measurements.json").read_text()) for p in (a, b))
        assert mine == theirs, f"measurements of {b.name} {what}"
