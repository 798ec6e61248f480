"""True rewrites of the whole transformer and of the whole recurrent network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, copied, rewritten
from bench.cases.rewrites_gru import HandGRUCell
from bench.cases.rewrites_recurrent import HandLSTM
from bench.tasks import dropout_transformer, recurrent, transformer


def _causal(x: Tensor) -> Tensor:
    """-inf where a token of [N, T, D] would look ahead."""
    return torch.full((x.shape[1],) * 2, -torch.inf, dtype=x.dtype, device=x.device).triu(1)


class Library(nn.Module):
    """The library's attention with the weights of ``SelfAttention``."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        width = attention.out.in_features
        self.mha = nn.MultiheadAttention(width, attention.heads, batch_first=True)
        self.mha.in_proj_weight, self.mha.in_proj_bias = map(copied, attention.qkv.parameters())
        self.mha.out_proj.load_state_dict(attention.out.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x, attn_mask=_causal(x), is_causal=True, need_weights=False)[0]


def _encoder_layer(block: nn.Module) -> nn.TransformerEncoderLayer:
    """The library's pre-norm layer with the weights of ``TransformerBlock``."""
    layer = nn.TransformerEncoderLayer(
        24, 3, dim_feedforward=48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    names = {"attention.qkv.": "self_attn.in_proj_", "attention.out.": "self_attn.out_proj."}
    names |= {"up.": "linear1.", "down.": "linear2.", "norm1.": "norm1.", "norm2.": "norm2."}
    for old, new in names.items():
        weights = block.state_dict()
        for kind in ("weight", "bias"):
            layer.state_dict()[new + kind].copy_(weights[old + kind])
    return layer


@case(SAME, "library's attention", on=transformer)
def attention_by_the_library(model: nn.Module) -> nn.Module:
    """``nn.MultiheadAttention`` in both blocks."""
    rewritten(model, "blocks.0.attention", Library)
    return rewritten(model, "blocks.1.attention", Library)


@case(SAME, "library's attention", on=dropout_transformer)
def attention_by_the_library_beside_dropout(model: nn.Module) -> nn.Module:
    """``nn.MultiheadAttention`` in one block of the network with dropout."""
    return rewritten(model, "blocks.1.attention", Library)


@in_place_of("", SAME, "network written anew", transformer, "transformer_by_the_library")
class LibraryTransformer(nn.Module):
    """``nn.TransformerEncoder`` with pre-norm layers. Embeddings around ``nn.TransformerEncoder``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.token, self.place, self.unembed = model.embed, model.position, model.head
        self.encoder = nn.TransformerEncoder(_encoder_layer(model.blocks[0]), 2, enable_nested_tensor=False)
        self.encoder.layers = nn.ModuleList(map(_encoder_layer, model.blocks))
        self.encoder.norm = model.norm

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        return self.unembed(self.encoder(x, mask=_causal(x), is_causal=True))


@in_place_of("", SAME, "network written anew", dropout_transformer, "transformer_functional")
class FunctionalTransformer(nn.Module):
    """Functional calls over dicts of parameters; the tied weight is one parameter used twice."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.embedding, self.position = copied(model.embed.weight), copied(model.position)
        self.layers = nn.ModuleList(
            nn.ParameterDict({name.replace(".", "_"): copied(p) for name, p in block.named_parameters()})
            for block in model.blocks
        )
        self.gain, self.shift = copied(model.norm.weight), copied(model.norm.bias)
        self.dropout = model.blocks[0].drop.p

    def _attend(self, x: Tensor, p: nn.ParameterDict) -> Tensor:
        qkv = F.linear(x, p["attention_qkv_weight"], p["attention_qkv_bias"])
        q, k, v = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in qkv.split(24, -1))
        weights = (q @ k.mT * 8**-0.5 + _causal(x)).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return F.linear(mixed, p["attention_out_weight"], p["attention_out_bias"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding) + self.position[: tokens.shape[1]]
        for p in self.layers:
            x = x + self._attend(F.layer_norm(x, (24,), p["norm1_weight"], p["norm1_bias"]), p)
            y = F.layer_norm(x, (24,), p["norm2_weight"], p["norm2_bias"])
            y = F.linear(F.gelu(F.linear(y, p["up_weight"], p["up_bias"])), p["down_weight"], p["down_bias"])
            x = x + F.dropout(y, self.dropout, self.training)
        return F.layer_norm(x, (24,), self.gain, self.shift) @ self.embedding.T


@in_place_of("", SAME, "network written anew", recurrent, "recurrent_step_by_step")
class StepByStep(nn.Module):
    """Both recurrences in one loop over time; no sequence of states is kept."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.encoder, self.decoder, self.fc = HandLSTM(model.lstm), HandGRUCell(model.cell), model.fc

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 14)
        state = x.new_zeros(x.shape[0], 10)
        for x_t in x.unbind(1):
            i, f, g, o = self.encoder.gates(x_t, h)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            state = self.decoder(h, state)
        return self.fc(state)
