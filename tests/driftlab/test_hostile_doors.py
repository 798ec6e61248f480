"""Any door with anything for its arguments, drawn: an answer or one line, no broken pair taken for right."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftlab import DiagnoseError, assert_equivalent, batch_invariant, diagnose, gradient_check, watching
from driftlab.blame import is_ours
from tests.driftlab.handed_over import around, line, parameters
from tests.driftlab.hostile import FOREIGN, Around, batches, identity, inputs, network, raising
from tests.driftlab.hostile_doors import (
    ANYTHING,
    BROKEN,
    FRESH,
    INPUTS,
    LOSSES,
    NETWORKS,
    OPTIMIZERS,
    RIGHT,
    Awkward,
    Groups,
    Steps,
    ThroughSparse,
    WritingIds,
    behind,
    changing_defaults,
    copied_to,
    drawing,
    giving,
    holding_itself,
    moved,
    overriding,
    sgd_whose,
    untold,
    writing_targets,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")


def watched(model, candidate, batches, optimizer=None, **options):
    """A training that makes no update."""
    own = parameters(model) if isinstance(model, torch.nn.Module) else FOREIGN.parameters()
    optimizer = optimizer or torch.optim.SGD(own, lr=0.1)
    watch = watching(model, candidate, optimizer, **options)
    for batch in batches:
        watch.step(*batch)
    return watch.diagnosis


def in_chunks(module, inputs, chunk):
    made = batch_invariant(module.eval() if isinstance(module, torch.nn.Module) else module, chunk)
    try:
        return made(inputs) if chunk == 3 else made
    except DiagnoseError:
        raise
    except Exception as error:  # the module's own, which whoever calls it gets
        if is_ours(error):
            raise
        return made


def asserted(**options):
    assert_equivalent(**options)
    return "passed"


NUMBERS = ("steps", "seed", "trains", "threads", "accumulate", "clip", "outputs", "fold", "directions")
NUMBERS += ("chunk", "budget", "updates", "begins", "scheduler", "candidate_inputs")
USUAL = {
    diagnose: {"reference": network, "candidate": lambda: identity, "batches": batches, "steps": lambda: 2},
    asserted: {"reference": network, "candidate": lambda: identity, "inputs": inputs},
    gradient_check: {"module": network, "inputs": inputs, "loss": lambda: None},
    watched: {"model": network, "candidate": lambda: identity, "batches": batches},
    in_chunks: {"module": lambda: network().eval(), "inputs": inputs, "chunk": lambda: 3},
}
OPTIONS = {
    diagnose: "loss optimizer candidate_optimizer steps fold seed trains threads outputs scheduler clip "
    "accumulate candidate_inputs candidate_loss",
    asserted: "fold seed outputs",
    gradient_check: "loss directions seed",
    watched: "loss budget updates begins fold seed clip candidate_inputs candidate_loss",
    in_chunks: "chunk",
}
ODD = {"inputs": INPUTS, "loss": LOSSES, "candidate_loss": LOSSES, "optimizer": OPTIMIZERS}
ODD |= {"candidate_optimizer": OPTIMIZERS, **dict.fromkeys(("reference", "model"), NETWORKS)}
GOOD = ("bit_identical", "round_off", "passed")


@st.composite
def calls(draw):
    """A door, its arguments, and whether its candidate is broken."""
    door = draw(st.sampled_from(list(USUAL)))
    arguments, broken = dict(USUAL[door]), draw(st.booleans())
    if "candidate" in arguments:
        rewrite = draw(st.sampled_from(BROKEN if broken else RIGHT))
        arguments["candidate"] = lambda: rewrite
    roles = [r for r in (*USUAL[door], *OPTIONS[door].split()) if r not in ("candidate", "module", "batches")]
    for role in draw(st.lists(st.sampled_from(roles), max_size=2, unique=True)):
        odd = [*ODD.get(role, ()), *FRESH, *(lambda it=it: it for it in ANYTHING)]
        arguments[role] = draw(st.sampled_from(odd))
    return door, arguments, broken


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(calls())
def test_any_call_ends_in_an_answer_or_a_line_and_nothing_is_changed(call):
    door, arguments, broken = call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = around(door, arguments)
    if isinstance(found, DiagnoseError):
        line(found)
    elif isinstance(found, AssertionError):
        assert door is asserted
    elif broken and "candidate" in arguments:
        assert getattr(found, "verdict", found) not in GOOD


def holding_its_output():
    return behind(lambda _, y: holding_itself())(network()).eval()


def sparse(**options):
    return giving("to_sparse", **options)(network())


HOSTILE = r"KeyError: 'several.*hostile.py:\d+\)"
ONE_LINE = {
    "its own modules() raises": (asserted, "reference", lambda: overriding("modules"), r"KeyError: 'several"),
    "its own children() raises": (diagnose, "reference", lambda: overriding("children"), r"hostile_doors.py"),
    "its own __call__ raises": (watched, "model", lambda: overriding("__call__"), r"hostile_doors.py"),
    "a mistake of its own": (diagnose, "reference", lambda: overriding("children", NameError), "NameError"),
    "an error that cannot be told": (
        diagnose,
        "loss",
        lambda: untold,
        r"UntoldError \(.*doors.py",
    ),
    "clip raises": (diagnose, "clip", lambda: raising, HOSTILE),
    "clip is awkward": (diagnose, "clip", Awkward, "clip is <Awkward instance"),
    "clip is too large": (diagnose, "clip", lambda: 10**400, "clip is 1000.*: give a norm above 0"),
    "a scheduler's step raises": (diagnose, "scheduler", lambda: Steps, HOSTILE),
    "an optimizer's step raises": (diagnose, "optimizer", lambda: sgd_whose("step"), HOSTILE),
    "its class's does": (diagnose, "optimizer", lambda: sgd_whose("step", on_class=True), HOSTILE),
    "its zero_grad raises": (diagnose, "optimizer", lambda: sgd_whose("zero_grad"), HOSTILE),
    "that of its class": (diagnose, "optimizer", lambda: sgd_whose("zero_grad", on_class=True), HOSTILE),
    "the candidate's step raises": (
        diagnose,
        "candidate_optimizer",
        lambda: lambda module: sgd_whose("step")(module.parameters()),
        HOSTILE,
    ),
    "too many steps": (diagnose, "steps", lambda: 10**400, "steps=1000.*: give a whole number, from 1 to 1"),
    "too many an update": (diagnose, "accumulate", lambda: 10**400, "accumulate=1000.*, from 1 to 1"),
    "a network for a seed": (asserted, "seed", network, r"seed=Sequential\("),
    "an awkward seed": (gradient_check, "seed", Awkward, "seed=<Awkward instance"),
    "a network for a budget": (watched, "budget", network, r"budget is Sequential\("),
    "more steps than a float holds": (watched, "begins", lambda: 10**400, "begins="),
    "no groups": (diagnose, "optimizer", lambda: Groups, "optimizer returned a Groups"),
    "a generator": (asserted, "inputs", lambda: (i for i in ()), "which can be read once: give a tuple"),
    "a list in itself": (gradient_check, "inputs", holding_itself, "nested too deep, or holds itself"),
    "outputs in themselves": (in_chunks, "module", holding_its_output, "an output is nested too deep"),
    "targets in themselves": (diagnose, "batches", lambda: [(inputs(), holding_itself())], "nested too deep"),
    "a class for a fold": (asserted, "fold", lambda: int, "fold raised TypeError: int.. argument"),
    "a lazy network": (gradient_check, "module", lambda: torch.nn.LazyLinear(3), "a lazy module"),
    "a copy refused": (gradient_check, "module", lambda: overriding("__deepcopy__"), "^Own cannot be copied"),
    "a copy that is none": (asserted, "reference", lambda: copied_to(None), "its deep copy is a NoneType"),
    "sparse outputs": (asserted, "reference", sparse, "network returns .*sparse_coo: give it dense"),
    "those of a candidate": (diagnose, "candidate", lambda: giving("to_sparse_csr"), "csr: give it dense"),
    "in eval mode": (asserted, "reference", lambda: sparse(in_eval_alone=True), "in eval mode holds a"),
    "no values": (diagnose, "reference", lambda: giving("to", "meta")(network()), "on the meta device"),
    "outputs of several lines": (diagnose, "outputs", inputs, r"outputs=tensor\(.*: give a mapping"),
    "a precision of several lines": (asserted, "precision", inputs, r"precision is tensor\(.*: give one of"),
    "of chunks": (in_chunks, "module", lambda: sparse().eval(), "an output holds .*: give it dense"),
    "sparse inputs": (in_chunks, "inputs", lambda: inputs().to_sparse_csr(), "sparse_csr: give it dense"),
}


@pytest.mark.parametrize("name", ONE_LINE)
def test_what_cannot_be_asked_of_a_door_is_told_in_a_line(name):
    door, role, make, says = ONE_LINE[name]
    with pytest.raises(DiagnoseError, match=says):
        raise line_of(around(door, USUAL[door] | {role: make}))


def line_of(found):
    line(found)
    return found


def test_what_a_network_changes_for_the_whole_process_is_put_back():
    """``around`` compares defaults, modes and random states, NumPy's and Python's among them."""
    for way in (changing_defaults, drawing):
        around(asserted, USUAL[asserted] | {"reference": lambda way=way: Around(way)})
        around(diagnose, USUAL[diagnose] | {"reference": lambda way=way: Around(way)})
        around(gradient_check, USUAL[gradient_check] | {"module": lambda way=way: Around(way)})


def test_printing_a_diagnosis_draws_nothing():
    found = diagnose(network(), moved, batches(), steps=1)
    around(lambda found: str(found), {"found": lambda: found})


def test_what_is_sparse_inside_of_a_network_is_its_own_affair():
    given = USUAL[asserted] | {"reference": ThroughSparse}
    assert around(asserted, given) == "passed"
    found = around(asserted, given | {"candidate": lambda: lambda model: ThroughSparse(1.01)})
    assert "is not the same function" in str(found)


def test_a_seed_of_numpys_is_a_number():
    assert around(asserted, USUAL[asserted] | {"seed": lambda: np.int64(3)}) == "passed"


def test_weights_without_elements_have_a_fold():
    def beside():
        model = Around(lambda body, x: body(x))
        model.empty = torch.nn.Linear(5, 0)
        return model

    given = {"reference": beside, "candidate": lambda: behind(lambda _, y: y)}
    assert around(diagnose, USUAL[diagnose] | given).verdict in GOOD


WRITES = {
    "a network into its ids": {
        "reference": WritingIds,
        "batches": lambda: [(torch.arange(8) % 5, torch.arange(8) % 3)],
    },
    "a loss into its targets": {"loss": lambda: writing_targets},
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_a_batch_reaches_neither_another_arm_nor_the_caller(name):
    given = {role: make() for role, make in (USUAL[diagnose] | WRITES[name]).items()}
    kept = [[t.clone() for t in pair] for pair in given["batches"]]
    assert diagnose(**given).verdict == "bit_identical"
    assert all(torch.equal(t, k) for t, k in zip(given["batches"][0], kept[0], strict=True))
