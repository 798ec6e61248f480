"""BERT, RoBERTa, ALBERT and ViT of transformers against torch's layers, Flax's, fairseq's and timm's."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._text import dense, kept, stacked
from bench.ported._text_bert import FlaxBert, TorchBert, fairseq_layer, fairseq_shared
from bench.ported._text_encoders import HEADS, albert, bert, roberta, vit

BERT = tuple(f"bert.encoder.layer.{i}" for i in (0, 1))


@case(SAME, "torch's encoder layers", bert, optimizer=sgd(0.02))
def bert_on_torchs_encoder_layers(model: nn.Module) -> nn.Module:
    return TorchBert(model)


@case(SAME, "kernels of [D, heads, d]", bert, optimizer=sgd(0.02))
def bert_with_kernels_by_head(model: nn.Module) -> nn.Module:
    return FlaxBert(model)


NORMS = tuple(f"{layer}.{part}.LayerNorm" for layer in BERT for part in ("attention.output", "output"))


@case("bug", "another eps", bert, module=NORMS, optimizer=sgd(0.02))
def bert_with_the_eps_of_torchs_layers(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The encoder's norms keep the 1e-5 that torch's layers add unless told; BERT's add 1e-12."""
    return TorchBert(model, eps=1e-5 if wrong else 1e-12)


ACTS = tuple(f"{layer}.intermediate{part}" for layer in BERT for part in ("", ".intermediate_act_fn"))


@case("bug", "gelu variant", bert, module=(*ACTS, *BERT), optimizer=sgd(0.02))
def bert_with_the_gelu_that_flax_means(model: nn.Module, wrong: bool = True) -> nn.Module:
    """Flax's gelu is the tanh approximation unless told; BERT's is exact."""
    return FlaxBert(model, gelu="tanh" if wrong else "none")


class FairseqRoberta(nn.Module):
    def __init__(self, model: nn.Module, first: int = 2):
        super().__init__()
        own, self.first = model.roberta.embeddings, first
        self.embed_tokens = kept(own.word_embeddings.weight)
        self.embed_positions = kept(own.position_embeddings.weight)
        self.segments = kept(own.token_type_embeddings.weight)
        self.emb_layer_norm, self.scores = own.LayerNorm, model.classifier.out_proj
        self.sentence = nn.ModuleList(fairseq_layer(layer) for layer in model.roberta.encoder.layer)
        self.dense1 = model.classifier.dense

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = input_ids.ne(1)
        places = real.cumsum(1) + self.first - 1
        places = torch.where(real, places, 1)
        x = F.embedding(input_ids, self.embed_tokens, padding_idx=1) + self.segments[0]
        x = self.emb_layer_norm(x + F.embedding(places, self.embed_positions, padding_idx=1)).transpose(0, 1)
        for layer in self.sentence:
            x = layer(x, ~attention_mask.bool())
        return self.scores(self.dense1(x[0]).tanh())


@case(SAME, "[T, N, D] and fused projections", roberta, optimizer=sgd(0.02))
def roberta_as_fairseq_writes_it(model: nn.Module) -> nn.Module:
    return FairseqRoberta(model)


PLACES = ("roberta.embeddings.position_embeddings", "roberta.embeddings")


@case("bug", "positions", roberta, module=PLACES, optimizer=sgd(0.02))
def roberta_positions_from_zero(model: nn.Module, wrong: bool = True) -> nn.Module:
    """Positions are counted from 0, without the two rows that stand before them for the padding."""
    return FairseqRoberta(model, first=0 if wrong else 2)


class FairseqAlbert(nn.Module):
    def __init__(self, model: nn.Module, apart: bool = False):
        super().__init__()
        own, encoder = model.albert.embeddings, model.albert.encoder
        self.words, self.places = kept(own.word_embeddings.weight), kept(own.position_embeddings.weight)
        self.kinds, self.norm_in = kept(own.token_type_embeddings.weight), own.LayerNorm
        self.widen = encoder.embedding_hidden_mapping_in
        layer = fairseq_shared(encoder.albert_layer_groups[0].albert_layers[0])
        self.layers = nn.ModuleList([layer, deepcopy(layer) if apart else layer])
        self.first, self.out = model.albert.pooler, model.classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.words, padding_idx=0) + self.places[: input_ids.shape[1]]
        x = self.widen(self.norm_in(x + self.kinds[0])).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, attention_mask == 0)
        return self.out(self.first(x[0]).tanh())


@case(SAME, "[T, N, D] and fused projections", albert, optimizer=sgd(0.02))
def albert_with_one_fused_layer_twice(model: nn.Module) -> nn.Module:
    return FairseqAlbert(model)


GROUP = "albert.encoder.albert_layer_groups.0"
SHARED = tuple(name for name, _ in albert.network().named_modules() if name.startswith(GROUP))


@case(
    "bug",
    "tie lost",
    albert,
    module=(*SHARED, "albert.encoder"),
    passes=("weight gradient", "update"),
    optimizer=sgd(0.02),
)
def albert_layers_no_longer_one(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The layer that is used twice becomes two, each with its own weights from then on."""
    return FairseqAlbert(model, apart=wrong)


class TimmBlock(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        own = layer.attention
        self.norm1, self.norm2 = layer.layernorm_before, layer.layernorm_after
        self.qkv, self.proj = (
            stacked(own.q_proj, own.k_proj, own.v_proj),
            dense(own.o_proj.weight, own.o_proj.bias),
        )
        self.mlp = nn.Sequential(layer.mlp.fc1, nn.GELU(), layer.mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class LinearPatches(nn.Module):
    """ViT with a linear layer over flattened patches of [4, 4, colours]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        own = model.vit.embeddings
        conv = own.patch_embeddings.projection
        rows = conv.weight.permute(0, 2, 3, 1)
        self.patch_embed, self.cls = dense(rows.flatten(1), conv.bias), kept(own.cls_token)
        self.pos_embed = kept(own.position_embeddings)
        self.blocks = nn.Sequential(*(TimmBlock(layer) for layer in model.vit.layers))
        self.norm, self.head = model.vit.layernorm, model.classifier

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = pixel_values.unflatten(3, (3, 4)).unflatten(2, (3, 4))  # [N, C, rows, 4, columns, 4]
        x = self.patch_embed(x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


@case(SAME, "a linear layer over patches", vit, optimizer=sgd(0.02))
def vit_with_linear_patches(model: nn.Module) -> nn.Module:
    return LinearPatches(model)
