"""The figures for papers: right in size, readable by all, from the public files alone."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.colors import to_rgb

from driftlab.record.seed_record import RecordError
from driftlab.report.paper import COLOURS, WIDTHS, read_run, write_curves

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def script(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "figures.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_seed):
    folder = tmp_path_factory.mktemp("run")
    (folder / "experiment.yaml").write_text("name: drawn\n")
    for seed in range(3):
        make_seed(folder, seed, blown={"candidate.float32": 57} if seed == 2 else None)
    return folder


@pytest.mark.parametrize(("width", "inches"), [("single", 3.35), ("double", 6.9)])
def test_figures_are_as_wide_as_a_column(tmp_path, run, width, inches):
    svg, png = write_curves(read_run(run), tmp_path, width).files
    assert WIDTHS[width] == inches
    assert float(ET.parse(svg).getroot().get("width").removesuffix("pt")) == pytest.approx(72 * inches)
    assert matplotlib.image.imread(png).shape[1] == pytest.approx(400 * inches, abs=1)


def test_letters_are_outlines_and_nothing_is_loaded(tmp_path, run):
    svg, _ = write_curves(read_run(run), tmp_path).files
    root = ET.parse(svg).getroot()
    assert not list(root.iter(f"{SVG}text"))
    assert "font-family" not in svg.read_text()
    links = re.findall(r'href="([^"]*)"', svg.read_text())
    assert all(link.startswith("#") for link in links)


def test_same_run_gives_the_same_bytes(tmp_path, run):
    once, again = (write_curves(read_run(run), tmp_path / name).files for name in ("once", "again"))
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in again]


def test_roles_differ_in_lightness_by_a_fifth_of_the_scale_or_more():
    def lightness(colour):  # CIE L*, 0 to 100
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 116 * sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) ** (1 / 3) - 16

    levels = sorted(map(lightness, COLOURS.values()))
    assert all(high - low > 20 for low, high in pairwise(levels))


def test_caption_tells_the_seeds_the_blow_up_and_the_first_flip(tmp_path, run):
    caption = write_curves(read_run(run), tmp_path).caption
    for part in ("3 seeds", "candidate.float32, which blew up in 1 of 3 seeds", "first sign flip, candidate"):
        assert part in caption


def test_many_seeds_are_a_range_and_no_lines(tmp_path, make_seed):
    for seed in range(22):
        make_seed(tmp_path, seed, steps=range(0, 121, 10))
    assert "thin lines" not in write_curves(read_run(tmp_path), tmp_path).caption


@pytest.mark.parametrize(
    "left_out",
    [{"kinks": False}, {"roles": ("reference", "control")}, {"horizons": {"float32": 40}}, {"steps": [0]}],
)
def test_what_was_not_measured_is_left_out(tmp_path, make_seed, left_out):
    make_seed(tmp_path, 0, **left_out)
    curves = write_curves(read_run(tmp_path), tmp_path, "double")
    assert all(p.stat().st_size > 1000 for p in curves.files)
    assert ("first sign flip" in curves.caption) == ("kinks" not in left_out and "steps" not in left_out)


def test_further_controls_are_left_out(tmp_path, make_seed):
    make_seed(tmp_path, 0, roles=("reference", "candidate", "control", "control_all", "control_each"))
    assert "control_" not in write_curves(read_run(tmp_path), tmp_path).caption


def test_every_arm_blown_up_at_once(tmp_path, make_seed):
    everybody = {f"{r}.{d}": 1 for r in ("reference", "candidate", "control") for d in ("float32", "float64")}
    make_seed(tmp_path, 0, blown=everybody)
    assert "blew up in 1 of 1 seed." in write_curves(read_run(tmp_path), tmp_path).caption


def test_a_run_without_seeds_or_curves_is_refused(tmp_path, make_seed):
    with pytest.raises(RecordError, match="no finished seed"):
        read_run(tmp_path)
    make_seed(tmp_path, 0, steps=[])
    (tmp_path / "seed=0" / "curves.csv").write_text("step,epoch\n")
    with pytest.raises(RecordError, match="holds no curves"):
        read_run(tmp_path)


def test_script_writes_beside_the_run_or_where_it_is_told(tmp_path, run):
    done = script(run, "--out", tmp_path / "deep" / "figures", "--width", "double")
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (tmp_path / "deep" / "figures").iterdir()}
    assert names == {"curves_double.svg", "curves_double.png"}
    assert "caption: 3 seeds" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments", [["nowhere"], ["{run}", "--width", "wide"], ["{run}", "--out", "{file}/x"], []]
)
def test_script_refuses_in_one_line(tmp_path, run, arguments):
    (tmp_path / "file").write_text("")
    refused = script(*(a.format(run=run, file=tmp_path / "file") for a in arguments))
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "error: " in refused.stderr.splitlines()[-1]


def test_needs_neither_torch_nor_lightning_nor_wandb():
    code = "import sys, driftlab.report.paper; print({'torch', 'lightning', 'wandb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
