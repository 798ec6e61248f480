"""GPT-2 of transformers, small, and two ports of it: nanoGPT's manner, and functions over a dict."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from bench.ported._text import VOCABULARY, dense, kept, merge, split, text_task

HEADS = 4
SETTINGS = {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 16, "initializer_range": 0.1}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def network() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **SETTINGS, **NO_DROPOUT))


gpt2 = text_task("gpt2_small", network)
BLOCKS = ("transformer.h.0", "transformer.h.1")


def every(part: str) -> tuple[str, ...]:
    return tuple(f"{block}.{part}" for block in BLOCKS)


class NanoBlock(nn.Module):
    def __init__(self, block: nn.Module, gelu: str):
        super().__init__()
        self.norm_a, self.norm_b, self.gelu = block.ln_1, block.ln_2, gelu
        self.to_qkv = dense(block.attn.c_attn.weight.T, block.attn.c_attn.bias)
        self.to_out = dense(block.attn.c_proj.weight.T, block.attn.c_proj.bias)
        fc, proj = block.mlp.c_fc, block.mlp.c_proj
        self.ffn = nn.ModuleList([dense(fc.weight.T, fc.bias), dense(proj.weight.T, proj.bias)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, HEADS) for part in self.to_qkv(self.norm_a(x)).split(x.shape[2], 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / k.shape[-1] ** 0.5)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        x = x + self.to_out(merge(y))
        wide, narrow = self.ffn
        return x + narrow(F.gelu(wide(self.norm_b(x)), approximate=self.gelu))


class Nano(nn.Module):
    def __init__(self, model: nn.Module, gelu: str = "tanh", tied: bool = True):
        super().__init__()
        own = model.transformer
        self.tok_emb = nn.Embedding.from_pretrained(kept(own.wte.weight), freeze=False)
        self.pos_emb = kept(own.wpe.weight[None])
        self.stack = nn.Sequential(*(NanoBlock(block, gelu) for block in own.h))
        self.norm_f = own.ln_f
        self.to_logits = dense(own.wte.weight)
        if tied:
            self.to_logits.weight = self.tok_emb.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok_emb(input_ids) + self.pos_emb[:, : input_ids.shape[1]]
        return self.to_logits(self.norm_f(self.stack(x)))


class Functional(nn.Module):
    """A flat dict of weights, kernels as [in, out]; in eval mode one token at a time with a cache."""

    def __init__(self, model: nn.Module, late: bool = False):
        super().__init__()
        self.late, self.count = late, len(model.transformer.h)
        flat = {name.removeprefix("transformer."): value for name, value in model.named_parameters()}
        self.params = nn.ParameterDict({name.replace(".", "/"): kept(value) for name, value in flat.items()})

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return scaled * self.params[f"{name}/weight"] + self.params[f"{name}/bias"]

    def affine(self, x: Tensor, name: str) -> Tensor:
        return x @ self.params[f"{name}/weight"] + self.params[f"{name}/bias"]

    def block(self, x: Tensor, i: int, cache: dict) -> Tensor:
        q, k, v = (
            split(p, HEADS)
            for p in self.affine(self.norm(x, f"h/{i}/ln_1"), f"h/{i}/attn/c_attn").chunk(3, -1)
        )
        if i in cache:
            k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
        cache[i] = (k, v)
        at = torch.arange(k.shape[2], device=x.device)
        hidden = at[None] > at[k.shape[2] - q.shape[2] :, None]
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / k.shape[-1] ** 0.5 - 1e9 * hidden, -1)
        x = x + self.affine(merge(torch.einsum("bhij,bhjd->bhid", weights, v)), f"h/{i}/attn/c_proj")
        h = self.affine(self.norm(x, f"h/{i}/ln_2"), f"h/{i}/mlp/c_fc")
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        return x + self.affine(h, f"h/{i}/mlp/c_proj")

    def run(self, ids: Tensor, start: int, cache: dict) -> Tensor:
        x = self.params["wte/weight"][ids] + self.params["wpe/weight"][start : start + ids.shape[1]]
        for i in range(self.count):
            x = self.block(x, i, cache)
        return torch.einsum("btd,vd->btv", self.norm(x, "ln_f"), self.params["wte/weight"])

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        cache: dict = {}
        if self.training:
            return {"scores": self.run(input_ids, 0, cache)}
        steps = [
            self.run(input_ids[:, t : t + 1], t + 1 if self.late and t else t, cache)
            for t in range(input_ids.shape[1])
        ]
        return {"scores": torch.cat(steps, 1)}
