"""What the sixth ports share: tasks of few batches, and a recurrent cell by hand."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.held_back._fourth_ports import leaf
from bench.tasks import Task


def few(name: str, network: Callable, batch: Callable, loss: Callable, count: int = 3) -> Task:
    """A task of ``count`` batches; all that is drawn comes from fixed seeds."""

    def seeded(make: Callable, seed: int):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return Task(
        name,
        lambda: seeded(network, 60),
        lambda: seeded(lambda: [batch() for _ in range(count)], 61),
        loss,
    )


class Gates(nn.Module):
    """A gated recurrent cell; ``early`` applies the reset gate to the state before its product."""

    def __init__(self, w: dict[str, Tensor], early: bool = False, end: str = ""):
        super().__init__()
        self.early = early
        self.w, self.u = leaf(w["weight_ih" + end].T), leaf(w["weight_hh" + end].T)
        self.b, self.c = leaf(w["bias_ih" + end]), leaf(w["bias_hh" + end])

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        width = h.shape[-1]
        given, held = x @ self.w + self.b, h @ self.u + self.c
        r, z = (given + held)[..., : 2 * width].sigmoid().chunk(2, -1)
        own = r * held[..., 2 * width :]
        if self.early:
            own = (r * h) @ self.u[:, 2 * width :] + self.c[2 * width :]
        new = (given[..., 2 * width :] + own).tanh()
        return new + z * (h - new)
