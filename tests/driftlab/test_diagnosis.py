"""``diagnose`` as its users call it: on networks of every make, right, wrong, narrow, unstable, random."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import DiagnoseError, Verdict, diagnose
from driftlab.lockstep.loop import FLUSH_EVERY

torch.set_num_threads(1)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))


def batches(count=4, size=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


class Halves(nn.Module):
    """A linear layer as two, side by side; ``spoil`` acts on the input of the second."""

    def __init__(self, linear, spoil=lambda x: x):
        super().__init__()
        half = linear.out_features // 2
        self.first = nn.Linear(linear.in_features, half)
        self.second = nn.Linear(linear.in_features, linear.out_features - half)
        self.spoil = spoil
        for part, rows in ((self.first, slice(0, half)), (self.second, slice(half, None))):
            part.weight.data.copy_(linear.weight.data[rows])
            part.bias.data.copy_(linear.bias.data[rows])

    def forward(self, x):
        return torch.cat([self.first(x), self.second(self.spoil(x))], 1)


def split(model, spoil=lambda x: x):
    model[2] = Halves(model[2], spoil)
    return model


def bfloat16(model):
    class Narrow(nn.Linear):
        def forward(self, x):
            w, b = self.weight.bfloat16(), self.bias.bfloat16()
            return F.linear(x.bfloat16(), w, b).to(x.dtype)

    narrow = Narrow(16, 12)
    narrow.load_state_dict(model[2].state_dict())
    model[2] = narrow
    return model


def test_a_right_split_is_round_off():
    found = diagnose(network(), split, batches())
    assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert found.where is None
    assert {e.probe for e in found.evidence} >= {"determinism", "function", "update", "float64_pair"}


def test_the_same_network_is_bit_identical():
    assert diagnose(network(), network(), batches(), steps=9).verdict == "bit_identical"


def test_a_cut_gradient_is_a_bug_in_its_module_and_pass():
    found = diagnose(network(), lambda m: split(m, torch.Tensor.detach), batches())
    assert found.verdict == "bug"
    assert (found.where.module, found.where["pass"], found.where.step) == ("2", "input gradient", 0)
    assert "2" in found.headline


@pytest.mark.parametrize("size", [1e-2, 1e-5, 1e-8])
def test_a_factor_is_a_bug_however_small(size):
    found = diagnose(network(), lambda m: split(m, lambda x: x * (1 + size)), batches())
    assert found.verdict == "bug"
    assert (found.where.module, found.where.pass_) == ("2", "forward")


def test_fewer_bits_are_reduced_precision_in_their_module():
    found = diagnose(network(), bfloat16, batches())
    assert found.verdict == "reduced_precision"
    assert (found.where.module, found.where.pass_) == ("2", "forward")


def test_a_candidate_that_always_computes_in_float32_is_no_bug():
    class Single(Halves):
        def forward(self, x):
            w, b = (torch.cat([getattr(self.first, n), getattr(self.second, n)]) for n in ("weight", "bias"))
            return F.linear(x.float(), w.float(), b.float()).to(x.dtype)

    def rewrite(model):
        model[2] = Single(model[2])
        return model

    assert diagnose(network(), rewrite, batches()).verdict in ("round_off", "bit_identical")


@pytest.mark.parametrize(("bug", "verdict"), [(1.0, "round_off"), (1.0001, "bug")])
def test_a_candidate_that_refuses_float64_is_judged_by_what_remains(bug, verdict):
    def only_float32(x):
        assert x.dtype == torch.float32
        return bug * x + 0.0

    found = diagnose(network(), lambda m: split(m, only_float32), batches())
    assert found.verdict == verdict or (verdict == "round_off" and found.verdict == "bit_identical")


def test_a_fault_in_float32_alone_is_found():
    def spoil(x):
        return x * (1 + 3e-6) if x.dtype == torch.float32 else x

    found = diagnose(network(), lambda m: split(m, spoil), batches())
    assert (found.verdict, found.where.module, found.where.pass_) == ("bug", "2", "forward")


class Late(nn.Module):
    """Wrong from its eighth call in training on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return torch.tanh(x) * (1.001 if self.calls > 7 else 1.0)


