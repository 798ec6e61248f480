"""Ports of BERT's kin: on torch's own layers, with Flax's kernels of [D, heads, d], in fairseq's manner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ported._text import dense, kept, stacked
from bench.ported._text_encoders import HEADS


def torch_layer(layer: nn.Module, eps: float) -> nn.TransformerEncoderLayer:
    own, out = layer.attention.self, layer.attention.output
    made = nn.TransformerEncoderLayer(32, HEADS, 48, 0.0, "gelu", layer_norm_eps=eps, batch_first=True)
    joint = stacked(own.query, own.key, own.value)
    made.self_attn.in_proj_weight, made.self_attn.in_proj_bias = joint.weight, joint.bias
    pairs = (
        (made.self_attn.out_proj, out.dense),
        (made.linear1, layer.intermediate.dense),
        (made.linear2, layer.output.dense),
        (made.norm1, out.LayerNorm),
        (made.norm2, layer.output.LayerNorm),
    )
    for new, old in pairs:
        new.weight, new.bias = kept(old.weight), kept(old.bias)
    return made


class TorchBert(nn.Module):
    def __init__(self, model: nn.Module, eps: float = 1e-12):
        super().__init__()
        embeddings = model.bert.embeddings
        self.token = nn.Embedding.from_pretrained(
            kept(embeddings.word_embeddings.weight), freeze=False, padding_idx=0
        )
        self.position = kept(embeddings.position_embeddings.weight)
        self.segment = kept(embeddings.token_type_embeddings.weight)
        self.norm, self.pool, self.head = embeddings.LayerNorm, model.bert.pooler.dense, model.classifier
        self.trunk = nn.ModuleList(torch_layer(layer, eps) for layer in model.bert.encoder.layer)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.token(input_ids) + self.position[: input_ids.shape[1]] + self.segment[0]
        x, padding = self.norm(x), attention_mask == 0
        for layer in self.trunk:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(torch.tanh(self.pool(x[:, 0])))


class DenseGeneral(nn.Module):
    """A kernel of [D, heads, d] and a bias of [heads, d]."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.kernel = kept(layer.weight.T.unflatten(1, (HEADS, -1)))
        self.bias = kept(layer.bias.unflatten(0, (HEADS, -1)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,dhk->bthk", x, self.kernel) + self.bias


class FlaxLayer(nn.Module):
    def __init__(self, layer: nn.Module, gelu: str):
        super().__init__()
        own, out = layer.attention.self, layer.attention.output
        self.q, self.k, self.v = DenseGeneral(own.query), DenseGeneral(own.key), DenseGeneral(own.value)
        self.out_kernel = kept(out.dense.weight.T.unflatten(0, (HEADS, -1)))
        self.out_bias, self.gelu = kept(out.dense.bias), gelu
        self.norms = nn.ModuleList([out.LayerNorm, layer.output.LayerNorm])
        self.wi, self.wi_bias = kept(layer.intermediate.dense.weight.T), kept(layer.intermediate.dense.bias)
        self.wo, self.wo_bias = kept(layer.output.dense.weight.T), kept(layer.output.dense.bias)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q = self.q(x)
        q = q / q.shape[-1] ** 0.5
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, self.k(x)) + bias).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, self.v(x))
        x = self.norms[0](x + torch.einsum("bqhd,hdm->bqm", y, self.out_kernel) + self.out_bias)
        h = F.gelu(x @ self.wi + self.wi_bias, approximate=self.gelu)
        return self.norms[1](x + h @ self.wo + self.wo_bias)


class FlaxBert(nn.Module):
    def __init__(self, model: nn.Module, gelu: str = "none"):
        super().__init__()
        embeddings = model.bert.embeddings
        self.embed = nn.ParameterDict(
            {
                "words": kept(embeddings.word_embeddings.weight),
                "places": kept(embeddings.position_embeddings.weight),
                "types": kept(embeddings.token_type_embeddings.weight),
            }
        )
        self.encoder_norm = embeddings.LayerNorm
        self.FlaxLayer = nn.ModuleList(FlaxLayer(layer, gelu) for layer in model.bert.encoder.layer)
        self.heads = nn.ModuleDict({"pooled": model.bert.pooler.dense, "scores": model.classifier})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        words = F.embedding(input_ids, self.embed["words"], padding_idx=0)
        x = self.encoder_norm(words + self.embed["places"][: input_ids.shape[1]] + self.embed["types"][:1])
        bias = torch.zeros_like(attention_mask, dtype=x.dtype).masked_fill(attention_mask == 0, -1e30)[
            :, None, None
        ]
        for layer in self.FlaxLayer:
            x = layer(x, bias)
        return {"scores": self.heads["scores"](self.heads["pooled"](x[:, 0]).tanh())}


class FairseqLayer(nn.Module):
    """On [T, N, D], with torch's attention and the query's scale taken before the product."""

    def __init__(self, attention: nn.ModuleDict, rest: tuple[nn.Module, ...], gelu: str = "none"):
        super().__init__()
        self.in_proj, self.out_proj = attention["in_proj"], attention["out_proj"]
        (self.self_attn_layer_norm, self.fc1, self.fc2, self.final_layer_norm), self.gelu = rest, gelu

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        length, n, width = x.shape
        q, k, v = self.in_proj(x).chunk(3, -1)
        q = q * (width // HEADS) ** -0.5
        q, k, v = (part.reshape(length, n * HEADS, -1).transpose(0, 1) for part in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)).view(n, HEADS, length, length)
        scores = scores.masked_fill(padding[:, None, None], float("-inf")).view(n * HEADS, length, length)
        y = torch.bmm(F.softmax(scores, -1), v).transpose(0, 1).reshape(length, n, width)
        x = self.self_attn_layer_norm(x + self.out_proj(y))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x), approximate=self.gelu)))


def fairseq_layer(layer: nn.Module) -> FairseqLayer:
    own, out = layer.attention.self, layer.attention.output
    attention = nn.ModuleDict({"in_proj": stacked(own.query, own.key, own.value), "out_proj": out.dense})
    return FairseqLayer(
        attention, (out.LayerNorm, layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm)
    )


def fairseq_shared(layer: nn.Module) -> FairseqLayer:
    own = layer.attention
    attention = nn.ModuleDict(
        {
            "in_proj": stacked(own.query, own.key, own.value),
            "out_proj": dense(own.dense.weight, own.dense.bias),
        }
    )
    return FairseqLayer(
        attention, (own.LayerNorm, layer.ffn, layer.ffn_output, layer.full_layer_layer_norm), "tanh"
    )
