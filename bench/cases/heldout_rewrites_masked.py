"""True rewrites of an encoder with a padding mask: masks as numbers, unpadded tokens, stacked layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_parts import flat_name
from bench.cases._heldout_sequences import MaskedEncoder, masked_encoder, sinusoids
from bench.cases._rewritten import SAME, copied
from bench.surgery import recast


class _Layer(nn.Module):
    """An encoder layer with its own attention; ``bias`` is added to the scores."""

    def __init__(self, layer: nn.TransformerEncoderLayer):
        super().__init__()
        attention = layer.self_attn
        self.ln_1, self.ln_2 = layer.norm1, layer.norm2
        self.c_attn, self.c_attn_bias = copied(attention.in_proj_weight.T), copied(attention.in_proj_bias)
        self.c_proj = attention.out_proj
        self.mlp = nn.ModuleDict({"fc": layer.linear1, "proj": layer.linear2})

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        fused = (x @ self.c_attn + self.c_attn_bias).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = fused[0] @ fused[1].mT / 8**0.5 + bias[:, None, None]
        mixed = scores.softmax(-1) @ fused[2]
        return self.c_proj(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x), bias)
        return x + self.mlp["proj"](F.gelu(self.mlp["fc"](self.ln_2(x))))


@in_place_of("", SAME, "mask as numbers", masked_encoder, "padding_mask_of_the_smallest_float")
class _FloatMask(nn.Module):
    """The network in GPT-2's names and layouts; the mask adds the smallest float32, also in float64."""

    def __init__(self, model: MaskedEncoder):
        super().__init__()
        self.wte, self.wse, self.ln_f, self.score = model.embed, model.segment, model.norm, model.fc
        self.register_buffer("wpe", model.position, persistent=False)
        self.h = nn.ModuleList(_Layer(layer) for layer in model.encoder.layers)

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        bias = (1.0 - mask.float()) * torch.finfo(torch.float32).min
        x = self.wse(segments).add(self.wte(tokens)).add_(self.wpe[: tokens.shape[1]])
        for layer in self.h:
            x = layer(x, bias)
        shares = mask / mask.sum(1, keepdim=True).to(x.dtype)
        return self.score(torch.bmm(shares[:, None], self.ln_f(x)).squeeze(1))


@method_of("", SAME, "padding taken out", masked_encoder)
def encoder_on_real_tokens_only(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """Padding is taken out before the first layer and put back for attention alone."""
    n, time = tokens.shape
    rows = mask.flatten().nonzero().squeeze(1)
    x = self.embed(tokens[mask]) + self.segment(segments[mask]) + self.position[rows % time]
    for layer in self.encoder.layers:
        attention = layer.self_attn
        y = F.linear(layer.norm1(x), attention.in_proj_weight, attention.in_proj_bias)
        padded = y.new_zeros(n * time, y.shape[1]).index_copy(0, rows, y).view(n, time, 3, 2, 8)
        q, k, v = padded.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + attention.out_proj(mixed.transpose(1, 2).flatten(2).flatten(0, 1)[rows])
        x = x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
    total = x.new_zeros(n, 16).index_add(0, rows // time, self.norm(x))
    return self.fc(total / mask.sum(1, keepdim=True))


@in_place_of("encoder", SAME, "weights of all blocks stacked", masked_encoder, "encoder_layers_stacked")
class _Stacked(nn.Module):
    """Each weight of the two layers is a slice of one tensor; masked scores are set to -10,000."""

    def __init__(self, encoder: nn.TransformerEncoder):
        super().__init__()
        self.layers = nn.ParameterDict()
        for name, _ in encoder.layers[0].named_parameters():
            stacked = torch.stack([layer.get_parameter(name) for layer in encoder.layers])
            self.layers[flat_name(name)] = copied(stacked)

    @staticmethod
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * weight + bias

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        blocked = src_key_padding_mask[:, None, None]
        for i in range(2):
            w = {name: stacked[i] for name, stacked in self.layers.items()}
            y = self.norm(x, w["norm1_weight"], w["norm1_bias"])
            fused = (
                torch.einsum("ntd,ed->nte", y, w["self_attn_in_proj_weight"]) + w["self_attn_in_proj_bias"]
            )
            q, k, v = (part.unflatten(2, (2, 8)) for part in fused.split(16, 2))
            scores = torch.einsum("nthe,nshe->nhts", q * 8**-0.5, k).masked_fill(blocked, -1e4)
            mixed = torch.einsum("nhts,nshe->nthe", scores.softmax(3), v).flatten(2)
            x = x + F.linear(mixed, w["self_attn_out_proj_weight"], w["self_attn_out_proj_bias"])
            y = self.norm(x, w["norm2_weight"], w["norm2_bias"])
            y = F.gelu(torch.einsum("ntd,ed->nte", y, w["linear1_weight"]) + w["linear1_bias"])
            x = x + F.linear(y, w["linear2_weight"], w["linear2_bias"])
        return x


@case(SAME, "table made again", on=masked_encoder)
def positions_computed_at_each_call(model: nn.Module) -> nn.Module:
    """The table of positions is computed anew, in float32 as before; both embeddings share one lookup."""

    class Computed(MaskedEncoder):
        def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
            table = torch.cat([self.embed.weight, self.segment.weight])
            places = torch.stack([tokens, segments + len(self.embed.weight)])
            x = F.embedding(places, table).sum(0) * 1.0
            x = x + sinusoids(tokens.shape[1], 16).to(x)
            x = self.encoder(x, src_key_padding_mask=mask.logical_not())
            x = self.norm(x).masked_fill(~mask[..., None], 0)
            return self.fc(x.sum(1) / mask.sum(1)[:, None])

    del model.position
    return recast(model, "", Computed)
