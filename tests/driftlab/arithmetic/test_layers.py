"""What the per-layer picture is drawn from."""

import json

import pytest

from driftlab.arithmetic.layers import layers
from driftlab.arithmetic.local import Local
from tests.driftlab.arithmetic.layers import FAULTS
from tests.driftlab.arithmetic.test_locating import local, network


def by_name(pair, accused=()):
    return {entry["module"]: entry for entry in layers(pair, accused)}


def test_pairs_stand_in_the_order_of_the_forward_pass_the_smallest_there_are():
    found = layers(local(network(), network()))
    names = [entry["module"] for entry in found]
    assert names == ["0", "1.inner.norm", "1.out", "2.inner.norm", "2.out", "3"]
    assert not any(entry["rewritten"] or entry["passes"] for entry in found)


@pytest.mark.parametrize("pass_", ["forward", "input gradient", "weight gradient"])
def test_a_fault_stands_beyond_what_rounding_explains_in_its_pass_alone(pass_):
    entries = by_name(local(network(), network(block2=FAULTS[pass_])))
    values = entries["2.inner"]["passes"][pass_]
    assert values["exact"] > 100 * values["exact_explained"]
    before = {"forward": [], "input gradient": ["forward"], "weight gradient": ["forward"]}[pass_]
    assert all(entries["2.inner"]["passes"][p]["exact"] == 0.0 for p in before)
    assert not any(e["passes"] for name, e in entries.items() if name != "2.inner")


def test_rounding_is_within_what_it_explains_and_shrinks_where_it_is_taken_away():
    one_ulp = {"on_result": lambda y: (y * 3) / 3}
    values = by_name(local(network(), network(block1=one_ulp)))["1.inner"]["passes"]["input gradient"]
    assert 0 < values["float32"] < values["float32_explained"]
    assert values["exact"] < values["exact_explained"] < 1e-9


def test_fewer_bits_show_in_float32_alone():
    narrow = {"on_input": lambda x: x.bfloat16().to(x.dtype)}
    values = by_name(local(network(), network(block1=narrow)))["1.inner"]["passes"]["forward"]
    assert values["float32"] > values["float32_explained"]
    assert values["exact"] < values["exact_explained"]


def test_an_accused_pair_is_looked_at_though_its_code_is_the_same():
    candidate = network()
    candidate[1].out.weight.data[0] += 0.5
    entries = by_name(local(network(), candidate), accused=["1.out", "elsewhere"])
    assert entries["1.out"]["passes"]["forward"]["exact"] > 1e-3
    assert not entries["1.out"]["rewritten"]


def test_nothing_is_measured_twice(monkeypatch):
    pair = local(network(), network(block1=FAULTS["forward"]))
    names = pair.rewritten()
    assert all(pair.comparisons(name) for name in names)
    monkeypatch.setattr(Local, "_compare", lambda *_: pytest.fail("measured again"))
    assert {e["module"] for e in layers(pair) if e["passes"]} == set(names)


def test_what_is_stored_is_plain():
    found = layers(local(network(), network(block1=FAULTS["forward"])))
    assert json.loads(json.dumps(found)) == found