def test_a_late_fault_is_found_with_its_step():
    def rewrite(model):
        model[3] = Late()
        return model

    found = diagnose(network(), rewrite, batches())
    assert (found.verdict, found.where.module, found.where.pass_) == ("bug", "3", "forward")
    assert found.where.step == 7


def test_a_network_that_does_not_repeat_itself_is_nondeterministic():
    import random

    found = diagnose(network(), lambda m: split(m, lambda x: x * (1 + 1e-7 * random.random())), batches())
    assert (found.verdict, found.where.module) == ("nondeterministic", "2")


def test_dropout_drawn_in_another_order_is_named():
    class Two(nn.Module):
        def forward(self, x):
            left, right = x.chunk(2, 1)
            return torch.cat([F.dropout(part, 0.3, self.training) for part in (left, right)], 1)

    def with_dropout():
        model = network()
        model[3] = nn.Dropout(0.3)
        return model

    def rewrite(model):
        model[3] = Two()
        return model

    found = diagnose(with_dropout(), rewrite, batches(size=16))
    assert found.verdict == "nondeterministic"
    assert "another order" in found.headline


def test_training_that_falls_over_by_itself_is_unstable():
    def steep(parameters):
        return torch.optim.SGD(parameters, lr=30.0, momentum=0.9)

    found = diagnose(network(), lambda m: split(m, lambda x: x + 0.0), batches(), optimizer=steep, steps=40)
    assert found.verdict in ("unstable", "bit_identical")


