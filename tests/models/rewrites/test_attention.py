"""The rewrites of the GPT's attention: right ones pass for rounding, a mask that is off by one does not."""

import pytest
import torch

from driftlab import Verdict, assert_equivalent, diagnose
from models.gpt import GPT, next_token_loss
from models.resnet import ResNet18
from models.rewrites import attention
from models.rewrites.swap import RewriteError
from suite.data.grammar import LETTERS, Grammar
from suite.data.images import DataError

RIGHT = ("fused_qkv", "heads_apart", "explicit_softmax", "interleaved_rope")


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(width=8, layers=1, heads=2, context=6, vocab_size=len(LETTERS))


def batch():
    text = Grammar(count=4, context=6)
    inputs, targets = zip(*(text[i] for i in range(4)), strict=True)
    return torch.stack(inputs), torch.stack(targets)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_one_is_the_same_function_and_its_fold_is_the_identity_at_the_start(gpt, name):
    rewrite = getattr(attention, name)
    assert_equivalent(gpt, rewrite, batch()[0])


@pytest.mark.parametrize(("name", "bad"), [("interleaved_rope", False), ("mask_off_by_one", True)])
def test_a_mask_that_is_off_by_one_is_a_bug_and_other_pairs_are_none(gpt, name, bad):
    def make(parameters):
        return torch.optim.AdamW(parameters, 1e-3)

    found = diagnose(gpt, getattr(attention, name), [batch()], next_token_loss, make, steps=2, clip=1.0)
    assert (found.verdict is Verdict.BUG) == bad, found.headline
    if bad:
        assert "attention" in found.where.module
    else:
        assert found.verdict is Verdict.ROUND_OFF


def test_no_position_sees_what_comes_after_it(gpt):
    tokens = batch()[0]
    later = tokens.clone()
    later[:, 4:] = 0
    before, after = gpt.eval()(tokens), gpt(later)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_another_network_is_one_line():
    with pytest.raises(RewriteError, match="ResNet18 has no models"):
        attention.fused_qkv(ResNet18(width=4))


def test_text_is_drawn_from_its_seed_and_test_text_is_another():
    one, same, tested = Grammar(count=9), Grammar(count=9), Grammar(train=False, count=9)
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, tested.tokens)
    inputs, targets = one[3]
    assert torch.equal(inputs[1:], targets[:-1])
    assert "".join(LETTERS[i] for i in one.tokens[:400]).count(". ") > 2
    with pytest.raises(DataError, match="give at least 1 of each"):
        Grammar(count=0)
