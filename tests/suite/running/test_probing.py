"""What a seed was probed by: mistakes that are said, other instruments, probing again without training."""

import json

import pytest

from driftlab.probes import function
from suite.command.errors import ConfigurationError
from tests.suite.programs import ONE_BLOCK

EXPERIMENT = ("+experiment=split_conv", ONE_BLOCK, "device=cpu", "workers=1", "dtypes=[float32]", "steps=6")


def mistaken(*_, **__):
    return no_such_name  # noqa: F821


def use_instruments(monkeypatch, name):
    for module in ("asked_once", "experiment_folder", "probing", "run_record"):
        monkeypatch.setattr(f"suite.running.{module}.instruments", lambda: name)


def one(tmp_path, name):
    (file,) = tmp_path.rglob(name)
    return file


def test_a_probe_that_fails_is_printed_and_ends_inconclusive(judged, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(function, "_same", mistaken)
    verdict = judged(*EXPERIMENT)
    assert verdict["verdict"] == "inconclusive"
    assert "driftlab's own" in verdict["headline"]
    assert [e["status"] for e in verdict["evidence"] if e["probe"] == "function"] == ["failed"]
    assert "the probe function failed in driftlab's own code" in " ".join(capsys.readouterr().out.split())
    assert "no_such_name" in one(tmp_path, "report.html").read_text()


def test_other_instruments_are_said_and_probe_again_without_training(judged, monkeypatch, capsys, tmp_path):
    use_instruments(monkeypatch, "older")
    first = judged(*EXPERIMENT)
    run = one(tmp_path, "run.json")
    before, curves = json.loads(run.read_text()), one(tmp_path, "curves.csv").read_bytes()
    assert before["instruments"] == "older"

    use_instruments(monkeypatch, "newer")
    capsys.readouterr()
    judged(*EXPERIMENT)
    said = " ".join(capsys.readouterr().out.split())
    assert "seed 0 finished under other instruments than today's: reprobe=true" in said
    assert json.loads(run.read_text()) == before

    monkeypatch.setattr("suite.running.seed_run.fit", mistaken)
    again = judged(*EXPERIMENT, "reprobe=true")
    after = json.loads(run.read_text())
    assert after["instruments"] == "newer"
    assert one(tmp_path, "curves.csv").read_bytes() == curves
    assert after["probes"] == before["probes"]
    assert again["evidence"] == first["evidence"]
    judged(*EXPERIMENT, "reprobe=true")  # nothing is left to probe
    assert json.loads(run.read_text()) == after


def test_of_several_seeds_one_is_asked_what_lies_off_the_path(judged, tmp_path):
    judged(*EXPERIMENT, "seed=0..1")
    (home,) = (path.parent for path in tmp_path.rglob("experiment.yaml"))
    first, second = (json.loads((home / f"seed={n}" / "run.json").read_text())["probes"] for n in (0, 1))
    off_path = [p["probe"] for p in first if p["off_path"]]
    assert {"fewer_samples", "rewritten_modules", "update"} <= set(off_path)
    for own, other in zip(first, second, strict=True):
        if own["probe"] in off_path and own["status"] == "answered":
            assert own == other
            assert other["reading"].endswith("; asked once, of seed 0")
        else:
            assert "asked once" not in own["reading"] + other["reading"]
    asked = {p["probe"]: p["measured"] for p in first}
    assert [p["probe"] for p in second if p["measured"] != asked[p["probe"]]]  # weights of its own


def test_probing_again_asks_for_the_checkpoint_of_the_end(judged, monkeypatch, tmp_path):
    use_instruments(monkeypatch, "older")
    judged(*EXPERIMENT, "keep_checkpoint=false")
    before = one(tmp_path, "run.json").read_bytes()
    use_instruments(monkeypatch, "newer")
    with pytest.raises(ConfigurationError, match=r"seed 0 has no checkpoint of its end.*rerun=true"):
        judged(*EXPERIMENT, "keep_checkpoint=false", "reprobe=true")
    assert one(tmp_path, "run.json").read_bytes() == before
