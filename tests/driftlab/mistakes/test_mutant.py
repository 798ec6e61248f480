"""Integers of one use that stand in another's place."""

import torch

from driftlab.mistakes.mutant import MOST, Indices
from driftlab.mistakes.torch_call import Call

TO, OF = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 2, 0, 0, 1])
SUMS, VALUES = torch.zeros(3), torch.rand(5)


def told(*calls):
    indices = Indices()
    for number, (scope, call) in enumerate(calls):
        indices.see(number, scope, call)
    return list(indices.mutants())


def added(index):
    return Call(torch.index_add, (SUMS, 0, index, VALUES), {})


def test_where_a_module_has_both_it_takes_one_for_the_other():
    mutants = told(("layer", added(TO)), ("layer", Call(torch.index_select, (VALUES[:3], 0, OF), {})))
    assert [(m.scope, set(m.calls), m.said) for m in mutants] == [
        ("layer", {0}, "integers [1, 2, 0, 0, ...] for [0, 0, 1, 2, ...]"),
        ("layer", {1}, "integers [0, 0, 1, 2, ...] for [1, 2, 0, 0, ...]"),
    ]
    torch.testing.assert_close(mutants[0].change(0, added(TO), [], 1.0), added(OF).run())


def test_who_is_given_the_wrong_ones_is_given_them_by_its_caller():
    select = Call(torch.index_select, (VALUES[:3], 0, OF), {})
    mutants = told(("layer.softmax", added(TO)), ("layer.softmax", added(TO)), ("layer", select))
    assert ("layer", {0, 1}) in [(m.scope, set(m.calls)) for m in mutants]


def test_neither_other_shapes_nor_floating_numbers_are_taken():
    assert not told(("", added(TO)), ("", Call(torch.index_select, (VALUES[:3], 0, OF[:4]), {})))


def test_a_loop_that_makes_new_ones_without_end_is_not_followed():
    calls = [("", added(torch.randint(3, (5,), generator=torch.manual_seed(n)))) for n in range(3 * MOST)]
    assert len(told(*calls)) <= MOST * (MOST - 1)
