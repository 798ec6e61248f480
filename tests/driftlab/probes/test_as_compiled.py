"""What ``torch.compile`` makes of a network is judged as what runs: right, wrong and narrow backends."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, assert_equivalent, diagnose
from driftlab.network.calling import copied


class Block(nn.Module):
    """Its activation is a function of its own, so that it can be compiled as one."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.dropout = dropout

    def act(self, x):
        return F.gelu(self.norm(x))

    def forward(self, x):
        return self.last(F.dropout(self.act(self.first(x)), self.dropout, self.training))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 6, generator=generator), torch.randint(4, (12,), generator=generator))
        for _ in range(2)
    ]


def instead_of_gelu(function):
    """A backend that puts another function in its place."""

    def backend(graph, _):
        for node in graph.graph.nodes:
            if "gelu" in str(node.target):
                node.target, node.kwargs = function, {}
        graph.recompile()
        return graph.forward

    return backend


def tanh_form(x):
    return F.gelu(x, approximate="tanh")


def narrow(x):
    return F.gelu(x.bfloat16()).to(x.dtype)


def in_float32_alone(function):
    return lambda x: function(x) if x.dtype == torch.float32 else F.gelu(x)


def stale(graph, inputs):
    """A backend that keeps the weights as they were when it compiled."""
    kept = [t.detach().clone() if isinstance(t, nn.Parameter) else None for t in inputs]
    return lambda *now: graph.forward(
        *[n if k is None else k + (n - n.detach()) for n, k in zip(now, kept, strict=True)]
    )


def whole(backend):
    return lambda model: torch.compile(model, backend=backend)


def in_place(backend):
    def compiled(model):
        model.compile(backend=backend)
        return model

    return compiled


def a_method(backend):
    def compiled(model):
        model.act = torch.compile(model.act, backend=backend)
        return model

    return compiled


def a_function(backend):
    gelu = torch.compile(F.gelu, backend=backend)

    class Calls(Block):
        def act(self, x):
            return gelu(self.norm(x))

    def compiled(model):
        model.__class__ = Calls
        return model

    return compiled


def found(candidate, reference=None):
    diagnosis = diagnose(Block() if reference is None else reference, candidate, batches(), steps=2)
    return diagnosis, next(e for e in diagnosis.evidence if e.probe == "as_compiled")


WRONG = {
    "relu": whole(instead_of_gelu(F.relu)),
    "tanh form": whole(instead_of_gelu(tanh_form)),
    "relu in float32 alone": whole(instead_of_gelu(in_float32_alone(F.relu))),
    "in place": in_place(instead_of_gelu(F.relu)),
    "a method": a_method(instead_of_gelu(F.relu)),
    "a function": a_function(instead_of_gelu(F.relu)),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_function_in_the_compiled_code_is_a_bug(name):
    diagnosis, evidence = found(WRONG[name])
    assert diagnosis.verdict is Verdict.BUG
    assert diagnosis.where.pass_ == "forward"
    assert evidence.measured > evidence.threshold


def test_weights_that_the_compiler_kept_show_after_an_update():
    diagnosis, _ = found(whole(stale))
    assert (diagnosis.verdict, diagnosis.where.pass_) == (Verdict.BUG, "update")


@pytest.mark.parametrize("function", [narrow, in_float32_alone(narrow)], ids=["any dtype", "float32 alone"])
def test_fewer_bits_in_the_compiled_code_are_fewer_bits(function):
    diagnosis, evidence = found(whole(instead_of_gelu(function)))
    assert diagnosis.verdict is Verdict.REDUCED_PRECISION
    assert "with the grain of a rounding" in evidence.reading


RIGHT = {"whole": whole, "in place": in_place, "a method": a_method, "a function": a_function}


@pytest.mark.parametrize("name", RIGHT)
def test_right_compiled_code_is_not_accused(name):
    diagnosis, evidence = found(RIGHT[name]("eager"))
    assert diagnosis.verdict is evidence.supports is Verdict.BIT_IDENTICAL
    assert "float64" in evidence.reading


def test_compiled_dropout_draws_the_masks_of_eager_code():
    diagnosis, evidence = found(whole("aot_eager"), Block(0.3))
    assert diagnosis.verdict is Verdict.BIT_IDENTICAL, evidence.reading


def test_the_compiled_module_is_named():
    def compiled(model):
        model.norm = torch.compile(model.norm, backend="eager")
        model.last = torch.compile(model.last, backend=lambda graph, _: lambda *a: [1.1 * graph(*a)[0]])
        return model

    assert found(compiled)[0].where.module == "last"


def test_a_reference_that_runs_otherwise_than_it_is_written_is_said():
    reference = torch.compile(Block(), backend=instead_of_gelu(F.relu))
    diagnosis, evidence = found(lambda model: model, reference)
    assert diagnosis.verdict is Verdict.BUG
    assert "the reference as compiled" in evidence.reading


def test_code_that_torch_has_given_up_on_is_judged_compiled_all_the_same():
    with torch._dynamo.config.patch(recompile_limit=1):
        model = whole(instead_of_gelu(F.relu))(Block())
        for size in (2, 3, 4):
            model(torch.randn(size, 6))
        assert found(model)[0].verdict is Verdict.BUG
        assert torch._dynamo.config.recompile_limit == 1


def test_a_pair_without_compiled_code_is_not_asked():
    _, evidence = found(copy.deepcopy)
    assert (evidence.measured, evidence.reading) == (None, "nothing is compiled")


@pytest.mark.parametrize("name", RIGHT)
def test_a_copy_of_compiled_code_is_compiled_and_has_its_own_weights(name):
    met = []

    def backend(graph, _):
        met.append(graph)
        return graph.forward

    model = RIGHT[name](backend)(Block())
    twin = copied(model)
    twin(torch.randn(3, 6)).sum().backward()
    assert met
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_an_assertion_asks_it_too():
    inputs = torch.randn(4, 6)
    assert_equivalent(Block(), whole("eager"), inputs)
    with pytest.raises(AssertionError, match=r"as compiled is .* off what is written"):
        assert_equivalent(Block(), whole(instead_of_gelu(tanh_form)), inputs)


def scripted(model):
    return torch.jit.script(model)


def exported(model):
    return torch.export.export(model, (torch.randn(12, 6),)).module()


@pytest.mark.parametrize("make", [scripted, exported])
def test_scripted_and_exported_code_is_judged_as_it_is(make):
    class Relu(Block):
        def act(self, x):
            return F.relu(self.norm(x))

    def wrong(model):
        other = Relu()
        other.load_state_dict(model.state_dict())
        return make(other)

    assert diagnose(Block(), make, batches(), steps=2).verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert diagnose(Block(), wrong, batches(), steps=2).verdict is Verdict.BUG
