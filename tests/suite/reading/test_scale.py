"""Judging hundreds of seeds through the public format: bounded memory, a page that opens."""

from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from driftlab.record import seed_record as records
from tests.suite.conftest import ROOT

spec = spec_from_file_location("scale", ROOT / "scripts" / "scale.py")
scale = module_from_spec(spec)
spec.loader.exec_module(scale)

ROWS = 130  # as many as 80,000 steps leave


@pytest.fixture
def pattern(judged, tmp_path):
    """A seed that was really trained, with its probes and layers, and with as many rows as a long run."""
    judged("+experiment=split_conv")
    (run,) = (file.parent for file in tmp_path.rglob("experiment.yaml"))
    seed = records.read_seed(run, 0)
    last = dict(seed.curves[-1])
    longer = [*seed.curves[:-1], *(last | {"step": step} for step in range(len(seed.curves) - 1, ROWS))]
    return run, replace(seed, curves=longer)


@pytest.mark.slow
def test_hundreds_of_seeds_take_little_memory_and_one_page(pattern, tmp_path):
    run, seed = pattern
    peaks, pages = {}, {}
    for seeds in (110, 410):
        folder = tmp_path / f"{seeds}" / run.name
        scale.write_seeds(folder, run, [seed], seeds)
        _, _, peaks[seeds] = scale.judge(folder)
        pages[seeds] = (folder / "report.html").stat().st_size
        verdict = records.read_json(folder / "verdict.json")
        assert len(verdict["seeds"]) == seeds
        assert verdict["verdict"] == records.read_json(run / "verdict.json")["verdict"]
    # where rows are kept as dictionaries it is 0.2 MiB a seed
    assert (peaks[410] - peaks[110]) / 300 < 0.15
    assert pages[410] < 1.2 * pages[110] < 2_000_000
