"""``diagnose`` trains as it is told: by a scheduler, with clipped gradients, or as a LightningModule says."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from driftlab import DiagnoseError, Verdict, diagnose
from tests.driftlab.watch.rewrites import network, rewritten
from tests.driftlab.watch.test_lightning import Own, loader, rewrite

STEPS, RATE, DECAY, NORM = 6, 0.5, 0.7, 0.3


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 20, generator=generator), torch.arange(8) % 5) for _ in range(STEPS + 1)]


def still():
    """Without the dropout, whose draws are the lockstep's own."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for m in network() if not isinstance(m, nn.Dropout)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def decaying(optimizer):
    return ExponentialLR(optimizer, DECAY)


def by_hand(scheduled=False, clipped=False, gathers=1):
    """The losses of the plainest loop, in float64."""
    model, rate, losses, given = still().double(), RATE, [], itertools.cycle(batches())
    for _ in range(STEPS + 1):
        each = [F.cross_entropy(model(x.double()), y) for x, y in itertools.islice(given, gathers)]
        loss = sum(each) / gathers
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        factor = min(1.0, NORM / float(norm)) if clipped else 1.0
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * factor * gradient
        rate *= DECAY if scheduled else 1.0
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("options", "scheduled", "clipped"),
    [
        ({}, False, False),
        ({"scheduler": decaying}, True, False),
        ({"clip": NORM}, False, True),
        ({"scheduler": decaying, "clip": lambda p: nn.utils.clip_grad_norm_(p, NORM)}, True, True),
    ],
    ids=["neither", "scheduler", "clip", "both"],
)
def test_the_reference_trains_as_by_hand(options, scheduled, clipped):
    found = diagnose(still(), rewritten(), batches(), optimizer=sgd, steps=STEPS, **options)
    assert found.verdict is Verdict.ROUND_OFF
    losses = [row["loss/reference.float64"] for row in found.curves]
    assert losses == pytest.approx(
        by_hand(scheduled, clipped), rel=1e-5
    )  # norms are cut to NORM / (n + 1e-6)
    assert by_hand(scheduled, clipped)[2:] != pytest.approx(by_hand(not scheduled, clipped)[2:], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip": 0}, "clip is 0: give a norm above 0"),
        ({"accumulate": 0}, "accumulate=0: give a whole number"),
        ({"candidate_inputs": 3}, "candidate_inputs is a int: give a function"),
        ({"candidate_inputs": lambda x: 1 / 0}, "division by zero"),
        ({"candidate_loss": nn.MSELoss}, "candidate_loss is a type: give a function"),
        ({"clip": "much"}, "clip is 'much': give a norm"),
        ({"scheduler": 3}, "scheduler is a int: give a function"),
        ({"scheduler": lambda optimizer: optimizer.param_groups}, "scheduler returned a list"),
        ({"scheduler": lambda optimizer: 1 / 0}, "scheduler raised"),
    ],
)
def test_what_is_none_is_one_line(options, said):
    with pytest.raises(DiagnoseError, match=said):
        diagnose(still(), rewritten(), batches(), steps=2, **options)


@pytest.mark.parametrize("gathers", [2, 3])
def test_an_update_gathers_the_gradients_of_several_batches(gathers):
    found = diagnose(still(), rewritten(), batches(), optimizer=sgd, steps=STEPS, accumulate=gathers)
    assert found.verdict is Verdict.ROUND_OFF
    losses = [row["loss/reference.float64"] for row in found.curves]
    assert losses == pytest.approx(by_hand(gathers=gathers), rel=1e-5)
    assert losses != pytest.approx(by_hand(), rel=1e-3)


def test_a_fault_in_the_second_of_several_batches_is_found():
    seen = [0]

    def every_second():
        seen[0] += 1
        return seen[0] % 2 == 0

    late = diagnose(still(), rewritten(every_second), batches(), optimizer=sgd, steps=STEPS, accumulate=2)
    assert late.verdict in (Verdict.BUG, Verdict.NONDETERMINISTIC)


class LossInside(nn.Module):
    """The same network up to its head, whose product the loss makes; samples in columns."""

    def __init__(self, model):
        super().__init__()
        self.first, self.head = nn.Sequential(*model[:-1]), model[-1]

    def forward(self, columns):
        hidden = self.first(columns.T)
        return {"hidden": hidden, "weight": self.head.weight, "bias": self.head.bias}


def fused(off=0.0):
    def loss(outputs, targets):
        logits = F.linear(outputs["hidden"], outputs["weight"], outputs["bias"])
        return F.cross_entropy(logits, targets) + off * logits.square().mean()

    return loss


@pytest.mark.parametrize("gathers", [1, 2])
@pytest.mark.parametrize(("off", "verdict"), [(0.0, Verdict.ROUND_OFF), (1e-3, Verdict.BUG)])
def test_a_candidate_with_other_inputs_and_another_loss(off, verdict, gathers):
    own = {"candidate_inputs": torch.t, "candidate_loss": fused(off), "outputs": {"": None}}
    found = diagnose(still(), LossInside, batches(), optimizer=sgd, steps=3, accumulate=gathers, **own)
    assert found.verdict in (verdict, Verdict.BIT_IDENTICAL if not off else verdict)


def test_a_lightning_module_is_taken_as_it_is():
    found = diagnose(Own(), rewrite, loader(), steps=3)
    assert found.verdict is Verdict.ROUND_OFF
    late = diagnose(Own(), lambda module: rewrite(module, late=lambda: True), loader(), steps=3)
    assert late.verdict is Verdict.BUG
    assert late.where.module == "module.net.0"


class Two(Own):
    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.net[0], self.net[3])]


def test_of_several_optimizers_it_says_what_to_give():
    with pytest.raises(DiagnoseError, match="follows the one optimizer of a LightningModule"):
        diagnose(Two(), rewrite, loader(), steps=3)


class Raises(Own):
    def training_step(self, batch, batch_idx):
        return {}["there is no such key"]


def test_what_its_own_code_raises_is_its_own():
    with pytest.raises(DiagnoseError, match="there is no such key") as error:
        diagnose(Raises(), rewrite, loader(), steps=3)
    assert "driftlab's own" not in str(error.value)
