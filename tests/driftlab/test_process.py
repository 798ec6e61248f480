"""The settings of the process under a measurement: settled, watched, and put back to the bit."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import assert_equivalent, batch_invariant, diagnose, gradient_check
from driftlab.process import measuring, random_state_kept, settled
from driftlab.process.flags import putting_back, settings
from driftlab.record.environment import environment

PLACES = [(b, o) for b in ("generic", "cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")]
PLACES = [place for place in PLACES if place[0] != "generic" or place[1] == "all"]
OLDER = (
    torch.get_float32_matmul_precision,
    lambda: torch.backends.cuda.matmul.allow_tf32,
    lambda: torch.backends.cudnn.allow_tf32,
)


def answer(get):
    try:
        return get()
    except RuntimeError as error:  # torch's, where the older and the newer settings disagree
        return str(error)[:60]


def everything():
    """What torch answers about its settings, by the older and the newer way of asking."""
    found = {str(place): torch._C._get_fp32_precision_getter(*place) for place in PLACES}
    found |= {str(i): answer(get) for i, get in enumerate(OLDER)}
    return settings() | found | {"workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}


@pytest.fixture(autouse=True)
def _as_before():
    put_back = putting_back()
    before = everything()
    yield
    put_back()
    assert everything() == before


def mixed():
    torch.backends.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def fast():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_math_sdp(False)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"


CALLERS = {
    "torch's own": lambda: None,
    "the newer way, for all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "the newer way, for a backend": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
    "the newer way, for an operation": lambda: setattr(torch.backends.cudnn.rnn, "fp32_precision", "none"),
    "the older way": lambda: torch.set_float32_matmul_precision("medium"),
    "the older way, cuBLAS": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "the older way, cuDNN": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "both ways, which disagree": mixed,
    "kernels as fast as can be": fast,
}


@pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS)
@pytest.mark.parametrize("fails", [False, True])
def test_settings_hold_inside_and_are_the_callers_again(call, fails):
    call()
    before = everything()
    try:
        with settled():
            inside = everything()
            if fails:
                raise InterruptedError
    except InterruptedError:
        pass
    assert everything() == before
    assert {inside[str(place)] for place in PLACES} == {"ieee"}
    assert [inside[str(i)] for i in range(len(OLDER))] == ["highest", False, False]
    assert inside["deterministic_debug_mode"] == 1
    assert (inside["cudnn.benchmark"], inside["cudnn.deterministic"]) == (False, True)


@pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS)
def test_all_of_tf32_holds_where_it_is_asked_for(call):
    call()
    with settled(tf32=True):
        found = everything()
    assert {found[str(("cuda", operation))] for operation in ("matmul", "conv", "rnn")} == {"tf32"}
    assert [found[str(i)] for i in range(len(OLDER))] == ["high", True, True]


@pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS)
def test_the_environment_can_be_told_whatever_is_set(call):
    call()
    found = environment(torch.device("cpu"))
    assert found["tf32"]["matmul"] is (found["fp32_precision"]["cuda.matmul"] == "tf32")


def test_attention_that_sums_in_any_order_is_off_and_a_cpu_keeps_its_own():
    """Under "warn" no fused attention has a deterministic backward pass on a GPU (pytorch #101847)."""
    with settled(cuda=True):
        assert environment(torch.device("cpu"))["attention"] == "math"
    with settled(cuda=False):
        assert environment(torch.device("cpu"))["attention"] == "math, flash"


def test_the_inner_one_holds_and_the_outer_one_again_after_it():
    with settled(tf32=True):
        with settled():
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        with settled(tf32=None):
            assert torch.backends.cudnn.allow_tf32


def test_threads_that_leave_in_any_order_leave_the_callers_settings():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with settled():
            entered.set()
            leave.wait(60)

    thread, before = threading.Thread(target=other), everything()
    with settled():
        thread.start()
        assert entered.wait(60)
    assert not torch.backends.cudnn.allow_tf32  # the other is still at it
    leave.set()
    thread.join()
    assert everything() == before


class Looks(nn.Linear):
    """Remembers the settings that it ran under."""

    saw = None

    def forward(self, x):
        type(self).saw = settings()
        return super().forward(x)


def pair(make=Looks):
    torch.manual_seed(0)
    reference, candidate = nn.Linear(4, 3), make(4, 3)
    candidate.load_state_dict(reference.state_dict())
    return reference, candidate


BATCH = (torch.linspace(-1, 1, 32).view(8, 4), torch.arange(8) % 3)
DOORS = {
    "diagnose": lambda reference, candidate: diagnose(reference, candidate, [BATCH], steps=2),
    "assert_equivalent": lambda reference, candidate: assert_equivalent(reference, candidate, BATCH[0]),
    "gradient_check": lambda _, candidate: gradient_check(candidate, BATCH[0]),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_door_measures_in_all_bits_and_leaves_everything_as_it_was(door, monkeypatch):
    networks = pair()
    mixed()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(5)
    before, state = everything(), torch.get_rng_state()
    door(*networks)
    assert {v for name, v in Looks.saw.items() if name.startswith("float32.")} == {"ieee"}
    assert (Looks.saw["cudnn.benchmark"], Looks.saw["attention.mem_efficient"]) == (False, False)
    assert everything() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_their_own_are_computed_by_kernels_that_repeat_themselves_in_the_callers_precision():
    torch.backends.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = True
    network, before, state = pair()[1].eval(), everything(), torch.get_rng_state()
    batch_invariant(network, chunk=3)(BATCH[0])
    assert Looks.saw["float32.cuda.matmul"] == "tf32"
    assert (Looks.saw["cudnn.benchmark"], Looks.saw["deterministic_debug_mode"]) == (False, 1)
    assert everything() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_leaves_everything_as_it_was():
    mixed()
    before, state = everything(), torch.get_rng_state()

    @measuring()
    def fails():
        torch.manual_seed(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert everything() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_the_random_state_of_every_gpu_that_runs_is_kept(monkeypatch):
    states = {0: torch.tensor([1]), 1: torch.tensor([2])}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[int(device)])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, device: states.update({int(device): s}))
    with random_state_kept():
        states |= {0: torch.tensor([7]), 1: torch.tensor([8])}
    assert [int(state) for state in states.values()] == [1, 2]


def to_tf32(model):
    torch.set_float32_matmul_precision("high")
    return model


def to_any_kernel(model):
    torch.backends.cudnn.benchmark = True
    return model


class TF32Within(nn.Linear):
    def forward(self, x):
        torch.backends.cuda.matmul.allow_tf32 = True
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*changes settings of the whole process")
@pytest.mark.parametrize("candidate", [to_tf32, pair(TF32Within)[1]], ids=["rewrite", "forward"])
def test_a_candidate_that_turns_tf32_on_does_not_pass(candidate):
    reference, before = pair()[0], everything()
    found = diagnose(reference, candidate, [BATCH], steps=2)
    assert found.verdict == "reduced_precision"
    assert "float32.cuda.matmul from ieee to tf32" in found.headline
    with pytest.raises(AssertionError, match=r"cuda\.matmul from ieee to tf32"):
        assert_equivalent(reference, candidate, BATCH[0])
    assert everything() == before


LOUD = {
    "diagnose": lambda: diagnose(*pair(TF32Within), [BATCH], steps=2),
    "assert_equivalent": lambda: assert_equivalent(pair()[0], to_any_kernel, BATCH[0]),
    "gradient_check": lambda: gradient_check(pair(TF32Within)[1], BATCH[0]),
    "batch_invariant": lambda: batch_invariant(pair(TF32Within)[1].eval())(BATCH[0]),
}


@pytest.mark.parametrize("call", LOUD.values(), ids=LOUD)
def test_whoever_changes_settings_is_named_in_a_warning(call):
    with pytest.warns(UserWarning, match=r"changes settings of the whole process, put back: \S+ from"):
        call()


@pytest.mark.filterwarnings("ignore:.*changes settings of the whole process")
def test_what_the_reference_sets_as_well_is_said_and_held_against_nobody():
    torch.manual_seed(0)
    reference = TF32Within(4, 3)
    found = diagnose(reference, lambda model: model, [BATCH], steps=2)
    assert found.verdict == "bit_identical"
    (said,) = [e for e in found.evidence if e.probe == "process_settings"]
    assert said.supports is None
    assert "the reference changes float32.cuda.matmul from ieee to tf32" in said.reading


@pytest.mark.filterwarnings("ignore:.*changes settings of the whole process")
def test_other_settings_and_later_ones_are_said():
    reference = pair()[0]

    def sgd(parameters):
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        return torch.optim.SGD(parameters, lr=0.1)

    found = diagnose(reference, to_any_kernel, [BATCH], F.cross_entropy, sgd, steps=2)
    said = {e.probe: e.reading for e in found.evidence if e.probe.endswith("_settings")}
    assert "the rewrite changes cudnn.benchmark from False to True" in said["process_settings"]
    assert "the training changes attention.mem_efficient from False to True" in said["training_settings"]


@pytest.mark.filterwarnings("error:.*changes settings of the whole process")
def test_what_a_measurement_chooses_for_itself_is_nobodys_change():
    found = diagnose(*pair(), [BATCH], steps=2)
    (said,) = [e for e in found.evidence if e.probe == "process_settings"]
    assert "changes" not in said.reading
