"""``diagnose`` on whatever networks take and give: dicts, tuples, several inputs, shared and frozen parts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose

torch.set_num_threads(1)
SAME = ("round_off", "bit_identical")


class TwoInputs(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.joint = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(12, 2)
        self.factor = factor

    def forward(self, left, right, scale=1.0):
        both = torch.cat([torch.tanh(self.left(left)), torch.tanh(self.right(right)) * self.factor], 1)
        return {"logits": scale * self.joint(both), "features": both}


def loss(outputs, targets):
    return F.cross_entropy(outputs["logits"], targets)


def inputs_as(kind):
    torch.manual_seed(1)
    left, right, targets = torch.randn(7, 4), torch.randn(7, 3), torch.randint(2, (7,))
    inputs = {"tuple": (left, right), "list": [left, right], "dict": {"right": right, "left": left}}[kind]
    return [(inputs, targets)]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1 + 1e-6, False)])
def test_several_inputs_come_as_tuple_list_or_dict(kind, factor, right):
    found = diagnose(TwoInputs(), TwoInputs(factor), inputs_as(kind), loss=loss, steps=5)
    assert (found.verdict in SAME) is right
    assert right or found.verdict == "bug"


class Whole(nn.Module):
    """Takes its dict as one argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 2)

    def forward(self, batch):
        return self.fc(batch["x"])


def test_a_dict_may_be_one_argument():
    torch.manual_seed(1)
    batch = ({"x": torch.randn(5, 4), "id": torch.arange(5)}, torch.randint(2, (5,)))
    assert diagnose(Whole(), Whole(), [batch], steps=3).verdict == "bit_identical"


def test_a_one_shot_iterator_of_batches_is_repeated():
    torch.manual_seed(1)
    stream = ((torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(3))
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    assert diagnose(model, lambda m: m, stream, steps=9).verdict == "bit_identical"


class Shared(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(5, 5), nn.Linear(5, 3)
        self.again = self.inner if tied else copy.deepcopy(self.inner)

    def forward(self, x):
        return self.out(torch.tanh(self.again(torch.tanh(self.inner(x)))))


def vectors():
    torch.manual_seed(1)
    return [(torch.randn(8, 5), torch.randint(3, (8,)))]


def test_a_module_used_twice_is_compared_at_each_use():
    assert diagnose(Shared(), Shared(), vectors(), steps=5).verdict == "bit_identical"


def test_a_tie_undone_is_a_bug_of_the_shared_weight():
    found = diagnose(Shared(), Shared(tied=False), vectors(), steps=5)
    assert (found.verdict, found.where.pass_) == ("bug", "weight gradient")
    assert found.where.module in ("inner", "again")


def frozen(*names):
    model = Shared()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def trained_only(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def test_frozen_parameters_are_fine_where_both_freeze_them():
    found = diagnose(frozen("out"), frozen("out"), vectors(), optimizer=trained_only, steps=5)
    assert found.verdict == "bit_identical"


def test_a_parameter_frozen_in_the_candidate_alone_is_a_bug():
    found = diagnose(frozen(), frozen("out"), vectors(), optimizer=trained_only, steps=5)
    assert (found.verdict, found.where.module) == ("bug", "out")
    assert any(
        "out.weight is trained in the reference; in the candidate out.weight is frozen" in e.reading
        for e in found.evidence
    )


def test_a_network_in_float64_is_diagnosed_too():
    inputs = [(x.double(), y) for x, y in vectors()]
    assert diagnose(Shared().double(), Shared().double(), inputs, steps=3).verdict == "bit_identical"


def test_a_user_loss_on_float_targets():
    torch.manual_seed(1)
    batch = (torch.randn(8, 5), torch.randn(8, 3))
    found = diagnose(Shared(), Shared(), [batch], loss=lambda o, t: (o - t).abs().pow(1.5).mean(), steps=5)
    assert found.verdict == "bit_identical"


def test_a_network_that_writes_into_its_batch_writes_into_a_copy():
    torch.manual_seed(0)
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3))
    (x, y) = vectors()[0]
    x.requires_grad_()
    before = x.detach().clone()
    assert diagnose(net, lambda m: m, [(x, y)], steps=3).verdict == "bit_identical"
    assert torch.equal(x, before)
    assert x.grad is None


class Positions(nn.Module):
    """Adds a table of sines, stored beforehand or made at each call: the same bits in float32."""

    def __init__(self, stored):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 3)
        if stored:
            self.register_buffer("table", self.waves())
        self.stored = stored

    @staticmethod
    def waves():
        return 0.01 * torch.outer(torch.arange(512.0), 1e4 ** (-torch.arange(8.0) / 8)).sin()

    def forward(self, x):
        return self.fc(x + (self.table if self.stored else self.waves())).mean(1)


@pytest.mark.parametrize("stored", [0, 1])
def test_a_table_made_beforehand_is_no_bug(stored):
    torch.manual_seed(1)
    batch = (torch.randn(4, 512, 8), torch.randint(3, (4,)))
    pair = [Positions(False), Positions(True)]
    assert torch.equal(*(m(batch[0]) for m in pair))
    assert diagnose(pair[stored], pair[1 - stored], [batch], steps=5).verdict in SAME


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_networks_on_a_gpu():
    batch = [tuple(t.cuda() for t in vectors()[0])]
    assert diagnose(Shared().cuda(), Shared().cuda(), batch, steps=5).verdict in SAME


class OneScore(nn.Module):
    """[N, T, 6] -> one number a sample, [N], made by a part of it."""

    def __init__(self, pool=nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.pool, self.last = nn.Linear(6, 8), pool(), nn.Linear(8, 1)

    def forward(self, x):
        return self.pool(self.last(torch.tanh(self.first(x))))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((1, 2))


class SumOverCount(Mean):
    def forward(self, x):
        return x.flatten(1).sum(1) / (x.shape[1] * x.shape[2])


class SumOverOneLess(Mean):
    def forward(self, x):
        return x.flatten(1).sum(1) / (x.shape[1] * x.shape[2] - 1)


@pytest.mark.parametrize(("pool", "verdict"), [(SumOverCount, SAME), (SumOverOneLess, ("bug",))])
def test_one_score_a_sample_beside_targets_that_are_whole_numbers(pool, verdict):
    """As a binary classifier has them: no axis holds classes, and a shorter sequence has no fewer scores."""
    torch.manual_seed(1)
    batches = [(torch.randn(8, 5, 6), torch.randint(2, (8,)))]

    def binary(scores, targets):
        return F.binary_cross_entropy_with_logits(scores, targets.to(scores))

    def rewrite(model):
        model.pool = pool()
        return model

    diagnosis = diagnose(OneScore(Mean), rewrite, batches, loss=binary)
    assert diagnosis.verdict in verdict, diagnosis.headline
    asked = {e.probe: e for e in diagnosis.evidence}
    assert str(asked["rewritten_modules"].status) != "failed", asked["rewritten_modules"].reading
