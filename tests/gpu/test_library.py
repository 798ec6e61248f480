"""The library's doors on a pretended GPU: right and wrong told apart, no wait, the caller's state kept."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import assert_equivalent, batch_invariant, diagnose, gradient_check
from driftlab.words import Verdict
from tests.driftlab.lockstep import test_in_16_bits as in_16_bits
from tests.driftlab.lockstep.test_lockstep import batch, lockstep, network
from tests.test_pretended_cuda import NETWORKS


class ByColumns(nn.Module):
    """A linear layer as a sum of two halves; ``lost`` makes the second one's gradient too small."""

    def __init__(self, linear, lost):
        super().__init__()
        self.half, self.lost = linear.in_features // 2, lost
        self.left = nn.Parameter(linear.weight.detach()[:, : self.half].clone())
        self.right = nn.Parameter(linear.weight.detach()[:, self.half :].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        left, right = x[..., : self.half] @ self.left.T, x[..., self.half :] @ self.right.T
        right = right * (1 - self.lost) + right.detach() * self.lost
        return left + right + self.bias


def rewritten(lost):
    def rewrite(model):
        model.head = ByColumns(model.head, lost)
        return model

    return rewrite


class Classifier(nn.Module):
    def __init__(self, body, features):
        super().__init__()
        self.body, self.head = body, nn.Linear(features, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())


def pair(kind):
    torch.manual_seed(1)
    make, shape = NETWORKS[kind]
    inputs = torch.randn(shape)
    body = make()
    model = Classifier(body, body(inputs).shape[-1]).cuda()
    draws = [(torch.randn(shape).cuda(), torch.randint(0, 4, shape[:1]).cuda()) for _ in range(2)]
    return model, draws


@pytest.mark.parametrize("lost", [0.0, 0.01])
@pytest.mark.parametrize("kind", NETWORKS)
def test_diagnose_tells_right_from_wrong(cuda, kind, lost):
    model, draws = pair(kind)
    state = copy.deepcopy(model.state_dict())
    found = diagnose(model, rewritten(lost), draws, loss=F.cross_entropy, steps=3)
    assert found.verdict in ((Verdict.BUG,) if lost else (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)), found
    assert all(torch.equal(t, state[n]) and t.is_cuda for n, t in model.state_dict().items())


class Masked(nn.Linear):
    """With a buffer, which the layer that it stands for has not."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, device=linear.weight.device)
        self.load_state_dict(linear.state_dict())
        self.register_buffer("mask", torch.ones_like(linear.weight), persistent=False)

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


def test_a_buffer_that_the_candidate_alone_has(cuda):
    draws = [(torch.randn(2, 3).cuda(), torch.tensor([0, 1]).cuda())] * 2
    found = diagnose(nn.Linear(3, 2).cuda(), Masked, draws, loss=F.cross_entropy, steps=1)
    assert found.verdict is Verdict.BIT_IDENTICAL, found


def test_the_small_doors_tell_right_from_wrong(cuda):
    model, ((inputs, targets), _) = pair("convnet")
    assert_equivalent(model, rewritten(0.0)(copy.deepcopy(model)), inputs)
    with pytest.raises(AssertionError):
        assert_equivalent(model, rewritten(0.01)(copy.deepcopy(model)), inputs)
    checked = gradient_check(model.head, model.body(inputs).detach(), lambda y: F.cross_entropy(y, targets))
    assert checked, checked
    rows = batch_invariant(model.eval())
    assert torch.equal(rows(inputs)[:2], rows(inputs[:2]))


def everything_set():
    """What a call could change for its caller."""
    return {
        "deterministic": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.conv.fp32_precision),
        "dtype": torch.get_default_dtype(),
        "cpu": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist(),
    }


@pytest.mark.parametrize(
    "door",
    [
        lambda m, x, y: diagnose(m, rewritten(0.0), [(x, y)], loss=F.cross_entropy, steps=1),
        lambda m, x, y: assert_equivalent(m, copy.deepcopy(m), x),
        lambda m, x, y: gradient_check(m, x, lambda out: F.cross_entropy(out, y)),
        lambda m, x, y: batch_invariant(m.eval())(x),
    ],
    ids=["diagnose", "assert_equivalent", "gradient_check", "batch_invariant"],
)
def test_a_door_leaves_its_caller_s_flags_and_random_state(cuda, door):
    torch.manual_seed(0)
    torch.rand(3, device="cuda")
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4)).cuda()
    model = Classifier(model, 4).cuda()
    x, y = torch.randn(4, 4).cuda(), torch.tensor([0, 1, 2, 3]).cuda()
    before = everything_set()
    door(model, x, y)
    assert everything_set() == before


@pytest.mark.parametrize("logged", [True, False])
def test_no_step_waits_for_the_gpu(cuda, logged):
    steps = lockstep(network(dropout=0.3).cuda(), logged=lambda step: logged)
    inputs, targets = (t.cuda() for t in batch(0))

    def step(number):
        steps.forward_backward(number, inputs, targets)
        steps.update(number)

    step(0), step(1)  # the first ones find out how to measure
    cuda.waited.clear()
    step(2), step(3)
    assert cuda.waited == []


@pytest.mark.parametrize("precision", in_16_bits.ALL)
def test_arms_in_16_bits_train_as_on_the_cpu(cuda, precision):
    there, here = in_16_bits.fresh(precision, device="cuda"), in_16_bits.fresh(precision)
    for step in range(in_16_bits.STEPS + 1):
        for mine, device in ((there, "cuda"), (here, "cpu")):
            mine.forward_backward(step, *(t.to(device) for t in in_16_bits.batch(step)))
            mine.update(step)
    for mine in (there, here):
        mine.flush()
    assert there.rows.keys() == here.rows.keys()
    for step, row in there.rows.items():
        name = f"reference.{precision}"
        assert row[f"loss/{name}"] == pytest.approx(here.rows[step][f"loss/{name}"], rel=0.05)
        assert row[f"logit_distance/control.{precision}"] > 0
    skipped = [next(a for a in mine.arms if a.name == name).skipped for mine in (there, here)]
    assert skipped[0] == skipped[1]


@pytest.mark.parametrize("precision", in_16_bits.ALL)
def test_a_diagnosis_asks_in_the_precision_on_the_device(cuda, precision):
    networks = (
        in_16_bits.unfolded().to("cuda"),
        in_16_bits.rewritten(lambda out: out.flip(-1), "cuda").to("cuda"),
    )
    batches = [tuple(t.to("cuda") for t in in_16_bits.batch(step)) for step in range(3)]
    assert diagnose(*networks, batches, steps=2, precision=precision).verdict is Verdict.BUG
    assert (
        diagnose(networks[0], copy.deepcopy, batches, steps=2, precision=precision).verdict
        is Verdict.BIT_IDENTICAL
    )
