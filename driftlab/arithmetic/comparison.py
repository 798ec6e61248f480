"""One module of each network on the same inputs, in every arithmetic, all quantities compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from driftlab.arithmetic.control import own_response
from driftlab.arithmetic.difference import PASSES, Difference, Nature, distance, finite_norm, same_values
from driftlab.arithmetic.grain import Opaque, Residual
from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.fold.layout import AnyFold
from driftlab.network.outputs import Outputs
from driftlab.rounding import HALFWAY_BITS


@dataclass(frozen=True)
class Comparison:
    """All quantities of one module.

    Attributes:
        differences: in the order of ``PASSES``.
        failed: arithmetic -> what one of the two raised in it, for those that they cannot both run in.
        ran: the arithmetics that both ran in.
        judged: the dtype in which the two were handed over.
        unpaired: the reference's outputs that none of the candidate's stands for.
        spare: the candidate's outputs that stand for none of the reference's.
        carried: the reference's outputs that the loss depends on: a fault in them shows in the loss.
        exact: whether the reference has a result without rounding; else its float32 stands for it.
    """

    differences: list[Difference]
    failed: dict[str, str] = field(default_factory=dict)
    ran: tuple[str, ...] = ()
    judged: str = "float32"
    unpaired: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    carried: frozenset[str] = frozenset()
    exact: bool = True

    @property
    def same_bits(self) -> bool:
        return all(d.same for d in self.differences)

    @property
    def in_float32_alone(self) -> bool:
        """Whether no arithmetic is left in which rounding could be told from a fault by its size."""
        return self.ran == ("float32",)

    def finite(self, loss: bool) -> bool:
        """Whether the reference's outputs, or its loss, hold a finite number at all."""
        return any(d.finite for d in self.differences if d.pass_ == "forward" and (d.name == LOSS) is loss)

    def wrong(self) -> list[Difference]:
        """Differences that no rounding explains, the worst of the first pass first.

        The float32 path computed in float64 decides where it runs. A difference in float64 alone counts
        where it stays in the float64 path computed in float64; if it goes there, the candidate does not
        honour float64, which is precision. Where neither runs, the grain of the difference tells the two.
        """
        return self._sorted(d for d in self.differences if self._is_wrong(d))

    def _is_wrong(self, d: Difference) -> bool:
        if d.overflows:
            return True
        if "shadow" in self.ran:
            if d.excess("shadow") > 1:
                return not d.stored_in_float32
            alone = "shadow64" in self.ran and d.excess("shadow64") > 1 and d.excess("float64") > 1
            return alone and not (self.judged == "float32" and d.by_dtype)
        if self.in_float32_alone:
            return d.nature is Nature.ANOTHER_FUNCTION
        return d.excess("float64") > 1 and d.nature is not Nature.FEWER_BITS

    def untold(self) -> list[Difference]:
        """Differences that the control alone explains, and would explain however large they were."""
        return [d for d in self.differences if d.saturated and self._is_wrong(replace(d, control=0.0))]

    def narrow(self) -> list[Difference]:
        """Quantities that the candidate's float32 gets with fewer bits than the reference's."""
        return self._sorted(d for d in self.differences if d.lost > HALFWAY_BITS and not self._is_wrong(d))

    @property
    def float64_not_honoured(self) -> bool:
        return any(d.excess("float64") > 1 and not self._is_wrong(d) for d in self.differences)

    def in_float64_alone(self) -> list[Difference]:
        """Differences of the function in float64 that are none in float32, in which the two are judged."""
        return self._sorted(
            d for d in self.differences if d.by_dtype and d.excess("shadow64") > 1 and not self._is_wrong(d)
        )

    def _sorted(self, differences: Iterable[Difference]) -> list[Difference]:
        def rank(d: Difference) -> tuple:
            excess = d.lost if self.in_float32_alone else max(d.excess(a) for a in self.ran or ("float64",))
            # a loss is a number made of the outputs: what they are off by says more
            is_output = d.pass_ in ("forward", "eval")
            return PASSES.index(d.pass_), d.name == LOSS, is_output and d.numbers == 1, -excess

        return sorted(differences, key=rank)


