"""A buffer that the candidate trains, a rounding that one of the two does, weights held in another form."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH = 6
SAME = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(4, 3), torch.randint(3, (4,))) for _ in range(2)]


class Leaning(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("lean", torch.randn(3))

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x))) + self.lean


class Trained(nn.Module):
    """The lean is a weight, to which a gradient comes unless it is ``detached``."""

    def __init__(self, old, detached):
        super().__init__()
        self.inner, self.head, self.detached = old.inner, old.head, detached
        self.leaning = nn.Parameter(old.lean.clone())

    def forward(self, x):
        lean = self.leaning.detach() if self.detached else self.leaning
        return lean + self.head(torch.tanh(self.inner(x)))


@pytest.mark.parametrize("detached", [True, False])
def test_a_buffer_that_is_trained_is_a_bug_where_a_gradient_comes_to_it(detached):
    found = diagnose(Leaning(), lambda old: Trained(old, detached), batches(), steps=3)
    said = next(e for e in found.evidence if e.probe == "same_start")
    assert "lean is a buffer in the reference, and leaning a parameter in the candidate" in said.reading
    if detached:
        assert found.verdict in SAME
        return
    assert (found.verdict, found.where.pass_) == (Verdict.BUG, "weight gradient")


class Gridded(nn.Module):
    """Boxes around whole numbers, as of anchors."""

    def __init__(self, rounds=True):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.rounds = nn.Linear(3, WIDTH), rounds

    def forward(self, x):
        sides = torch.tensor([5.0, 7.0, 11.0]).to(x) / torch.tensor([2.0, 3.0]).to(x).sqrt()[:, None]
        sides = sides.round() if self.rounds else sides
        return torch.tanh(self.inner(x)).unflatten(1, (2, 3)) + sides


@pytest.mark.parametrize(
    ("mine", "theirs", "verdicts"),
    [
        (True, True, SAME),
        (True, False, (Verdict.BUG,)),
        (False, True, (Verdict.REDUCED_PRECISION,)),  # as of weights that are quantised
    ],
)
def test_a_rounding_to_a_grid_is_the_references_function_and_else_precision(mine, theirs, verdicts):
    def loss(outputs, target):
        return nn.functional.cross_entropy(outputs.sum(1), target)

    def rewrite(old):
        made = Gridded(theirs)
        made.load_state_dict(old.state_dict())
        return made

    assert diagnose(Gridded(mine), rewrite, batches(), loss=loss, steps=3).verdict in verdicts


class Factored(nn.Module):
    """A product by a matrix that is held as two triangles; what they hold beside them trains nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lower, self.upper = (nn.Parameter(torch.randn(5, 5)) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(x @ (self.lower.tril(-1) + torch.eye(5)).mT @ self.upper.triu().mT))


class InOneStack(nn.Module):
    """Both triangles in one square, above the head's weight, which is found there."""

    def __init__(self, old, frozen):
        super().__init__()
        square = old.lower.tril(-1) + old.upper.triu()
        self.held = nn.Parameter(torch.cat([square, old.head.weight]).detach())
        self.bias, self.frozen = nn.Parameter(old.head.bias.detach()), frozen

    def forward(self, x):
        square, weight = self.held.split([5, 3])
        lower = square.detach() if self.frozen else square
        made = square.triu() @ (lower.tril(-1) + torch.eye(5))
        return F.linear(torch.tanh(x @ made.mT), weight, self.bias)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_nobody_finds_may_be_trained_all_the_same(frozen):
    torch.manual_seed(1)
    batches = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Factored(), lambda old: InOneStack(old, frozen), batches, loss=F.cross_entropy)
    assert found.verdict is (Verdict.BUG if frozen else Verdict.ROUND_OFF)
    said = next(e for e in found.evidence if e.probe == "function").reading
    assert "lower, upper: trained in" in said if frozen else "lower, upper: found nowhere" in said


def as_buffers(module):
    """The same, with buffers for its weights."""
    for inner in module.modules():
        for name, weight in list(inner.named_parameters(recurse=False)):
            delattr(inner, name)
            inner.register_buffer(name, weight.detach().clone())
    return module


class Followed(nn.Module):
    """A student, and a teacher that is an average of it; ``left_out`` is a part that it does not follow."""

    def __init__(self, left_out="-"):
        super().__init__()
        torch.manual_seed(0)
        self.student, teacher = (
            nn.ModuleDict(
                {"body": nn.Linear(3, WIDTH), "head": nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 3))}
            )
            for _ in range(2)
        )
        self.teacher, self.left_out = as_buffers(teacher), left_out

    def run(self, net, x):
        return net["head"](torch.tanh(net["body"](x)))

    def forward(self, x):
        wanted, found = self.run(self.teacher, x).softmax(-1), self.run(self.student, x)
        if self.training:
            student = dict(self.student.named_parameters())
            for name, own in self.teacher.named_buffers():
                if not name.startswith(self.left_out):
                    own.lerp_(student[name].detach(), 0.1)
        return found - wanted


@pytest.mark.parametrize(
    ("left_out", "module"),
    [("-", None), ("head.1", "teacher.head.1"), ("head", "teacher.head"), ("", "")],
)
def test_weights_that_nobody_moves_are_of_the_module_that_holds_them_all(left_out, module):
    """Or that calls it: a dictionary of modules has no code."""
    found = diagnose(Followed(), Followed(left_out), batches(), loss=F.cross_entropy, steps=2)
    if module is None:
        assert found.verdict is Verdict.BIT_IDENTICAL
        return
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, module, "buffer")


class Once(nn.Module):
    """A batch norm of what is repeated, before it is; its variance counts the copies as the other's does."""

    def __init__(self, norm, copies):
        super().__init__()
        self.copies, self.weight, self.bias = copies, norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name).clone())

    def forward(self, x):
        var, mean = torch.var_mean(x, (0, 2), correction=0)
        if self.training:
            count = self.copies * x[:, 0].numel()
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(var * count / (count - 1), 0.1)
                self.num_batches_tracked += 1
        else:
            mean, var = self.running_mean, self.running_var
        x = (x - mean[:, None]) / (var[:, None] + 1e-5).sqrt()
        return x * self.weight[:, None] + self.bias[:, None]


class Repeated(nn.Module):
    def __init__(self, norm, head, copies=(7, 1)):
        super().__init__()
        self.norm, self.head, self.copies = norm, head, copies

    def forward(self, x):
        before, behind = self.copies
        x = self.norm(x[:, :, None].expand(-1, -1, before))
        return self.head(x.repeat(1, 1, behind).flatten(1))


@pytest.mark.parametrize("copies", [7, 1])
def test_statistics_of_what_is_repeated_later_are_judged_by_what_they_become(copies):
    torch.manual_seed(0)
    network = Repeated(nn.BatchNorm1d(5), nn.Linear(35, 2))
    batches = [(torch.randn(6, 5), torch.randn(6, 2)) for _ in range(2)]
    found = diagnose(
        network,
        lambda old: Repeated(Once(old.norm, copies), old.head, (1, 7)),
        batches,
        loss=lambda outputs, targets: F.mse_loss(outputs, targets) / 20,
        steps=2,
    )
    assert found.verdict is (Verdict.ROUND_OFF if copies == 7 else Verdict.BUG), found.headline
