"""A mixture of experts as Mixtral's in transformers, with a balancing bias kept as DeepSeek keeps it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ported._text import VOCABULARY, text_task

WIDTH, EXPERTS, TOP, HIDDEN, RATE = 24, 4, 2, 32, 0.01


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    """In training mode the bias of experts above their share falls, that of the others rises."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.register_buffer("expert_bias", 0.05 * torch.randn(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.gate(flat).softmax(-1)
        chosen = (weights + self.expert_bias).topk(TOP, -1).indices
        taken = weights.gather(1, chosen)
        taken = taken / taken.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, place = torch.where(chosen == i)
            out = out.index_add(0, row, expert(flat[row]) * taken[row, place, None])
        if self.training:
            load = torch.bincount(chosen.flatten(), minlength=EXPERTS).to(x.dtype)
            self.expert_bias += RATE * torch.sign(load.mean() - load)
        return out.view_as(x)


class Layer(nn.Module):
    """A causal running mean mixes the tokens, the experts the features."""

    def __init__(self):
        super().__init__()
        self.norm_in, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_out, self.block_sparse_moe = nn.LayerNorm(WIDTH), SparseMoe()

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        x = x + self.mix(self.norm_in(x).cumsum(1) / count)
        return x + self.block_sparse_moe(self.norm_out(x))


class MoeLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.lm_head(self.norm(x))}


moe = text_task("moe_small", MoeLM)
MOE = tuple(f"layers.{i}.block_sparse_moe" for i in (0, 1))
GATES = tuple(f"{name}.gate" for name in MOE)
