"""Settings that two writings of the same layer often differ by, each as a change of the calls of torch.

Hand-written code is met where it calls torch: ``x + 1e-5`` before a root is a norm's epsilon as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlab.mistakes.norms import epsilon_in
from driftlab.mistakes.roots import other_side
from driftlab.mistakes.torch_call import Call


@dataclass(frozen=True)
class Alteration:
    """One setting changed.

    Attributes:
        words: what was changed, for a sentence.
        concerns: whether a call is made with that setting, and with another value.
        change: makes the call with the setting changed.
        fresh: makes an alteration that remembers nothing, where it remembers calls.
    """

    words: str
    concerns: Callable[[Call], bool]
    change: Callable[[Call], Any]
    fresh: Callable[[], Alteration] | None = field(default=None, compare=False)

    def begun(self) -> Alteration:
        return self.fresh() if self.fresh else self


# Of norms in torch, JAX, Keras and papers; float32's own unit stands where none is given.
EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 0.0, 2.0**-23)


def _epsilon(value: float) -> Alteration:
    def concerns(call: Call) -> bool:
        own = _own_epsilon(call)
        return own is not None and own != value

    def change(call: Call) -> Any:
        given = call.given()
        return call.again(eps=value) if given and "eps" in given else call.with_number(value)

    return Alteration(f"an epsilon of {value:.3g}", concerns, change)


def _own_epsilon(call: Call) -> float | None:
    if call.name in ("add", "clamp", "clamp_min"):
        found = call.number()
        return float(found[1]) if found and 0 < abs(found[1]) <= max(EPSILONS) else None
    if not call.name.endswith("norm") and call.name != "normalize":
        return None
    given = call.given() or {}
    return float(epsilon_in(given)) if "eps" in given else None


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu's tanh form": lambda x: F.gelu(x, approximate="tanh"),
    "gelu's sigmoid form, x * sigmoid(1.702 x),": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": F.relu,
    "SiLU": F.silu,
}


def form(call: Call) -> str | None:
    if call.name == "gelu":
        return "gelu's tanh form" if "tanh" in (*call.args[1:], *call.kwargs.values()) else "gelu"
    return {"relu": "ReLU", "silu": "SiLU"}.get(call.name)


def _activation(words: str) -> Alteration:
    return Alteration(
        words,
        lambda call: form(call) not in (None, words),
        lambda call: FORMS[words](call.argument(0, "input")),
    )


def _tanh_for_erf(call: Call) -> Tensor:
    """Within gelu written out, erf(x / sqrt(2))."""
    x = math.sqrt(2) * call.args[0]
    return torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


_ONE_OFF = {"ge": torch.gt, "gt": torch.ge, "le": torch.lt, "lt": torch.le}


def _erf_for_sigmoid(call: Call) -> Tensor:
    """Within gelu's sigmoid form, sigmoid(1.702 x)."""
    return 0.5 * (1 + torch.erf(call.args[0] / 1.702 / math.sqrt(2)))


def _compares_positions(call: Call) -> bool:
    both = call.args[:2]
    return call.name in _ONE_OFF and all(
        isinstance(t, Tensor) and not t.is_floating_point() and not t.is_complex() for t in both
    )


def _masks(call: Call) -> bool:
    return call.name in ("tril", "triu") or _attends(call, "is_causal")


def _diagonal(by: int) -> Alteration:
    def change(call: Call) -> Any:
        if call.name in ("tril", "triu"):
            return call.with_argument(1, "diagonal", call.argument(1, "diagonal", 0) + by)
        rows, columns = call.args[0].shape[-2], call.args[1].shape[-2]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=call.args[0].device).tril(by)
        return call.again(is_causal=False, attn_mask=mask)

    side = "later" if by > 0 else "earlier"
    return Alteration(f"a mask one position {side}", _masks, change)


def _attends(call: Call, setting: str = "query") -> bool:
    given = call.given() if call.function is F.scaled_dot_product_attention else None
    return given is not None and given[setting] is not False


def _scores(words: str, power: int) -> Alteration:
    """Scores of attention times d to some power more than 1/sqrt(d)."""

    def change(call: Call) -> Any:
        own = (call.given() or {})["scale"] or call.args[0].shape[-1] ** -0.5
        return call.again(scale=own ** (1 + power))

    return Alteration(words, lambda c: _attends(c), change)


def _multiplies(call: Call) -> bool:
    found = call.number() if call.name in ("mul", "div") else None
    return found is not None and abs(found[1]) not in (0, 1) and isinstance(call.args[1 - found[0]], Tensor)


def _batch_statistics(call: Call) -> bool:
    given = call.given() if call.name == "batch_norm" else None
    return bool(given and given["training"] and given["running_var"] is not None and given["momentum"])


