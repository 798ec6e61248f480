"""GPT-2 of transformers against nanoGPT's manner and against functions over a dict of weights."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._text_gpt import BLOCKS, Functional, Nano, every, gpt2


@case(SAME, "Conv1D weights transposed", gpt2)
def gpt2_as_nanogpt(model: nn.Module) -> nn.Module:
    return Nano(model)


@case(SAME, "functions over a dict, cache in eval", gpt2)
def gpt2_over_a_dict_of_weights(model: nn.Module) -> nn.Module:
    return Functional(model)


@case("bug", "gelu variant", gpt2, module=(*every("mlp.act"), *every("mlp"), *BLOCKS))
def gpt2_with_the_exact_gelu(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The MLP takes the exact GELU; GPT-2 was trained with the tanh approximation."""
    return Nano(model, gelu="none" if wrong else "tanh")


@case(
    "bug",
    "tie lost",
    gpt2,
    module=("transformer.wte", "lm_head", ""),
    passes=("weight gradient", "update"),
)
def gpt2_head_no_longer_tied(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The head is a copy of the embedding: neither gets the other's gradient."""
    return Nano(model, tied=not wrong)


@case("bug", "cache", gpt2, module=("", "transformer", "transformer.wpe"), passes="eval")
def gpt2_cached_positions_one_ahead(model: nn.Module, wrong: bool = True) -> nn.Module:
    """In cached decoding every token but the first gets the position embedding of the next place."""
    return Functional(model, late=wrong)
