"""Images of one's own, from folders."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from suite.data import DataError, folder


def paint(file, colour, size=(40, 32), mode="RGB"):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(file)


def colours(images):
    """The colour of the middle of each image."""
    side = images.shape[2] // 2
    return [tuple(pixel) for pixel in images[:, :, side, side].tolist()]


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_train_and_test_folders(tmp_path, test_name):
    paint(tmp_path / "train" / "b" / "1.png", (0, 0, 9))
    paint(tmp_path / "train" / "a" / "2.png", (7, 0, 0))
    paint(tmp_path / "train" / "a" / "1.png", (8, 0, 0))
    for name in "ab":
        paint(tmp_path / test_name / name / "1.png", (0, 5, 0))
    images = folder.load(tmp_path, size=16)
    assert (images.name, images.classes, images.stand_in) == ("folder", ("a", "b"), False)
    assert colours(images.train_images) == [(8, 0, 0), (7, 0, 0), (0, 0, 9)]
    assert images.train_labels.tolist() == [0, 0, 1]
    assert images.test_images.shape == (2, 3, 16, 16)
    assert (images.test_images.dtype, images.test_labels.dtype) == (torch.uint8, torch.int64)


def test_without_a_test_folder_every_sixth_image_of_a_class_is_for_testing(tmp_path):
    for label, name in enumerate("ab"):
        for number in range(13):
            paint(tmp_path / name / f"{number:02}.png", (label, number, 0))
    images = folder.load(tmp_path)
    assert colours(images.test_images) == [(label, number, 0) for label in (0, 1) for number in (5, 11)]
    assert images.test_labels.tolist() == [0, 0, 1, 1]
    assert len(images.train_images) == 22
    assert images.sha256 == folder.load(tmp_path).sha256


def test_resized_by_the_shorter_side_then_cut_from_the_middle(tmp_path):
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 32:64] = 200
    for part in ("train", "test"):
        for name in "ab":
            paint(tmp_path / part / name / "1.png", (0, 0, 0))
            Image.fromarray(wide).save(tmp_path / part / name / "2.png")
    images = folder.load(tmp_path, size=32)
    assert (images.train_images[1] == 200).all()
    assert folder.load(tmp_path, size=8).train_images[1, :, :, 2:6].eq(200).all()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_other_colour_modes_become_rgb(tmp_path, mode):
    for part in ("train", "test"):
        for name in "ab":
            paint(tmp_path / part / name / "1.png", (255, 255, 255), mode=mode)
    assert colours(folder.load(tmp_path).train_images) == [(255, 255, 255)] * 2


def two_classes(root, count=6):
    for name in "ab":
        for number in range(count):
            paint(root / name / f"{number}.png", (number, 0, 0))


def missing(root):
    root.rmdir()


def empty(root):
    pass


def file_in_its_place(root):
    root.rmdir()
    root.write_text("")


def class_without_images(root):
    two_classes(root)
    (root / "c").mkdir()


def one_class(root):
    for number in range(6):
        paint(root / "a" / f"{number}.png", (0, 0, 0))


def too_few_to_split(root):
    two_classes(root, count=5)


def train_alone(root):
    two_classes(root / "train")


def differing_classes(root):
    two_classes(root / "train")
    two_classes(root / "test")
    paint(root / "test" / "extra" / "1.png", (0, 0, 0))


def unreadable(root):
    two_classes(root)
    (root / "b" / "3.png").write_bytes(b"no image")


def sixteen_bits(root):
    two_classes(root)
    Image.fromarray(np.full((32, 32), 1000, np.uint16)).save(root / "b" / "2.png")


def pipe(root):
    two_classes(root)
    (root / "b" / "3.png").unlink()
    os.mkfifo(root / "b" / "3.png")


def link_to_everything(root):
    two_classes(root)
    (root / "c").symlink_to("/")


def cut_off(root):
    two_classes(root)
    content = (root / "b" / "4.png").read_bytes()
    (root / "b" / "4.png").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (missing, "is not a folder"),
        (file_in_its_place, "is not a folder"),
        (empty, "is no folder of classes"),
        (class_without_images, "is no folder of classes .*: put the images"),
        (one_class, "holds only the class a: give at least two"),
        (too_few_to_split, r"a holds 5 images: give at least 6"),
        (train_alone, "neither test/ nor val/"),
        (differing_classes, "differ in the class folders extra"),
        (unreadable, r"3\.png cannot be read as an image"),
        (sixteen_bits, r"2\.png .*more than 8 bits"),
        (pipe, r"3\.png .*no regular file"),
        (link_to_everything, "c holds no image"),
        (cut_off, r"4\.png cannot be read as an image"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, arrange, message):
    root = tmp_path / "root"
    root.mkdir()
    arrange(root)
    with pytest.raises(DataError, match=message) as raised:
        folder.load(root)
    assert "\n" not in str(raised.value)
    assert str(root) in str(raised.value)


def test_links_are_followed_and_each_folder_is_listed_once(tmp_path):
    two_classes(tmp_path / "elsewhere")
    root = tmp_path / "root"
    root.mkdir()
    for name in "ab":
        (root / name).symlink_to(tmp_path / "elsewhere" / name)
        (tmp_path / "elsewhere" / name / "again").symlink_to(tmp_path / "elsewhere" / name)
    assert folder.load(root).sha256 == folder.load(tmp_path / "elsewhere").sha256


def test_a_folder_of_the_kernel_is_refused_at_once():
    with pytest.raises(DataError, match="/proc/self is no folder of classes"):
        folder.load(Path("/proc/self"))