def _biased_variance(call: Call) -> Any:
    """The running variance moved by that of the batch over n, not n - 1."""
    given = call.given() or {}
    running, n = given["running_var"], given["input"].numel() / given["input"].shape[1]
    before = running.detach().clone()
    out = call.run()
    kept = (1 - given["momentum"]) * before
    with torch.no_grad():
        running.copy_(kept + (running - kept) * ((n - 1) / n))
    return out


def _switch(call: Call) -> str:
    return "train" if call.function is torch.dropout else "training"


def _drops_nothing(call: Call) -> bool:
    rate = call.argument(1, "p", 0.5) if call.name == "dropout" else 0.0
    return rate > 0 and not call.argument(2, _switch(call), True)


def _kept_statistics(call: Call) -> bool:
    given = call.given() if call.name == "batch_norm" else None
    return bool(given and not given["training"])


def _by_the_batch(call: Call) -> Any:
    return call.again(training=True, running_mean=None, running_var=None)


def _projected_without(what: str) -> Alteration:
    """Attention, as a module of torch's calls it, without a third of its bias."""

    def concerns(call: Call) -> bool:
        given = call.given() if call.function is F.multi_head_attention_forward else None
        return bool(given and given["in_proj_bias"] is not None)

    def change(call: Call) -> Any:
        parts = [*(call.given() or {})["in_proj_bias"].chunk(3)]
        place = ("queries", "keys", "values").index(what)
        parts[place] = torch.zeros_like(parts[place])
        return call.again(in_proj_bias=torch.cat(parts))

    return Alteration(f"no bias of the {what}", concerns, change)


_WEIGHTED = ("linear", *(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3)))


def weighted(call: Call) -> Tensor | None:
    """The weight of a linear or a convolution."""
    if call.name not in _WEIGHTED:
        return None
    weight = call.argument(1, "weight")
    return weight if isinstance(weight, Tensor) else None


def _biased(call: Call) -> bool:
    return weighted(call) is not None and call.argument(2, "bias") is not None


def _with_weight(change: Callable[[Tensor], Tensor]) -> Callable[[Call], Any]:
    return lambda call: call.with_argument(1, "weight", change(call.argument(1, "weight")))


def _is_square(call: Call) -> bool:
    weight = weighted(call)
    return weight is not None and weight.shape[-1] == weight.shape[-2] > 1


def _has_kernel(call: Call) -> bool:
    weight = weighted(call)
    return weight is not None and weight.dim() > 2 and weight[0, 0].numel() > 1


def _flipped(weight: Tensor) -> Tensor:
    return weight.flip(list(range(2, weight.dim())))


def _root() -> Alteration:
    concerns, change = other_side()
    return Alteration("the epsilon on the other side of the root", concerns, change, _root)


ALTERATIONS = (
    *map(_activation, FORMS),
    Alteration("gelu's tanh form, in place of erf,", lambda c: c.name == "erf", _tanh_for_erf),
    Alteration("gelu, in place of its sigmoid form,", lambda c: c.name == "sigmoid", _erf_for_sigmoid),
    *map(_epsilon, EPSILONS),
    _root(),
    *map(_diagonal, (1, -1)),
    Alteration(
        "a comparison of positions one off", _compares_positions, lambda c: _ONE_OFF[c.name](*c.args[:2])
    ),
    Alteration("no causal mask", lambda c: _attends(c, "is_causal"), lambda c: c.again(is_causal=False)),
    _scores("scores that are not divided by sqrt(d)", -1),
    _scores("scores that are divided by sqrt(d) twice", 1),
    Alteration("a constant factor left out", _multiplies, lambda c: c.with_number(1.0)),
    Alteration("a constant factor taken twice", _multiplies, lambda c: c.with_number(c.number()[1] ** 2)),
    Alteration(
        "a momentum of 1 - m, as Keras counts it,",
        _batch_statistics,
        lambda c: c.again(momentum=1 - c.given()["momentum"]),
    ),
    Alteration("a running variance over n, not n - 1,", _batch_statistics, _biased_variance),
    *map(_projected_without, ("queries", "keys", "values")),
    Alteration("dropout unasked for", _drops_nothing, lambda c: c.with_argument(2, _switch(c), True)),
    Alteration("the batch's statistics, in place of the stored ones,", _kept_statistics, _by_the_batch),
    Alteration("a bias left out", _biased, lambda c: c.with_argument(2, "bias", None)),
    Alteration("a transposed weight", _is_square, _with_weight(lambda w: w.transpose(-1, -2))),
    Alteration("a kernel turned round", _has_kernel, _with_weight(_flipped)),
)
