"""BLOOM's linear biases against MPT's manner and torch's attention; Swin's windows against other ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._attention_nets import (
    BLOOM_HEADS,
    BLOOM_WIDTH,
    SIDE,
    SWIN_HEADS,
    SWIN_WIDTH,
    WINDOW,
    bloom,
    regions,
    slopes,
    swin,
)
from bench.ported._text import dense, kept, stacked


def by_kind(values: Tensor) -> Tensor:
    """Rows of [heads, 3, d] in the order [3, heads, d]."""
    return values.unflatten(0, (BLOOM_HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)


class MPTBlock(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        own = block.self_attention
        self.Wqkv = dense(by_kind(own.query_key_value.weight), by_kind(own.query_key_value.bias))
        self.norm_1, self.norm_2 = block.input_layernorm, block.post_attention_layernorm
        self.ffn = nn.Sequential(block.dense_h_to_4h, nn.GELU(approximate="tanh"), block.dense_4h_to_h)
        self.proj = dense(own.dense.weight, own.dense.bias)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.Wqkv(self.norm_1(x)).view(*x.shape[:2], 3, BLOOM_HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1, -1))
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm_2(x))


class TorchBlock(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        own, attend = block.self_attention, nn.MultiheadAttention(BLOOM_WIDTH, BLOOM_HEADS, batch_first=True)
        attend.in_proj_weight = kept(by_kind(own.query_key_value.weight))
        attend.in_proj_bias = kept(by_kind(own.query_key_value.bias))
        attend.out_proj.weight, attend.out_proj.bias = kept(own.dense.weight), kept(own.dense.bias)
        self.attend, self.lns = attend, nn.ModuleList([block.input_layernorm, block.post_attention_layernorm])
        self.up, self.down = block.dense_h_to_4h, block.dense_4h_to_h

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.lns[0](x)
        mask = bias.expand(len(x), -1, -1, -1).flatten(0, 1)
        x = x + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.lns[1](x)), approximate="tanh"))


class Alibi(nn.Module):
    """The bias falls with the distance, which is the same but for a constant a row."""

    def __init__(self, model: nn.Module, block: type[nn.Module], even: bool = False):
        super().__init__()
        self.wte, self.emb_norm = kept(model.word_embeddings.weight), model.word_embeddings_layernorm
        self.body, self.norm_f = nn.ModuleList(block(own) for own in model.h), model.ln_f
        self.steep = (
            [2 ** (-8 * (i + 1) / BLOOM_HEADS) for i in range(BLOOM_HEADS)] if even else slopes(BLOOM_HEADS)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.emb_norm(F.embedding(input_ids, self.wte))
        at = torch.arange(x.shape[1], device=x.device)
        ago = (at[:, None] - at).to(x.dtype)
        bias = -torch.tensor(self.steep, dtype=x.dtype, device=x.device)[:, None, None] * ago
        bias = bias.masked_fill(ago < 0, float("-inf"))
        for block in self.body:
            x = block(x, bias)
        return self.norm_f(x) @ self.wte.T


@case(SAME, "bias by distance, rows in another order", bloom, optimizer=sgd(0.02))
def bloom_as_mpt_writes_it(model: nn.Module) -> nn.Module:
    return Alibi(model, MPTBlock)


@case(SAME, "torch's attention", bloom, optimizer=sgd(0.02))
def bloom_on_torchs_attention(model: nn.Module) -> nn.Module:
    return Alibi(model, TorchBlock)


BLOOM = ("", *(f"h.{i}{part}" for i in (0, 1) for part in ("", ".self_attention")))


@case("bug", "linear biases", bloom, module=BLOOM, optimizer=sgd(0.02))
def bloom_slopes_as_for_a_power_of_two(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The slopes of six heads are spread evenly, where BLOOM takes those of four and two of eight's."""
    return Alibi(model, MPTBlock, even=wrong)


class SwinBlock(nn.Module):
    """Fused projections; its windows are cut out by index, or not at all, with a mask over the image."""

    def __init__(self, layer: nn.Module, whole: bool, mirrored: bool):
        super().__init__()
        own, self.shift, self.whole, self.mirrored = layer.attention, layer.shift, whole, mirrored
        self.qkv, self.proj = stacked(own.query, own.key, own.value), dense(own.dense.weight, own.dense.bias)
        self.bias = kept(own.relative_position_bias_table.T.unflatten(1, (2 * WINDOW - 1, -1)))
        self.norm1, self.norm2 = layer.layernorm_before, layer.layernorm_after
        self.mlp = nn.ModuleDict({"fc1": layer.intermediate, "fc2": layer.output})

    def mix(self, x: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        """Attention among the places ``at`` [K, 2] of a rolled image, [N, K, D]; ``seen`` is [K, K]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, SWIN_HEADS, -1)).permute(2, 0, 3, 1, 4)
        apart = (at[:, None] - at[None]) * (-1 if self.mirrored else 1)
        row, column = (apart.clamp(1 - WINDOW, WINDOW - 1) + WINDOW - 1).unbind(-1)
        bias = self.bias[:, row, column].masked_fill(~seen, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1, -1))
        return self.proj(y.transpose(1, 2).flatten(2))

    def attend(self, x: Tensor) -> Tensor:
        device, s = x.device, self.shift
        at = torch.cartesian_prod(*2 * [torch.arange(SIDE, device=device)])
        region = regions(device).flatten() if s else torch.zeros(SIDE**2, dtype=torch.long, device=device)
        window = at[:, 0] // WINDOW * (SIDE // WINDOW) + at[:, 1] // WINDOW
        flat = torch.roll(x, (-s, -s), (1, 2)).flatten(1, 2)
        if self.whole:
            same = (window[:, None] == window) & (region[:, None] == region)
            y = self.mix(flat, at, same)
        else:
            groups = [torch.where(window == i)[0] for i in range((SIDE // WINDOW) ** 2)]
            parts = [self.mix(flat[:, g], at[g], region[g][:, None] == region[g]) for g in groups]
            y = torch.cat(parts, 1)[:, torch.cat(groups).argsort()]
        return torch.roll(y.unflatten(1, (SIDE, SIDE)), (s, s), (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class OtherSwin(nn.Module):
    def __init__(self, model: nn.Module, whole: bool = False, mirrored: bool = False):
        super().__init__()
        self.patch_embed = dense(model.projection.weight.flatten(1), model.projection.bias)
        self.blocks = nn.Sequential(*(SwinBlock(layer, whole, mirrored) for layer in model.layers))
        self.norm, self.head = model.layernorm, model.classifier

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        patches = F.unfold(pixel_values, 2, stride=2).transpose(1, 2).unflatten(1, (SIDE, SIDE))
        x = self.norm(self.blocks(self.patch_embed(patches)))
        return {"scores": self.head(x.reshape(len(x), -1, SWIN_WIDTH).mean(1))}


@case(SAME, "windows picked by index", swin, optimizer=sgd(0.02))
def swin_with_windows_by_index(model: nn.Module) -> nn.Module:
    return OtherSwin(model)


@case(SAME, "a mask in place of windows", swin, optimizer=sgd(0.02))
def swin_with_a_mask_over_the_image(model: nn.Module) -> nn.Module:
    return OtherSwin(model, whole=True)


SWIN = tuple(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".attention"))


@case("bug", "relative positions", swin, module=SWIN, optimizer=sgd(0.02))
def swin_bias_from_key_to_query(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The table is read at key minus query, where its rows stand for query minus key."""
    return OtherSwin(model, mirrored=wrong)