def compare(
    reference: nn.Module,
    candidate: nn.Module,
    recorded: Recorded,
    fold: AnyFold,
    *,
    prefixes: tuple[str, str] = ("", ""),
    seed: int = 0,
    evaluate: bool = True,
    judged: str = "float32",
    outputs: Outputs | None = None,
) -> Comparison:
    """Both modules on the same inputs, in every arithmetic that they can run in.

    A pair that runs in float32 alone is held against the reference's exact result, or where there is none
    against what one unit in the last place makes of the reference.

    Args:
        outputs: which output of the candidate stands for which of the reference's.
        fold: from the candidate's tensor names to the reference's, as of the whole networks.
        prefixes: of the names of the two modules' tensors within their networks.
        judged: the dtype in which they were handed over.

    Raises:
        CannotRunError: the reference does not run in float32, or the candidate does not.
    """
    both: dict[str, tuple[Passes, Passes]] = {}
    failed: dict[str, str] = {}
    modules = reference, candidate
    # one for all arithmetics: what stands for what is no matter of rounding
    options = {"seed": seed, "evaluate": evaluate, "outputs": outputs or Outputs()}
    for arithmetic in ("float32", "float64", "shadow"):
        _try(both, failed, arithmetic, modules, recorded, options)
    if "float32" not in both:
        raise CannotRunError(failed["float32"])
    used = used_outputs(recorded)
    wide = next((a for a in ("shadow", "float64") if a in both), "float32")
    truth = None
    if wide == "float32":
        truth = exact_passes(reference, recorded, seed=seed, evaluate=evaluate)
    found = differences(both, fold, prefixes, used, truth)
    if wide == "float32" and truth is None:
        found = _beside_own_units(found, reference, recorded, both["float32"][0], seed, evaluate)
    if wide != "shadow":
        residuals = partial(_residuals, fold=fold, prefixes=prefixes, arithmetic=wide, options=options)
        found = _natures(found, wide, Opaque(reference, candidate, recorded, fold, prefixes, residuals))
    if "shadow" in both and any(d.excess("float64") > 1 >= d.excess("shadow") for d in found):
        _try(both, failed, "shadow64", modules, recorded, options)
        found = differences(both, fold, prefixes, used)
    compared = _compared(found, failed, both, judged)
    if wide == "float32":
        return replace(compared, exact=truth is not None)
    prefix = f"{prefixes[0]}." if prefixes[0] else ""
    control = {"prefix": prefix, "seed": seed, "evaluate": evaluate}
    return _beside_control(compared, reference, recorded, both, control)


def _beside_control(compared: Comparison, reference, recorded, both: dict, options: dict) -> Comparison:
    """What is about to be held against the candidate, beside what one unit makes of the reference."""
    wide, found = "shadow" if "shadow" in both else "float64", compared.differences
    exact = both[wide][0]
    if compared.wrong():
        own = own_response(found, reference, recorded, exact, arithmetic=wide, **options)
        found = [replace(d, control=own[d.pass_, d.name]) for d in found]
    if "float32" in both and compared.narrow():
        own = own_response(found, reference, recorded, exact, arithmetic="float32", **options)
        found = [replace(d, errors=d.errors | {"control": own[d.pass_, d.name]}) for d in found]
    return replace(compared, differences=found)


def _natures(found: list[Difference], arithmetic: str, opaque: Opaque) -> list[Difference]:
    """What those are that are beyond rounding."""

    def beyond(d: Difference) -> bool:
        if d.overflows or d.reshaped:
            return False
        return d.lost > HALFWAY_BITS if arithmetic == "float32" else d.excess(arithmetic) > 1

    asked = [d for d in found if beyond(d)]
    natures = opaque.natures(asked) if asked else {}
    return [replace(d, nature=natures.get((d.pass_, d.name))) for d in found]


def _residuals(
    mine: nn.Module, theirs: nn.Module, recorded: Recorded, *, fold, prefixes, arithmetic: str, options: dict
) -> dict[tuple[str, str], Residual]:
    own = run(mine, recorded, arithmetic, **options)
    other = by_reference_names(run(theirs, recorded, arithmetic, beside=own, **options), fold, prefixes, 1)
    known = {k: options[k] for k in ("seed", "evaluate")}
    truth = exact_passes(mine, recorded, **known) if arithmetic == "float32" else None
    exact = by_reference_names(truth or own, fold, prefixes, 0)
    return {
        (pass_, name): Residual(tensor, other[pass_][name] - tensor)
        for pass_, tensors in exact.items()
        for name, tensor in tensors.items()
        if name in other.get(pass_, {}) and other[pass_][name].shape == tensor.shape
    }


def _beside_own_units(
    found: list[Difference], reference: nn.Module, recorded: Recorded, own: Passes, seed: int, evaluate: bool
) -> list[Difference]:
    """Where nothing runs in more than float32, the reference is the truth, and its control the yardstick."""
    options = {"arithmetic": "float32", "prefix": "", "seed": seed, "evaluate": evaluate}
    units = own_response(found, reference, recorded, own, chaotic_alone=False, **options)
    return [
        replace(
            d, errors={"candidate": d.apart["float32"], "reference": 0.0, "control": units[d.pass_, d.name]}
        )
        for d in found
    ]


