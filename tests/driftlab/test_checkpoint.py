"""Checkpoints that fell, or that another version wrote. That they go on bit for bit: test_lockstep.py."""

import hashlib
import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from driftlab.checkpoint import NAME, checkpoint_step, load_checkpoint, read_checkpoint, save_checkpoint
from driftlab.records import OtherVersion, RecordError
from tests.driftlab.test_lockstep import lockstep, run


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
