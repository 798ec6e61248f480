"""The wheel, built and installed where nothing else is: the library without the suite around it."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import driftlab

ROOT = Path(__file__).resolve().parents[2]
# Of the suite and of the extras; what torch itself brings cannot be looked for.
APART = (
    "hydra",
    "lightning",
    "matplotlib",
    "submitit",
    "joblib",
    "cloudpickle",
    "torchvision",
    "wandb",
    "yaml",
)
ROOMS = ("bench", "experiments", "hydra_plugins", "models", "scripts", "suite", "tests", "train")


def ran(*command: str | Path, cwd: Path) -> str:
    """What it printed. Only ``cwd`` is on Python's path beside what is installed."""
    quiet = {"UV_NO_PROGRESS": "1", "OMP_NUM_THREADS": "1", "UV_LINK_MODE": "symlink"}  # torch: gigabytes
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=kept | quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    ran("uv", "build", "--wheel", "--quiet", "--out-dir", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.service
def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    library = {p for p in (ROOT / "driftlab").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert inside == {str(p.relative_to(ROOT)) for p in library}
    assert {"driftlab/py.typed", "driftlab/report/page.html.j2"} < inside


LOOK = """
import importlib.util, sys
print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])
"""
DOORS = """
for door in ("report", "lockstep.lightning"):
    try:
        __import__(f"driftlab.{door}")
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.service
def test_the_wheel_alone_answers(wheel, tmp_path):
    home, python = tmp_path / "home", tmp_path / "empty" / "bin" / "python"
    home.mkdir()
    shutil.copy(Path(__file__).with_name("typed_use.py"), home / "models.py")  # a name that users take too
    ran("uv", "venv", "--quiet", tmp_path / "empty", cwd=ROOT)
    ran("uv", "pip", "install", "--quiet", "--python", python, wheel, cwd=ROOT)  # its pins: [tool.uv]
    assert ran(python, "-c", LOOK, *APART, *ROOMS, cwd=tmp_path) == "[]\n"
    number, *used = ran(python, "-m", "models", cwd=home).splitlines()
    assert number == f"driftlab {driftlab.__version__}"
    assert used == ["asserted", "diagnosed", "checked", "in_chunks"]
    assert ran(python, "-c", DOORS, cwd=home).splitlines() == [
        "matplotlib is not installed: pip install 'driftlab[report]'",
        "lightning is not installed: pip install 'driftlab[lightning]'",
    ]
