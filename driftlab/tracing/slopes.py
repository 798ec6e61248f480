"""Where the backward passes of two networks part whose forward passes agree: at values that both have.

What a value is sent back is the loss's derivative by it, however the code goes on with it. So of two networks
that compute the same, each value that both have is sent the same, and where one is not, while all that is
made of it is, the mistake lies between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from driftlab.arithmetic.passes import Recorded, computing, in_arithmetic, own_inputs
from driftlab.arithmetic.shadow import plain
from driftlab.network.calling import seed_random_layers, tensors_in
from driftlab.network.modules import common
from driftlab.tracing.flow import reached, uses_of
from driftlab.tracing.prints import Prints, Seen, prints, same_numbers
from driftlab.tracing.scopes import Scopes

# Numbers that are kept at most.
LARGEST = 5e7
# How near what two values are sent is to the same: more has gone into it than into the values.
NEAR = 1e-7


@dataclass
class Made:
    """A value of the forward pass, and what it is sent.

    Attributes:
        inputs: what it was made of, by number.
        view: whether it is one of these, or a part of one, or all of one in another shape.
        sent: None where nothing is.
    """

    scope: str
    inputs: tuple[int, ...]
    prints: Prints | None
    view: bool
    sent: Tensor | None = None


@dataclass
class Sent(TorchFunctionMode):
    """Inside, what functions of torch make is recorded, and then what that is sent.

    And what they are given that no function of torch made: an ``autograd.Function`` is none.
    """

    scopes: Scopes
    values: list[Made] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, tuple[Tensor, int, int]] = {}
        self._steps: dict[Node, int] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = tensors_in((args, kwargs or {}))
        for tensor in given:
            if tensor.grad_fn is not None:
                self._see(tensor, self._behind(tensor.grad_fn))
        inputs = tuple(n for t in given if (n := self._number(t)) is not None)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            if tensor.requires_grad:
                self._see(tensor, inputs)
        return out

    def _behind(self, node: Node) -> tuple[int, ...]:
        """The values that this step of the backward pass goes on to."""
        return tuple(self._steps[before] for before, _ in node.next_functions if before in self._steps)

    def _see(self, tensor: Tensor, inputs: tuple[int, ...]) -> None:
        if tensor.is_floating_point() and self._number(tensor) is None:
            self._keep(tensor, inputs)

    def _number(self, tensor: Tensor) -> int | None:
        """None of what is not known, or was written into."""
        known, version, number = self._numbers.get(id(tensor), (None, 0, 0))
        return number if known is tensor and version == tensor._version else None

    def _keep(self, tensor: Tensor, inputs: tuple[int, ...]) -> None:
        found, number = prints(tensor, sliced=False), len(self.values)
        view = tensor._is_view() or any(same_numbers(found, self.values[i].prints) for i in inputs)
        made = Made(self.scopes.now, inputs, found, view)
        self.size += tensor.numel()
        self.values.append(made)
        self._numbers[id(tensor)] = tensor, tensor._version, number
        if tensor.grad_fn is not None:
            self._steps[tensor.grad_fn] = number

        def keep(gradient: Tensor | None) -> None:
            if gradient is None:  # an autograd.Function sends it none
                return
            made.sent = plain(gradient).cpu() + (0.0 if made.sent is None else made.sent)

        if tensor.grad_fn is not None and self.size <= LARGEST:
            tensor.register_hook(keep)


@dataclass(frozen=True)
class Parting:
    """The modules in which what is sent parts, of the reference and of the candidate.

    Attributes:
        own_slope: whether one call of the reference's lies between, to whose input the candidate sends
            something else that is no multiple of the right gradient, so that its slope is another.
    """

    module: str
    candidate_module: str
    own_slope: bool


def parting_of_slopes(
    reference: nn.Module, candidate: nn.Module, whole: Recorded, arithmetic: str, seed: int
) -> Parting | None:
    """None where no value is sent something else while all that is made of it is sent the same.

    What it is made of is sent something else too: else the other network goes by it on another way.
    """
    own, other = (_sent(network, whole, arithmetic, seed) for network in (reference, candidate))
    if max(own.size, other.size) > LARGEST:
        return None
    there = _seen(other.values)
    right = [_told(v, there, other.values) for v in own.values]
    inputs = [v.inputs for v in own.values]
    users = uses_of(inputs)
    known = {n for n, told in enumerate(right) if told is not None}
    for number in (n for n in reversed(range(len(right))) if right[n] is False):
        beyond, before = (
            reached(onward[number], lambda n, onward=onward: [] if n in known else onward[n])
            for onward in (users, inputs)
        )
        wrong_before = not before & known or any(right[n] is False for n in before)
        if wrong_before and any(right[n] for n in beyond) and not any(right[n] is False for n in beyond):
            theirs = {n for m in beyond for n in there.find_whole(own.values[m].prints)}
            scopes = ([v.values[n].scope for n in at] for v, at in ((own, beyond), (other, theirs)))
            alone = [inputs[n] for n in beyond] == [(number,)]
            right_one = own.values[number]
            sent = [other.values[n].sent for n in there.find_whole(right_one.prints)]
            return Parting(
                *map(common, scopes), alone and not any(_is_times(right_one.sent, s) for s in sent)
            )
    return None


def _told(value: Made, there: Seen, others: list[Made]) -> bool | None:
    """Whether it is sent the same in the other network; None where that has it not, or nothing tells.

    What is taken out of another value, or is that in another shape, is sent what its own users send.
    """
    if value.view or value.prints is None or not value.prints.telling:
        return None
    alike = [others[n] for n in there.find_whole(value.prints)]
    all_sent = [one.sent for one in alike if one.sent is not None]
    if not alike or (all_sent and all(one.view for one in alike if one.sent is not None)):
        same = any(_same(value.sent, sent) for sent in all_sent)
        return True if same else None
    if value.sent is None or not bool(value.sent.any()):
        return not any(bool(sent.any()) for sent in all_sent)
    first = [one.sent for one in alike if one.sent is not None and not one.view]
    each = all_sent + ([sum(first)] if len({sent.shape for sent in first}) == 1 else [])
    return any(_same(value.sent, sent) for sent in each)


def _same(own: Tensor | None, other: Tensor) -> bool:
    return own is not None and prints(own, sliced=False).same(prints(other, sliced=False), NEAR)


def _is_times(own: Tensor | None, other: Tensor | None) -> bool:
    """Whether the other is a multiple of it; nothing at all is, and is one of everything."""
    if own is None or other is None or not own.any() or not other.any():
        return True
    return any(_same(own / own.norm(), times * other / other.norm()) for times in (1, -1))


def _sent(network: nn.Module, whole: Recorded, arithmetic: str, seed: int) -> Sent:
    twin = in_arithmetic(network, arithmetic)
    sent = Sent(Scopes(twin))
    with computing(arithmetic):
        given = own_inputs(whole, arithmetic)
        seed_random_layers(seed)
        with sent:
            outputs = whole.called(twin, given, arithmetic)
            loss = whole.measured(twin, outputs, arithmetic)
        loss.backward()
    return sent


def _seen(values: list[Made]) -> Seen:
    seen = Seen()
    for number, value in enumerate(values):
        seen.add(value.prints, number)
    return seen