def _compared(found: list[Difference], failed: dict[str, str], both: dict, judged: str) -> Comparison:
    own, other = both["float32"]
    unpaired = {
        name: None
        for pass_ in ("forward", "eval")
        for name in own.tensors.get(pass_, {})
        if name not in other.tensors[pass_]
    }
    return Comparison(
        found,
        failed,
        tuple(both),
        judged,
        tuple(unpaired),
        tuple(sorted(other.spare)),
        frozenset(own.carried),
    )


def _try(
    both: dict, failed: dict, arithmetic: str, modules: tuple, recorded: Recorded, options: dict
) -> None:
    reference, candidate = modules
    try:
        own = run(reference, recorded, arithmetic, **options)
        both[arithmetic] = own, run(candidate, recorded, arithmetic, beside=own, **options)
    except CannotRunError as error:
        failed[arithmetic] = str(error)


def exact_passes(module: nn.Module, recorded: Recorded, **options: Any) -> Passes | None:
    """Of a module by itself, where it runs in more than float32. ``options`` as of ``run``."""
    for arithmetic in ("shadow", "float64"):
        try:
            return run(module, recorded, arithmetic, **options)
        except CannotRunError:
            continue
    return None


def used_outputs(recorded: Recorded) -> set[str] | None:
    """The outputs that a gradient came back to; None where all count, as in a frozen part."""
    if recorded.loss is not None:
        return None
    return {name for name, gradient in recorded.gradients.items() if gradient is not None} or None


def differences(
    both: dict[str, tuple[Passes, Passes]],
    fold: AnyFold,
    prefixes: tuple[str, str],
    used: set[str] | None,
    exact: Passes | None = None,
) -> list[Difference]:
    """All quantities of two modules.

    Args:
        both: arithmetic -> the passes of both in it.
        used: the outputs that count, all where None.
        exact: the truth, where it is none of ``both``.
    """
    read = {
        a: tuple(by_reference_names(p, fold, prefixes, i) for i, p in enumerate(pair))
        for a, pair in both.items()
    }
    truth = read["shadow" if "shadow" in read else "float64" if "float64" in read else "float32"][0]
    truth = by_reference_names(exact, fold, prefixes, 0) if exact else truth
    known = exact is not None or len(read) > 1
    found = [
        _difference(
            pass_, name, tensor, {a: (pair[0][pass_], pair[1][pass_]) for a, pair in read.items()}, known
        )
        for pass_ in PASSES
        for name, tensor in truth.get(pass_, {}).items()
        if all(name in pair[i].get(pass_, {}) for pair in read.values() for i in (0, 1))
        and (used is None or pass_ not in ("forward", "eval") or name in used)
    ]
    largest = max((d.size for d in found if d.pass_ == "weight gradient"), default=0.0)
    return [replace(d, scale=largest) if d.pass_ == "weight gradient" else d for d in found]


def by_reference_names(passes: Passes, fold: AnyFold, prefixes: tuple[str, str], index: int) -> dict:
    """Weights, gradients and buffers under the reference's full names."""
    read = dict(passes.tensors)
    for pass_ in ("weight gradient", "buffer"):
        prefix = f"{prefixes[index]}." if prefixes[index] else ""
        named = {prefix + name: tensor for name, tensor in read[pass_].items()}
        read[pass_] = dict(fold(named)) if index else named
    return read


def _difference(pass_: str, name: str, truth: Tensor, pairs: dict, known: bool) -> Difference:
    apart, same = {}, True
    for arithmetic, (mine, theirs) in pairs.items():
        a, b = mine[name], theirs[name]
        apart[arithmetic] = distance(b, a)
        if not arithmetic.startswith("shadow"):
            same = same and same_values(a, b)
    errors = {}
    if "float32" in pairs and known:
        mine, theirs = pairs["float32"]
        errors = {"reference": distance(mine[name], truth), "candidate": distance(theirs[name], truth)}
    own = {a: mine[name] for a, (mine, _) in pairs.items() if a.startswith("shadow")}
    change = distance(own["shadow64"], own["shadow"]) if len(own) > 1 else None
    finite = bool(truth.isfinite().any())
    return Difference(
        pass_,
        name,
        finite_norm(truth),
        apart,
        errors,
        same,
        finite=finite,
        own_change=change,
        numbers=truth.numel(),
    )