class ByInputs(nn.Module):
    """A linear layer as the sum over two halves of its inputs."""

    def __init__(self, linear):
        super().__init__()
        left, right = linear.weight.detach().chunk(2, 1)
        self.left, self.right = nn.Parameter(left.clone()), nn.Parameter(right.clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        left, right = x.chunk(2, 1)
        return left @ self.left.T + right @ self.right.T + self.bias


@pytest.mark.parametrize("rate", [1e6, 1e10, 1e20])
def test_where_the_reference_overflows_nan_is_held_against_nobody(rate):
    def rewrite(model):
        model[0], model[2] = ByInputs(model[0]), ByInputs(model[2])
        return model

    def network():  # without a Tanh, which bounds what follows
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    steep = lambda parameters: torch.optim.SGD(parameters, lr=rate)  # noqa: E731
    assert diagnose(network(), rewrite, batches(count=2), optimizer=steep).verdict is Verdict.UNSTABLE


class Masked(nn.Module):
    """Says nothing of what is padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 1)

    def summed(self, x):
        return self.down(x)

    def kept(self, y, real):
        return y.masked_fill(~real, 0.0)

    def forward(self, x, real):
        return self.kept(self.summed(self.up(x).exp())[..., 0], real)


class Multiplied(Masked):
    """The same of finite numbers; 0 times what is none is none."""

    def summed(self, x):
        (left, right), (a, b) = x.chunk(2, -1), self.down.weight.chunk(2, 1)
        return left @ a.T + right @ b.T + self.down.bias

    def kept(self, y, real):
        return y * real


def test_what_padding_becomes_when_the_reference_has_blown_up_is_no_fault():
    def rewrite(model):
        model.__class__ = Multiplied
        return model

    torch.manual_seed(1)
    real = torch.arange(5) < torch.tensor([[5], [3], [4], [2]])
    padded = [((3 * torch.randn(4, 5, 6), real), torch.randn(4, 5)) for _ in range(2)]
    found = diagnose(Masked(), rewrite, padded, loss=F.mse_loss)
    assert found.verdict is Verdict.UNSTABLE
    assert "the reference's as well" in found.headline


def decaying(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def test_a_forgotten_weight_decay_is_a_bug_of_the_update():
    def forgetful(module):
        decayed = [p for n, p in module.named_parameters() if not n.startswith("2.second")]
        rest = [p for n, p in module.named_parameters() if n.startswith("2.second")]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    found = diagnose(network(), split, batches(), optimizer=decaying, candidate_optimizer=forgetful)
    assert (found.verdict, found.where.module, found.where.pass_, found.where.step) == (
        "bug",
        "2",
        "update",
        0,
    )
    assert "weight_decay" in found.headline


def test_an_update_rule_that_looks_at_whole_tensors_is_said_to():
    class Normalised(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad /= p.grad.norm()
            return super().step(closure)

    def fold(tensors):
        joined = {
            f"2.{kind}": torch.cat([tensors[f"2.first.{kind}"], tensors[f"2.second.{kind}"]])
            for kind in ("weight", "bias")
        }
        return {n: t for n, t in tensors.items() if not n.startswith("2.")} | joined

    for given in (None, fold):
        found = diagnose(network(), split, batches(), optimizer=lambda p: Normalised(p, lr=0.1), fold=given)
        assert (found.verdict, found.where.pass_) == ("bug", "update")
        assert "whole tensors" in found.headline


def test_other_initial_weights_are_reported_as_such():
    candidate = network()
    with torch.no_grad():
        candidate[0].weight[3, 2] *= 1 + 1e-6
    found = diagnose(network(), candidate, batches())
    assert (found.verdict, found.where.module) == ("bug", "0")
    assert any("0.weight starts from other values (1 of 96" in e.reading for e in found.evidence)


def test_nothing_that_was_handed_over_is_changed():
    reference, candidate = network(), split(network())
    before = [copy.deepcopy(m.state_dict()) for m in (reference, candidate)]
    state = torch.get_rng_state()
    diagnose(reference, candidate, batches(), steps=2)
    for module, old in zip((reference, candidate), before, strict=True):
        assert all(torch.equal(old[n], t) for n, t in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_print_gives_sentence_place_and_table():
    text = str(diagnose(network(), lambda m: split(m, torch.Tensor.detach), batches()))
    assert text.startswith("bug: not the same function")
    assert "place: the input gradient of 2, since step 0" in text
    assert "determinism" in text
    assert max(map(len, text.splitlines()[2:])) <= 110


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, network(), batches()), "reference is a int: give a torch.nn.Module"),
        (
            (network(), "x", batches()),
            "candidate is a str: give a torch.nn.Module, or a function model -> model",
        ),
        (
            (network(), lambda m: None, batches()),
            "candidate(model) returned a NoneType: it must return a torch.nn.Module",
        ),
        ((network(), network(), []), "batches holds none: give an iterable of (inputs, targets)"),
        (
            (network(), network(), [torch.ones(2)]),
            "batches holds a Tensor of 2: give pairs (inputs, targets)",
        ),
        (
            (network(), network(), [(torch.ones(2, 5), torch.zeros(2).long())]),
            "a network does not run on the first batch",
        ),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message):
    with pytest.raises(DiagnoseError) as error:
        diagnose(*arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_what_is_off_is_said_of_the_outputs_not_of_the_loss_made_of_them():
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)
    other = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)
    # targets so large that the loss hardly depends on the outputs
    x, target = torch.randn(2, 6, 9, 9), torch.randn(2, 6, 9, 9) * 30
    diagnosis = diagnose(conv, other, [(x, target)], loss=F.mse_loss, steps=3)
    outputs = float(((conv(x) - other(x)).norm() / conv(x).norm()).detach())
    function = next(e for e in diagnosis.evidence if e.probe in ("function", "same_start") and e.supports)
    assert diagnosis.verdict == "bug"
    assert f"{outputs:.2g} (relative)" in function.reading


class AtZero(nn.Linear):
    """Off where an input is exactly zero."""

    def forward(self, x):
        return super().forward(torch.where(x == 0, x + 0.01, x))


@pytest.mark.parametrize("flush_every", [1, 25], ids=["as on a CPU", "as on a GPU"])
def test_a_fault_is_dated_by_the_steps_that_a_device_still_holds_too(flush_every, monkeypatch):
    monkeypatch.setitem(FLUSH_EVERY, "cpu", flush_every)
    fed = batches(count=8)
    fed[6][0][0, 0] = 0

    def candidate(model):
        off = AtZero(6, 16)
        off.load_state_dict(model[0].state_dict())
        model[0] = off
        return model

    found = diagnose(network(), candidate, fed, steps=9)
    assert (found.verdict, found.where.step) == ("bug", 6)
