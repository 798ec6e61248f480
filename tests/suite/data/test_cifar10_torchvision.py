"""CIFAR-10 from torchvision's files: on disk, or as its download leaves them."""

import io
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from suite.data import DataError, cifar10


def refuse(line):
    raise AssertionError(f"something was fetched: {line}")


def from_disk(root):
    return cifar10.load(root, say=refuse)


class Python2Pickler(pickle._Pickler):
    """Pickles arrays and lists of integers as Python 2 did for the official files: text is bytes there."""

    def save_bytes(self, text):
        self.write(pickle.BINSTRING + struct.pack("<i", len(text)) + text)

    def save_global(self, thing, name=None):
        module = "numpy.core.multiarray" if thing.__name__ == "_reconstruct" else "numpy"
        self.write(pickle.GLOBAL + f"{module}\n{thing.__name__}\n".encode())


Python2Pickler.dispatch = pickle._Pickler.dispatch | {
    bytes: Python2Pickler.save_bytes,
    type: Python2Pickler.save_global,
    type(np.empty(0).__reduce__()[0]): Python2Pickler.save_global,
}


def write_as_python_2(file: Path, **content):
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump({name.encode(): value for name, value in content.items()})
    file.write_bytes(stream.getvalue())


@pytest.fixture(scope="module")
def official_files(fetched, tmp_path_factory):
    """A root that holds the official Python version, unpacked."""
    root = tmp_path_factory.mktemp("official")
    content = load_file(fetched.root / cifar10.CACHE)
    pixels, labels = content["images"].reshape(6, 10_000, 3072), content["labels"].reshape(6, 10_000)
    (root / "cifar-10-batches-py").mkdir()
    for number in range(6):
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        file = root / "cifar-10-batches-py" / name
        write_as_python_2(file, data=pixels[number], labels=labels[number].tolist())
    return root


@pytest.mark.service
def test_torchvision_files_on_disk_are_used(fetched, official_files):
    expected, found = from_disk(fetched.root), from_disk(official_files)
    assert found.source == "torchvision files on disk"
    assert torch.equal(found.train_images, expected.train_images)
    assert torch.equal(found.test_labels, expected.test_labels)


@pytest.mark.service
def test_torchvision_files_on_disk_are_verified(official_files, tmp_path):
    folder = shutil.copytree(official_files, tmp_path / "root") / "cifar-10-batches-py"
    shutil.copy(folder / "data_batch_2", folder / "data_batch_3")
    with pytest.raises(DataError, match="cifar-10-batches-py is damaged: the pixels of data_batch_3"):
        from_disk(folder.parent)


@pytest.mark.service
def test_what_torchvision_downloads_is_cached(official_files, arrange, monkeypatch, tmp_path):
    download = f"import shutil; shutil.copytree({str(official_files)!r}, root, dirs_exist_ok=True)"
    for name, value in arrange(tmp_path / "world", "exit 1", download).items():
        monkeypatch.setenv(name, value)
    said = []
    images = cifar10.load(tmp_path / "root", 60, said.append)
    assert images.source == "torchvision download"
    assert len(said) == 1
    again = from_disk(tmp_path / "root")
    assert again.source == "read from the cache"
    assert torch.equal(again.train_images, images.train_images)


def test_a_missing_torchvision_file_is_named(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(
        DataError, match=r"data_batch_1 is not an official CIFAR-10 batch.*; put .* or delete"
    ):
        from_disk(tmp_path)


def test_a_pickle_cannot_have_anything_called(tmp_path):
    folder, trace = tmp_path / "cifar-10-batches-py", tmp_path / "trace"
    folder.mkdir()

    class Touch:
        def __reduce__(self):
            return Path.touch, (trace,)

    (folder / "data_batch_1").write_bytes(pickle.dumps(Touch(), protocol=2))
    with pytest.raises(DataError, match=r"data_batch_1 is not an official CIFAR-10 batch: .*it asks for"):
        from_disk(tmp_path)
    assert not trace.exists()
