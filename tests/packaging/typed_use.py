"""What a user writes: every public door, called as documented.

mypy checks it strictly against the library's own types; ``test_wheel.py`` runs it where only the wheel is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import driftlab
from driftlab import (
    DiagnoseError,
    Diagnosis,
    Evidence,
    GradientCheck,
    Place,
    Verdict,
    assert_equivalent,
    batch_invariant,
    diagnose,
    gradient_check,
)


class Halves(nn.Module):
    """A convolution as two, each for half of the output channels; a wrong one sends back half a gradient."""

    def __init__(self, conv: nn.Conv2d, wrong: bool = False):
        super().__init__()
        first, second = (nn.Parameter(w.detach().clone()) for w in conv.weight.chunk(2))
        self.first, self.second, self.wrong = first, second, wrong

    def forward(self, x: Tensor) -> Tensor:
        other = x.detach() if self.wrong else x
        return torch.cat([F.conv2d(x, self.first), F.conv2d(other, self.second)], dim=1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)]
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.Flatten(), nn.Linear(16, 3))


def right(model: nn.Module) -> nn.Module:
    return rewritten(model, wrong=False)


def wrong(model: nn.Module) -> nn.Module:
    return rewritten(model, wrong=True)


def rewritten(model: nn.Module, wrong: bool) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    conv = model[2]
    assert isinstance(conv, nn.Conv2d)
    model[2] = Halves(conv, wrong)
    return model


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    for _ in range(4):
        yield torch.randn(8, 3, 6, 6), torch.randint(3, (8,))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def fold(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """From the halves' tensors to the reference's."""
    whole = torch.cat([tensors["2.first"], tensors["2.second"]])
    return tensors | {"2.weight": whole}


def message(kind: type[Exception], refused: Callable[[], None]) -> str:
    try:
        refused()
    except kind as error:
        return str(error)
    raise RuntimeError(f"no {kind.__name__}")


def diagnosed() -> None:
    diagnosis = diagnose(network(), right, batches(), steps=9)
    assert_type(diagnosis, Diagnosis)
    assert_type(diagnosis.verdict, Verdict)
    assert_type(diagnosis.where, Place | None)
    assert_type(diagnosis.evidence, list[Evidence])
    assert diagnosis.verdict == "round_off", diagnosis
    assert str(diagnosis).startswith(f"round_off: {diagnosis.headline}")
    other = diagnose(
        network(),
        wrong(network()),
        list(batches()),
        loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        candidate_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        steps=9,
        fold=None,
        seed=0,
    )
    assert other.verdict is Verdict.BUG, other
    assert other.where is not None
    assert_type(other.where.module, str | None)
    assert (other.where.module, other.where.pass_, other.where.step) == ("2", "input gradient", 0), other
    said = message(DiagnoseError, lambda: print(diagnose(network(), right, [])))
    assert said.startswith("batches holds none"), said


def asserted() -> None:
    inputs, _ = next(batches())
    assert_equivalent(network(), right, inputs)
    assert_equivalent(network(), right(network()), (inputs,), fold=fold, seed=1)
    said = message(AssertionError, lambda: assert_equivalent(network(), wrong, inputs))
    assert "Where: input gradient of 2" in said, said


def checked() -> None:
    inputs, targets = next(batches())
    check = gradient_check(network(), inputs, lambda outputs: loss(outputs, targets))
    assert_type(check, GradientCheck)
    assert check, check
    assert not gradient_check(wrong(network()), inputs)


def in_chunks() -> None:
    inputs, _ = next(batches())
    model = batch_invariant(network().eval(), chunk=1)
    outputs = model(inputs)
    assert torch.equal(outputs[2:3], model(inputs[2:3]))


def refused_by_mypy(diagnosis: Diagnosis) -> None:
    """Never called: mypy says so where one of these lines is no error."""
    print(diagnosis.where.module)  # type: ignore[union-attr]
    diagnosis.verdict = Verdict.BUG  # type: ignore[misc]
    diagnose(network(), right)  # type: ignore[call-arg]
    diagnose(network(), "right", batches())  # type: ignore[arg-type]
    assert_equivalent(network(), right, torch.ones(1), None)  # type: ignore[call-arg]
    print(driftlab.diagnosed)  # type: ignore[attr-defined]


def main() -> None:
    assert_type(driftlab.__version__, str)
    print(f"driftlab {driftlab.__version__}")
    for use in (asserted, diagnosed, checked, in_chunks):
        use()
        print(use.__name__)


if __name__ == "__main__":
    main()
