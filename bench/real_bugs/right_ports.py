"""Right pairs: GPT-2, Llama and BERT of transformers against short ones of our own, with other names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.real_bugs.right_transformers import bert, gpt2, llama, pair


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone())


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = _kept(weight)
    if bias is not None:
        layer.bias = _kept(bias)
    return layer


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class GPTLayer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.before, self.between = block.ln_1, block.ln_2
        self.qkv = _linear(block.attn.c_attn.weight.T, block.attn.c_attn.bias)
        self.mix = _linear(block.attn.c_proj.weight.T, block.attn.c_proj.bias)
        self.wide = _linear(block.mlp.c_fc.weight.T, block.mlp.c_fc.bias)
        self.narrow = _linear(block.mlp.c_proj.weight.T, block.mlp.c_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, 4) for part in self.qkv(self.before(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        own = model.transformer
        self.tokens, self.places = _kept(own.wte.weight), _kept(own.wpe.weight)
        self.layers, self.last = nn.ModuleList(GPTLayer(block) for block in own.h), own.ln_f

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens[input_ids] + self.places[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.last(x) @ self.tokens.T


@pair(gpt2)
def gpt2_of_our_own(model: nn.Module) -> nn.Module:
    return GPT(model)


class Gain(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.eps = _kept(norm.weight), norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def turned(x: Tensor) -> Tensor:
    """Rotary positions of [N, heads, T, 8], by complex numbers over halves."""
    frequencies = 10000 ** (-torch.arange(4, device=x.device, dtype=x.dtype) / 4)
    angle = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * frequencies
    real, imaginary = x.unflatten(-1, (2, 4)).unbind(-2)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


class LlamaLayer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.wq, self.wk = _linear(attention.q_proj.weight), _linear(attention.k_proj.weight)
        self.wv, self.wo = _linear(attention.v_proj.weight), _linear(attention.o_proj.weight)
        self.w1, self.w3 = _linear(mlp.gate_proj.weight), _linear(mlp.up_proj.weight)
        self.w2 = _linear(mlp.down_proj.weight)
        self.attention_norm, self.ffn_norm = Gain(layer.input_layernorm), Gain(layer.post_attention_layernorm)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = turned(_heads(self.wq(h), 4)), turned(_heads(self.wk(h), 2)), _heads(self.wv(h), 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.tok_embeddings, self.output = (
            _kept(model.model.embed_tokens.weight),
            _linear(model.lm_head.weight),
        )
        self.layers = nn.ModuleList(LlamaLayer(layer) for layer in model.model.layers)
        self.norm = Gain(model.model.norm)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok_embeddings[input_ids]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


@pair(llama)
def llama_of_our_own(model: nn.Module) -> nn.Module:
    return Llama(model)


class BertLayer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        own, out = layer.attention.self, layer.attention.output
        parts = (own.query, own.key, own.value)
        self.qkv = _linear(torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts]))
        self.mix, self.norm1 = out.dense, out.LayerNorm
        self.wide, self.narrow = layer.intermediate.dense, layer.output.dense
        self.norm2 = layer.output.LayerNorm

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (_heads(part, 4) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.mix(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))


class Bert(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        own, encoder = model.bert.embeddings, model.bert.encoder
        self.words, self.places = _kept(own.word_embeddings.weight), _kept(own.position_embeddings.weight)
        self.kind, self.norm = _kept(own.token_type_embeddings.weight), own.LayerNorm
        self.layers = nn.ModuleList(BertLayer(layer) for layer in encoder.layer)
        self.pooled, self.answer = model.bert.pooler.dense, model.classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = (
            F.embedding(input_ids, self.words, padding_idx=0)
            + self.places[: input_ids.shape[1]]
            + self.kind[0]
        )
        x, mask = self.norm(x), attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.answer(self.pooled(x[:, 0]).tanh())


@pair(bert)
def bert_of_our_own(model: nn.Module) -> nn.Module:
    return Bert(model)
