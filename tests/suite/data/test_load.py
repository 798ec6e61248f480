"""Loading by name, and the script that fetches."""

import subprocess
import sys
from pathlib import Path

import pytest

from suite.data import DataError, load


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(DataError, match="data=cifar: choose one of auto, cifar10, shapes, folder"):
        load("cifar")


def test_folder_asks_for_its_root():
    with pytest.raises(DataError, match=r"data=folder: write data\.root=FOLDER"):
        load("folder")


def test_shapes_by_name_is_the_data_set_of_seed_0():
    images = load("shapes")
    assert (images.name, images.source, images.stand_in) == ("shapes", "drawn from seed 0", True)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_limit_that_is_none_is_an_error(tmp_path, limit):
    with pytest.raises(DataError, match="time limit of"):
        load("cifar10", tmp_path, time_limit_s=limit)


def test_the_script_says_what_is_wrong_in_one_line_and_exits_with_2(tmp_path):
    (tmp_path / "file").write_text("")
    script = Path(__file__).parents[3] / "scripts" / "get_cifar10.py"
    command = [sys.executable, str(script), "--root", str(tmp_path / "file" / "root")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: CIFAR-10 cannot be kept in ")
    assert done.stderr.count("\n") == 1


def test_importing_the_room_imports_neither_torch_nor_torchvision():
    check = "import sys, suite.data; print('torch' in sys.modules, 'torchvision' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", check], text=True).split() == ["False", "False"]
