"""A curve is one file: the recipe of docs/extending.md, followed word by word in a folder of its own."""

import json
import os
import re
import subprocess
import sys

import pytest

from driftlab.record.seed_record import columns, read_table
from tests.suite.conftest import ROOT
from tests.suite.programs import ONE_BLOCK

# train.py and the dashboard, where the folder of measures holds one file more
TRAINED = """
import json, runpy, sys
sys.path.insert(0, "")
import driftlab.measures as measures
measures.__path__.append(sys.argv.pop(1))
from suite.showing import dashboard
specs = dashboard.specs(dashboard.workspace("p", "e"), dashboard.report("p", "e"))
open(sys.argv.pop(1), "w").write(json.dumps(specs))
runpy.run_path("train.py", run_name="__main__")
"""
ARMS = [
    f"{role}.{dtype}" for dtype in ("float64", "float32") for role in ("reference", "candidate", "control")
]


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder of a run that has the curve."""
    folder = tmp_path_factory.mktemp("curve")
    recipe = (ROOT / "docs" / "extending.md").read_text().partition("## A curve")[2]
    name, code = re.search(r"measures/(\w+\.py)`.*?```python\n(.*?)```", recipe, re.DOTALL).groups()
    (folder / "more").mkdir()
    (folder / "more" / name).write_text(code)
    settings = ["+experiment=split_conv", "scale=smoke", "data=shapes", "logger=none", "workers=1", "seed=0"]
    settings += [ONE_BLOCK, "steps=3", "local.windows=[]"]
    command = [sys.executable, "-c", TRAINED, folder / "more", folder / "specs.json", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), f"results={folder}"], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_it_is_in_the_table_behind_the_columns_that_were_there(left):
    (path,) = left.glob("split_conv/*/seed=0/curves.csv")
    kinds = ("loss", "weight_distance", "gradient_distance", "logit_distance", "sign_flips", "accuracy")
    table = read_table(path)
    assert table.header == columns((*kinds, "gradient_norm"), ARMS)
    assert all(table[0][f"gradient_norm/{arm}"] > 0 for arm in ARMS)
    assert "gradient_norm" not in path.with_name("evaluations.csv").read_text()


def test_it_is_a_figure_on_the_page(left):
    (page,) = left.glob("split_conv/*/report.html")
    figure = page.read_text().partition('<figure id="gradient-norm"')[2].partition("</figure>")[0]
    assert "gradient norm (absolute)" in figure
    assert 'data-arm="candidate.float32"' in figure


def test_it_is_a_chart_of_the_dashboards(left):
    specs = json.loads((left / "specs.json").read_text())
    assert all('"gradient_norm/candidate.float32"' in json.dumps(spec) for spec in specs.values())
