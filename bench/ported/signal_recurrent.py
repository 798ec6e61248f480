"""Recurrent networks of torch by hand, with the kernels of TensorFlow and Keras."""

from __future__ import annotations

from torch import nn

from bench.case import GRADIENTS, case
from bench.cases._rewritten import SAME
from bench.ported._signal_recurrent import CounterInKeras, TaggerByHand, TaggerOfGates, counter, tagger


@case(SAME, "one kernel for the gates", tagger)
def tagger_of_one_kernel(model: nn.Module) -> nn.Module:
    return TaggerByHand(model)


@case(SAME, "a layer for each gate", tagger)
def tagger_of_single_gates(model: nn.Module) -> nn.Module:
    return TaggerOfGates(model)


@case("bug", "forget bias", tagger, module="decoder")
def tagger_with_a_forget_bias(model: nn.Module, right: bool = False) -> nn.Module:
    """The cell adds TensorFlow's forget bias of one, which these weights do not expect."""
    return TaggerByHand(model, forget=0.0 if right else 1.0)


@case("bug", "detached state", tagger, module="decoder", passes=GRADIENTS)
def tagger_with_a_detached_cell(model: nn.Module, right: bool = False) -> nn.Module:
    """The upper LSTM's cell state is detached after three steps, as for truncated backpropagation."""
    return TaggerByHand(model, cut=0 if right else 3)


@case(SAME, "kernels of Keras", counter)
def counter_in_keras(model: nn.Module) -> nn.Module:
    return CounterInKeras(model)


@case("bug", "reset before the product", counter, module="gru")
def counter_resetting_before(model: nn.Module, right: bool = False) -> nn.Module:
    """The reset gate acts on the state before the recurrent product, as Keras without reset_after."""
    return CounterInKeras(model, after=right)
