"""The drawn stand-in: the same bits everywhere, balanced, and different where it should differ."""

import pytest
import torch

from suite.data import DataError, shapes


def test_seed_0_is_the_same_everywhere():
    assert shapes.draw(0).sha256 == "d0f23d8db1670171f9381e25be9d1a4dae73659fef60e67276a4b855fcf8a41b"


def test_classes_are_balanced():
    images = shapes.draw(1, train=130, test=27)
    assert images.train_labels.bincount().tolist() == [13] * 10
    assert images.test_labels.bincount().tolist() == [3] * 7 + [2] * 3
    assert images.train_images.shape == (130, 3, 32, 32)
    assert images.test_images.dtype == torch.uint8
    assert len(images.classes) == 10


def test_seeds_and_splits_differ():
    first, second = shapes.draw(1, 20, 20), shapes.draw(2, 20, 20)
    assert not torch.equal(first.train_images, second.train_images)
    assert not torch.equal(first.train_images, first.test_images)
    assert first.sha256 != second.sha256


def test_no_two_images_are_equal():
    images = shapes.draw(0, 1500, 10).train_images.flatten(1)
    assert len(torch.unique(images, dim=0)) == 1500


def test_a_shape_stands_out_from_its_background():
    """A shape is lighter than what is behind it: the middle of discs is lighter than the rim of the image."""
    images = shapes.draw(0, 2000, 10)
    discs = images.train_images[images.train_labels == 0].float()
    assert discs[:, :, 14:18, 14:18].mean() > discs[:, :, 0, :].mean() + 60


@pytest.mark.parametrize("sizes", [(0, 10), (10, 0)])
def test_nothing_to_draw_is_an_error(sizes):
    with pytest.raises(DataError, match="at least 1 image"):
        shapes.draw(0, *sizes)
