"""Batches: a pure function of seeds and step, against a naive reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from suite.data import DataError, Images
from suite.data.batches import Batches, philox_words

SIDE = 8


def data_set(train=50, test=7, side=SIDE):
    """Random images; the label of each is its own number, so a batch tells which images it holds."""
    words = np.random.Philox(key=7).random_raw((train + test) * 3 * side * side)
    pixels = torch.from_numpy((words % 256).astype(np.uint8)).view(-1, 3, side, side)
    parts = pixels[:train], torch.arange(train), pixels[train:], torch.arange(test)
    return Images("shapes", *parts, classes=(), sha256="", source="", stand_in=True)


DATA = data_set()


def batches(images=DATA, batch_size=8, order_seed=1, augmentation_seed=2, device="cpu", **options):
    return Batches(images, batch_size, order_seed, augmentation_seed, device, **options)


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


steps = st.integers(0, 60)
seeds = st.integers(0, 2**64 - 1)


@settings(max_examples=50, deadline=None)
@given(before=st.lists(steps, max_size=5), step=steps, order=seeds, augmentation=seeds)
def test_a_batch_does_not_depend_on_what_was_asked_before(before, step, order, augmentation):
    used = batches(order_seed=order, augmentation_seed=augmentation)
    for earlier in before:
        used.batch(earlier)
    fresh = batches(order_seed=order, augmentation_seed=augmentation)
    assert same(used.batch(step), fresh.batch(step))


def test_a_batch_is_not_changed_by_what_the_caller_does_to_it():
    used = batches()
    inputs, targets = used.batch(3)
    kept = inputs.clone(), targets.clone()
    inputs.zero_()
    targets.zero_()
    assert same(used.batch(3), kept)


def test_the_order_seed_sets_the_order():
    assert not torch.equal(batches(order_seed=1).batch(0)[1], batches(order_seed=3).batch(0)[1])


def test_the_augmentation_seed_sets_crops_and_flips_alone():
    (inputs, targets), (others, same_targets) = (batches(augmentation_seed=seed).batch(0) for seed in (1, 3))
    assert torch.equal(targets, same_targets)
    assert not torch.equal(inputs, others)


@pytest.mark.parametrize(("batch_size", "dropped"), [(10, 0), (8, 2), (50, 0)])
def test_an_epoch_visits_every_image_once_and_drops_the_last_partial_batch(batch_size, dropped):
    feed = batches(batch_size=batch_size)
    assert feed.batches_per_epoch == 50 // batch_size
    epochs = []
    for epoch in range(3):
        first = epoch * feed.batches_per_epoch
        assert feed.epoch(first) == feed.epoch(first + feed.batches_per_epoch - 1) == epoch
        visited = torch.cat([feed.batch(first + number)[1] for number in range(feed.batches_per_epoch)])
        assert len(visited) == len(visited.unique()) == 50 - dropped
        epochs.append(visited)
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])


def naive_batch(images, batch_size, order_seed, augmentation_seed, step):
    """One image at a time, in plain integers, as the docstring of Batches has it."""
    count = len(images.train_images)
    epoch, position = divmod(step, count // batch_size)
    keys = [int(word) for word in philox_words(order_seed, 0, epoch, count)]
    words = [int(word) for word in philox_words(augmentation_seed, 1, epoch, count)]
    order = sorted(range(count), key=lambda number: keys[number])
    everything = images.train_images.numpy().astype(np.float64)
    mean = everything.mean((0, 2, 3)).astype(np.float32)
    std = everything.std((0, 2, 3)).astype(np.float32)
    inputs = []
    for number in order[position * batch_size : (position + 1) * batch_size]:
        top, left = (words[number] >> 33) * 9 >> 31, (words[number] % 2**31) * 9 >> 31
        padded = np.zeros((3, SIDE + 8, SIDE + 8), np.float32)
        padded[:, 4:-4, 4:-4] = images.train_images[number].numpy()
        crop = padded[:, top : top + SIDE, left : left + SIDE]
        if words[number] >> 31 & 1:
            crop = crop[:, :, ::-1]
        inputs.append((crop - mean[:, None, None]) / std[:, None, None])
    return np.stack(inputs), order[position * batch_size : (position + 1) * batch_size]


@settings(max_examples=30, deadline=None)
@given(step=steps, order=seeds, augmentation=seeds)
def test_a_naive_reference_gives_the_same_bits(step, order, augmentation):
    inputs, targets = batches(order_seed=order, augmentation_seed=augmentation).batch(step)
    expected, images = naive_batch(DATA, 8, order, augmentation, step)
    assert targets.tolist() == images
    np.testing.assert_array_equal(inputs.numpy(), expected)


def test_crops_and_flips_are_uniform():
    """Every pixel of the one image here has its own value, so a crop shows where it was taken."""
    image = torch.arange(1, SIDE * SIDE + 1, dtype=torch.uint8).view(1, SIDE, SIDE).expand(3, -1, -1)
    count = 8100
    part = image.expand(count, -1, -1, -1), torch.zeros(count, dtype=torch.int64)
    feed = batches(Images("shapes", *part, *part, classes=(), sha256="", source="", stand_in=True), count)
    inputs, _ = feed.batch(0)
    seen = ((inputs * feed.std.view(3, 1, 1) + feed.mean.view(3, 1, 1)) * 255).round()[:, 0].flatten(1)

    padded = pad(image[0].float(), (4, 4, 4, 4))
    crops = [padded[top : top + SIDE, left : left + SIDE] for top in range(9) for left in range(9)]
    possible = torch.stack([*crops, *(crop.flip(1) for crop in crops)]).flatten(1)
    matches = (seen[:, None] == possible).all(2)
    assert matches.sum(1).eq(1).all()
    assert matches.sum(0).sub(50).abs().max() < 36  # 50 of each are expected, give or take 7


def test_normalisation_in_closed_form():
    """Half of the pixels 0, half 255: mean and standard deviation are 127.5, so all inputs are -1 or 1."""
    pixels = torch.zeros(10, 3, 4, 4, dtype=torch.uint8)
    pixels[:, :, ::2] = 255
    part = pixels, torch.zeros(10, dtype=torch.int64)
    feed = batches(
        Images("shapes", *part, *part, classes=(), sha256="", source="", stand_in=True), augment=False
    )
    inputs, _ = feed.batch(0)
    assert (inputs[:, :, ::2] == 1).all()
    assert (inputs[:, :, 1::2] == -1).all()
    assert feed.mean.tolist() == feed.std.tolist() == [0.5] * 3


def test_statistics_are_those_of_the_training_images():
    feed = batches()
    exact = DATA.train_images.numpy().astype(np.float64) / 255
    torch.testing.assert_close(feed.mean, torch.from_numpy(exact.mean((0, 2, 3))).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(feed.std, torch.from_numpy(exact.std((0, 2, 3))).float(), rtol=1e-6, atol=0)


def test_a_channel_without_variation_stays_finite():
    part = torch.full((10, 3, 4, 4), 9, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64)
    feed = batches(
        Images("shapes", *part, *part, classes=(), sha256="", source="", stand_in=True), augment=False
    )
    assert (feed.batch(0)[0] == 0).all()


def test_philox_words_are_those_of_every_numpy():
    assert philox_words(1, 0, 2, 2).tolist() == [13864759800467046630, 17602039527240160315]


def test_epochs_share_no_words():
    words = np.concatenate([philox_words(1, 0, epoch, 1000) for epoch in range(5)])
    assert len(np.unique(words)) == 5000


def test_test_batches_are_the_first_images_normalised():
    feed = batches()
    inputs, targets = zip(*feed.test_batches(5, 2), strict=True)
    assert [len(part) for part in inputs] == [2, 2, 1]
    assert torch.cat(targets).tolist() == [0, 1, 2, 3, 4]
    restored = torch.cat(inputs) * feed.std.view(3, 1, 1) + feed.mean.view(3, 1, 1)
    assert torch.equal((restored * 255).round().to(torch.uint8), DATA.test_images[:5])


@pytest.mark.parametrize("images", [None, 7, 1000])
def test_test_batches_reach_the_end(images):
    assert sum(len(targets) for _, targets in batches().test_batches(images, 3)) == 7


@pytest.mark.parametrize("batch_size", [0, -1, 51])
def test_a_batch_size_that_does_not_fit_is_an_error(batch_size):
    with pytest.raises(DataError, match=f"batch_size={batch_size}: give 1 to 50"):
        batches(batch_size=batch_size)


def test_counts_below_one_are_errors():
    with pytest.raises(DataError, match="at least 1"):
        batches().test_batches(0, 3)
    with pytest.raises(DataError, match="at least 1"):
        batches().test_batches(3, 0)
    with pytest.raises(ValueError, match="steps count from 0"):
        batches().batch(-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits_and_is_never_waited_for():
    on_gpu, on_cpu = batches(device="cuda"), batches()
    on_gpu.batch(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = [on_gpu.batch(step) for step in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(same([part.cpu() for part in batch], on_cpu.batch(step)) for step, batch in enumerate(made))
