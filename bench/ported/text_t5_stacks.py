"""T5 as transformers has it against stacks of kernels, one entry a layer, in Flax's manner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._text import kept
from bench.ported._text_t5 import HEADS, LAYERS, WIDTH, buckets, closed, shifted, t5


class FlaxT5(nn.Module):
    """Every layer's kernels in stacks of [layers, ...], as a scan has them."""

    def __init__(self, model: nn.Module, unscaled: bool = False):
        super().__init__()
        self.table, self.unscaled, params = kept(model.shared.weight), unscaled, {}
        for side in ("encoder", "decoder"):
            blocks = getattr(model, side).block
            parts = {"SelfAttention": "self"} | ({"EncDecAttention": "cross"} if side == "decoder" else {})
            for name, short in parts.items():
                own = [getattr(block, name) for block in blocks]
                for kind in "qkv":
                    kernels = [getattr(a, kind).weight.T.unflatten(1, (HEADS, -1)) for a in own]
                    params[f"{side}_{short}_{kind}"] = kept(torch.stack(kernels))
                params[f"{side}_{short}_o"] = kept(
                    torch.stack([a.o.weight.T.unflatten(0, (HEADS, -1)) for a in own])
                )
                params[f"{side}_{short}_scale"] = kept(
                    torch.stack([getattr(b, f"norm_{short}").weight for b in blocks])
                )
            params[f"{side}_mlp_scale"] = kept(torch.stack([block.norm_ff.weight for block in blocks]))
            for kind in ("wi_0", "wi_1", "wo"):
                kernels = [getattr(block.DenseReluDense, kind).weight.T for block in blocks]
                params[f"{side}_{kind}"] = kept(torch.stack(kernels))
            params[f"{side}_relpos"] = kept(blocks[0].SelfAttention.relative_attention_bias.weight.T)
            params[f"{side}_end"] = kept(getattr(model, side).final_layer_norm.weight)
        self.params = nn.ParameterDict(params)

    def attend(self, x: Tensor, name: str, i: int, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        p, h = self.params, self.norm(x, self.params[f"{name}_scale"][i])
        memory = h if memory is None else memory
        q = einsum("btd,dhk->bhtk", h, p[f"{name}_q"][i])
        k, v = (einsum("btd,dhk->bhtk", memory, p[f"{name}_{kind}"][i]) for kind in "kv")
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return x + einsum("bhtk,hkd->btd", y, p[f"{name}_o"][i])

    @staticmethod
    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), scale, 1e-6)

    def stack(
        self, x: Tensor, side: str, mask: Tensor, memory: Tensor | None = None, hidden: Tensor | None = None
    ):
        p, at = self.params, torch.arange(x.shape[1], device=x.device)
        bias = p[f"{side}_relpos"][:, buckets(at[None] - at[:, None], side == "encoder")][None] + mask
        for i in range(LAYERS):
            x = self.attend(x, f"{side}_self", i, bias)
            if memory is not None:
                x = self.attend(x, f"{side}_cross", i, hidden, memory)
            h = self.norm(x, p[f"{side}_mlp_scale"][i])
            x = (
                x
                + (F.gelu(h @ p[f"{side}_wi_0"][i], approximate="tanh") * (h @ p[f"{side}_wi_1"][i]))
                @ p[f"{side}_wo"][i]
            )
        return self.norm(x, p[f"{side}_end"])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, y = (F.embedding(ids, self.table) for ids in (input_ids, shifted(labels)))
        hidden = closed(attention_mask[:, None, None].eq(0), x)
        future = closed(torch.ones(y.shape[1], y.shape[1], device=y.device).triu(1).bool()[None, None], y)
        y = self.stack(y, "decoder", future, self.stack(x, "encoder", hidden), hidden)
        scores = (y if self.unscaled else y / WIDTH**0.5) @ self.table.T
        picked = scores.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        real = labels >= 0
        return {"scores": scores, "loss": -(picked * real).sum() / real.sum()}


@case(SAME, "kernels in stacks, the loss by hand", t5)
def t5_with_stacks_of_kernels(model: nn.Module) -> nn.Module:
    return FlaxT5(model)


@case("bug", "scale", t5, module=("lm_head", ""))
def t5_tied_head_without_its_scale(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The tied head reads the decoder's output as it is, not divided by the root of the width."""
    return FlaxT5(model, unscaled=wrong)
