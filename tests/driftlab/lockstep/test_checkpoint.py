"""Checkpoints that fell, or that another version wrote. That they go on bit for bit: test_lockstep.py."""

import hashlib
import json
import random
import tracemalloc

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from driftlab.lockstep.checkpoint import (
    NAME,
    checkpoint_step,
    read_checkpoint,
    save_checkpoint,
)
from driftlab.record.seed_record import OtherVersion, RecordError
from tests.driftlab.lockstep.test_lockstep import load_checkpoint, lockstep, run


def stored(folder):
    save_checkpoint(run(lockstep(), stop=2), 2, folder, {"noted": [1.5, "text"]})
    return folder / NAME


def test_any_flipped_bit_is_noticed(tmp_path):
    file, dice = stored(tmp_path), random.Random(7)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [dice.randrange(header) for _ in range(200)]
    places += [dice.randrange(header, len(whole)) for _ in range(200)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(RecordError, match=f"{NAME} is damaged"):
            read_checkpoint(tmp_path)
    file.write_bytes(whole)
    assert read_checkpoint(tmp_path).notes == {"noted": [1.5, "text"]}


def test_two_tensors_that_changed_places_are_noticed(tmp_path):
    file = stored(tmp_path)
    with safe_open(file, framework="pt") as opened:
        metadata, tensors = opened.metadata(), load_file(file)
    a, b = [n for n, t in tensors.items() if n.endswith("0.weight")][:2]
    tensors[a], tensors[b] = tensors[b], tensors[a] + 1
    save_file(tensors, file, metadata)
    with pytest.raises(RecordError, match="is not what its checksum says"):
        read_checkpoint(tmp_path)


def test_the_step_is_told_without_the_tensors(tmp_path):
    assert checkpoint_step(tmp_path) is None
    file = stored(tmp_path)
    assert checkpoint_step(tmp_path) == 2
    file.write_bytes(file.read_bytes()[:100])
    assert checkpoint_step(tmp_path) is None


# as before there were versions and checksums in it, and as a version to come may write it
@pytest.mark.parametrize(
    ("theirs", "said"), [(None, "another version of driftlab"), ("99.1", "driftlab 99.1")]
)
def test_a_checkpoint_of_another_version_is_named_as_such(tmp_path, theirs, said):
    file = stored(tmp_path)
    with safe_open(file, framework="pt") as opened:
        header, tensors = json.loads(opened.metadata()["driftlab"]), load_file(file)
    del header["driftlab"]
    text = json.dumps(header | ({"driftlab": theirs} if theirs else {}))
    checksum = {"sha256": hashlib.sha256(text.encode()).hexdigest()} if theirs else {}
    save_file(tensors, file, {"driftlab": text} | checksum)
    with pytest.raises(OtherVersion, match=f"was written by {said}, not by ") as error:
        load_checkpoint(lockstep(), tmp_path)
    assert error.value.version == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64])
def test_tensors_of_every_type_are_stored(tmp_path, dtype):
    def with_buffer():
        steps = lockstep()
        steps.arms[0].module.register_buffer("more", torch.ones((), dtype=dtype))
        steps.arms[0].module.register_buffer("none", torch.ones((0, 3), dtype=dtype))
        return steps

    first = with_buffer()
    first.arms[0].module.more.zero_()
    save_checkpoint(first, 0, tmp_path)
    second = with_buffer()
    assert load_checkpoint(second, tmp_path) == 0
    assert torch.equal(second.arms[0].module.more, torch.zeros((), dtype=dtype))


def test_it_is_written_from_the_memory_that_the_arms_lie_in(tmp_path):
    """At full scale a second copy is 805 MB."""
    steps = run(lockstep(wide()), stop=2)
    tracemalloc.start()
    with Copies() as copies:
        save_checkpoint(steps, 2, tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (tmp_path / NAME).stat().st_size
    assert size > 4_000_000
    assert most < size / 4
    assert copies.largest < 100


def wide():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 500), nn.ReLU(), nn.Linear(500, 4))


class Copies(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.largest = max(self.largest, made.numel())
        return made


def test_one_that_safetensors_itself_wrote_goes_on(tmp_path):
    """As all were, at first."""
    file = stored(tmp_path)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({name: t.clone() for name, t in load_file(file).items()}, file, metadata)
    resumed = lockstep()
    assert load_checkpoint(resumed, tmp_path) == 2
    rows = run(resumed, start=2).rows
    assert rows.items() <= run(lockstep()).rows.items()


def test_tensors_that_share_memory_are_stored_each(tmp_path):
    def tied():
        steps = lockstep()
        module = steps.arms[0].module
        module.register_buffer("whole", torch.arange(6.0))
        module.register_buffer("part", module.whole[2:4])
        module.register_buffer("turned", module.whole.view(2, 3).T)
        return steps

    first, second = tied(), tied()
    save_checkpoint(first, 0, tmp_path)
    for name in ("whole", "part", "turned"):
        setattr(second.arms[0].module, name, torch.zeros_like(getattr(second.arms[0].module, name)))
    assert load_checkpoint(second, tmp_path) == 0
    for name in ("whole", "part", "turned"):
        assert torch.equal(getattr(first.arms[0].module, name), getattr(second.arms[0].module, name))
