"""One module of each network on the same inputs, in every arithmetic, all quantities compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from driftlab.arithmetic.control import own_response
from driftlab.arithmetic.difference import PASSES, Difference, Nature
from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.opaque import Opaque
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.arithmetic.quantities import differences, exact_passes, used_outputs
from driftlab.arithmetic.shadow_tensor import Native
from driftlab.fold.layout import AnyFold
from driftlab.network.outputs import Outputs


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
                return not d.shown_otherwise("shadow")
            alone = "shadow64" in self.ran and d.excess("shadow64") > 1 and d.excess("float64") > 1
            return alone and not (self.judged != "float64" and d.by_dtype)
        if self.in_float32_alone:
            return d.nature is Nature.ANOTHER_FUNCTION
        return d.excess("float64") > 1 and d.nature is not Nature.FEWER_BITS

    def untold(self) -> list[Difference]:
        """Differences that the control alone explains, and would explain however large they were."""
        return [d for d in self.differences if d.saturated and self._is_wrong(replace(d, control=0.0))]

    def narrow(self) -> list[Difference]:
        """Quantities that the candidate's float32 gets with fewer bits than the reference's."""
        return self._sorted(d for d in self.differences if d.narrow and not self._is_wrong(d))

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
    control = {"prefix": f"{prefixes[0]}." if prefixes[0] else "", "seed": seed, "evaluate": evaluate}
    wide = next((a for a in ("shadow", "float64") if a in both), "float32")
    truth = None
    if wide == "float32":
        truth = exact_passes(reference, recorded, seed=seed, evaluate=evaluate)
    found = differences(both, fold, prefixes, used, truth, recorded.precision)
    if wide == "float32" and truth is None:
        found = _beside_own_units(found, reference, recorded, both["float32"][0], control)
    coarser = False
    if wide == "shadow":
        in_float64 = "float64" in both and any(d.excess("float64") > 1 >= d.excess("shadow") for d in found)
        if in_float64:
            _try(both, failed, "shadow64", modules, recorded, options)
            found = differences(both, fold, prefixes, used, precision=recorded.precision)
        if _rounds_otherwise(both, found, modules, recorded, fold, prefixes, options):
            own, other = both.pop("shadow")
            both.pop("shadow64", None)
            coarser = other.rounded < own.rounded
            failed["shadow"] = "the reference rounds to whole numbers, and the candidate otherwise"
            wide, found = "float64", differences(both, fold, prefixes, used, precision=recorded.precision)
    if wide != "shadow":
        found = Opaque(reference, candidate, recorded, fold, prefixes, wide, options).with_natures(found)
    if coarser:  # it is the reference that has fewer bits
        found = [replace(d, nature=None) if d.nature is Nature.FEWER_BITS else d for d in found]
    compared = _compared(found, failed, both, judged)
    if wide == "float32":
        return replace(compared, exact=truth is not None)
    return _beside_control(compared, reference, recorded, both[wide][0], {"arithmetic": wide} | control)


def _rounds_otherwise(
    both: dict,
    found: list[Difference],
    modules: tuple,
    recorded: Recorded,
    fold: AnyFold,
    prefixes: tuple,
    options: dict,
) -> bool:
    """Whether the two part in a rounding to a grid, as of anchors, that is the reference's function.

    Or find it in two ways, so that they part where no rounding is done and float32 shows nothing of it. What
    the candidate alone rounds is its precision.
    """
    own, other = both["shadow"]
    if "float64" not in both or not own.rounded or other.rounded > own.rounded:
        return False
    if any(d.excess("shadow") > 1 and d.shown_otherwise("shadow") for d in found):
        return True
    if "shadow64" not in both:
        return False
    kept: dict[str, tuple[Passes, Passes]] = {}
    _try(kept, {}, "shadow64", modules, recorded, options | {"native": Native.GRIDS})
    if not kept:
        return False
    cleared = {(d.pass_, d.name) for d in found if d.excess("float64") > 1 >= d.excess("shadow64")}
    again = differences(both | kept, fold, prefixes, None, precision=recorded.precision)
    return any(d.excess("shadow64") > 1 for d in again if (d.pass_, d.name) in cleared)


def _beside_control(
    compared: Comparison, reference: nn.Module, recorded: Recorded, exact: Passes, options: dict
) -> Comparison:
    """What is about to be held against the candidate, beside what one unit makes of the reference."""
    found = compared.differences
    if compared.wrong():
        own = own_response(found, reference, recorded, exact, **options)
        found = [replace(d, control=own[d.pass_, d.name]) for d in found]
    if compared.narrow():
        own = own_response(found, reference, recorded, exact, **options | {"arithmetic": "float32"})
        found = [replace(d, errors=d.errors | {"control": own[d.pass_, d.name]}) for d in found]
    return replace(compared, differences=found)


def _beside_own_units(
    found: list[Difference], reference: nn.Module, recorded: Recorded, own: Passes, options: dict
) -> list[Difference]:
    """Where nothing runs in more than float32, the reference is the truth, and its control the yardstick."""
    units = own_response(
        found, reference, recorded, own, arithmetic="float32", chaotic_alone=False, **options
    )
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
