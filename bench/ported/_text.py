"""What the ported networks share: batches, losses that read either output, ways to take weights over."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import Task, _task

VOCABULARY = 37


def answer(outputs: object) -> Tensor:
    """The scores, however the output holds them."""
    if isinstance(outputs, dict):
        names = ("logits", "scores", "logits_per_text", "last_hidden_state")
        return next(outputs[name] for name in names if outputs.get(name) is not None)
    return outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)


def next_token(outputs: object, targets: Tensor) -> Tensor:
    return F.cross_entropy(answer(outputs).flatten(0, 1), targets.flatten())


def chosen(outputs: object, targets: Tensor) -> Tensor:
    return F.cross_entropy(answer(outputs), targets)


def squared(outputs: object, targets: Tensor) -> Tensor:
    return F.mse_loss(answer(outputs), targets)


def tokens(n: int = 4, length: int = 10) -> tuple[dict, Tensor]:
    ids = torch.randint(1, VOCABULARY, (n, length + 1))
    return {"input_ids": ids[:, :length]}, ids[:, 1:]


def sentences(n: int = 6, length: int = 10) -> tuple[dict, Tensor]:
    """Right-padded with 0, of three classes."""
    mask = (torch.arange(length) < torch.randint(4, length + 1, (n, 1))).long()
    ids = torch.randint(1, VOCABULARY, (n, length)) * mask
    return {"input_ids": ids, "attention_mask": mask}, torch.randint(3, (n,))


def stirred(network: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Biases and gains are moved off their zeros and ones, so that no two of them can be exchanged unseen."""

    def make() -> nn.Module:
        model = network()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() < 2:
                    weight += 0.1 * torch.randn_like(weight)
        return model

    return make


def text_task(name: str, network: Callable, batch: Callable = tokens, loss: Callable = next_token) -> Task:
    return _task(name, stirred(network), batch, loss)


def kept(values: Tensor) -> nn.Parameter:
    """A parameter of its own with these values."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))


def dense(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with copies of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = kept(weight)
    if bias is not None:
        layer.bias = kept(bias)
    return layer


def stacked(*layers: nn.Linear) -> nn.Linear:
    """One linear layer for several, one after the other."""
    biases = [layer.bias for layer in layers]
    joint = None if biases[0] is None else torch.cat(biases)
    return dense(torch.cat([layer.weight for layer in layers]), joint)


def split(x: Tensor, heads: int) -> Tensor:
    """[N, T, heads * d] -> [N, heads, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """[N, heads, T, d] -> [N, T, heads * d]."""
    return x.transpose(1, 2).flatten(2)
