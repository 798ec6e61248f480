"""Two ports of a small ModernBERT: a tree whose local layers see windows, and stacks with channels first."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_sixth_modern_bert as bert
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_sixth_modern_bert", bert.ModernBert, bert.sentences, bert.words_and_classes)
EVERY, HEADS, LAYERS, WIDTH = bert.EVERY, bert.HEADS, bert.LAYERS, bert.WIDTH
REACH, SIZE = bert.WINDOW // 2, WIDTH // HEADS


class Scaled(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.eps = leaf(norm.weight), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * self.gain * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class Mixing(nn.Module):
    """Attention by head over all words; its norm and its residual are its own."""

    def __init__(self, layer: nn.Module, like: nn.Module):
        super().__init__()
        self.norm = Scaled(layer.attn_norm) if len([*layer.attn_norm.parameters()]) else nn.Identity()
        q, k, v = layer.attn.Wqkv.weight.view(3, HEADS, SIZE, WIDTH).transpose(2, 3)
        self.ask, self.offer, self.tell = leaf(q), leaf(k), leaf(v)
        self.merge = leaf(layer.attn.Wo.weight.T.reshape(HEADS, SIZE, WIDTH))
        self.register_buffer("speed", like.attn.rotary_emb.inv_freq.clone())

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * self.speed
        a, b = x.tensor_split(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~real[:, None, None], -math.inf).softmax(-1) @ v

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        y = self.norm(x)[:, None]
        q, k = self.turn(y @ self.ask) / math.sqrt(SIZE), self.turn(y @ self.offer)
        return x + (self.mix(q, k, y @ self.tell, real) @ self.merge).sum(1)


class Nearby(Mixing):
    """The same over the words in reach, of which every word has its own window."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        k, v = (F.pad(x, (0, 0, REACH, REACH)).unfold(2, 2 * REACH + 1, 1) for x in (k, v))
        seen = F.pad(real, (REACH, REACH)).unfold(1, 2 * REACH + 1, 1)
        scores = torch.einsum("nhtd,nhtdw->nhtw", q, k).masked_fill(~seen[:, None], -math.inf)
        return torch.einsum("nhtw,nhtdw->nhtd", scores.softmax(-1), v)


class Gated(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.norm, self.cut = Scaled(layer.mlp_norm), False
        self.up, self.gate = (leaf(x.T) for x in layer.mlp.Wi.weight.chunk(2))
        self.down = leaf(layer.mlp.Wo.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate = (y @ self.gate).detach() if self.cut else y @ self.gate
        return x + gate * F.gelu(y @ self.up) @ self.down


class Reading(nn.Module):
    """A head and the bias of what reads from it."""

    def __init__(self, head: nn.Module, last: nn.Linear):
        super().__init__()
        self.weight, self.norm, self.bias = leaf(head.dense.weight.T), Scaled(head.norm), leaf(last.bias)

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        return self.norm(F.gelu(x @ self.weight)) @ last.T + self.bias


class BertOfWindows(Port):
    """Residual parts in a row, split weights by head, keys of the local layers in windows."""

    def take(self, model: bert.ModernBert) -> None:
        inner, fault = model.model, self.fault
        self.table, self.start = leaf(model.decoder.weight), Scaled(inner.embeddings.norm)
        self.mixings, self.gates = nn.ModuleList(), nn.ModuleList(map(Gated, inner.layers))
        for i, layer in enumerate(inner.layers):
            far = fault == "modern_bert_second_local_layer_rotates_by_the_global_base" and i == 2
            self.mixings.append((Nearby if i % EVERY else Mixing)(layer, inner.layers[0] if far else layer))
        self.end, self.choice = Scaled(inner.final_norm), leaf(model.classifier.weight)
        self.guess = Reading(model.head, model.decoder)
        self.judge = Reading(model.pooled_head, model.classifier)
        self.gates[1].cut = fault == "modern_bert_second_gate_without_gradient"
        if fault == "modern_bert_embedding_norm_with_an_epsilon_of_1e_12":
            self.start.eps = 1e-12

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        real = attention_mask.bool()
        x = self.start(self.table[input_ids])
        for mixing, gate in zip(self.mixings, self.gates, strict=True):
            x = gate(mixing(x, real))
        x, share = self.end(x), attention_mask / attention_mask.sum(1, keepdim=True).to(x)
        if self.fault == "modern_bert_pooling_counts_padding_in_evaluation" and not self.training:
            share = torch.ones_like(share) / share.shape[1]
        return self.guess(x, self.table), self.judge(torch.einsum("nt,ntc->nc", share, x), self.choice)


def level(x: Tensor) -> Tensor:
    """Channels first, of mean zero and variance one."""
    spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
    return (x - center) / (spread + 1e-5).sqrt()


class StackedBert(Port):
    """Stacks with channels first; gains join the weights after them, rotated channels are neighbours."""

    def take(self, model: bert.ModernBert) -> None:
        inner, layers = model.model, model.model.layers
        pairs = torch.arange(SIZE).view(2, -1).T.flatten()
        qkv = torch.stack([x.attn.Wqkv.weight.view(3, HEADS, SIZE, WIDTH) for x in layers])
        self.qk, self.v = leaf(qkv[:, :2, :, pairs]), leaf(qkv[:, 2].flatten(1, 2))
        each = zip(*((x.attn.Wo.weight, x.mlp.Wi.weight, x.mlp.Wo.weight) for x in layers), strict=True)
        self.wo, self.wi, self.out = map(pile, each)
        norms = [x.attn_norm for x in layers[1:]] + [x.mlp_norm for x in layers]
        norms += [inner.embeddings.norm, inner.final_norm, model.head.norm, model.pooled_head.norm]
        self.gains = pile(x.weight for x in norms)
        self.dense = pile((model.head.dense.weight, model.pooled_head.dense.weight))
        self.table = leaf(torch.cat([model.decoder.weight, model.classifier.weight]))
        self.bias = leaf(torch.cat([model.decoder.bias, model.classifier.bias]))
        self.register_buffer("speeds", torch.stack([x.attn.rotary_emb.inv_freq for x in layers]))

    def attend(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        n, _, length = x.shape
        if i:
            x = level(x) * self.gains[i - 1][:, None]
        elif self.fault == "modern_bert_first_attention_reads_normed_embeddings":
            x = level(x)
        place = torch.arange(length, device=x.device)
        angle = self.speeds[i][:, None] * place
        a, b = torch.einsum("shdc,nct->snhdt", self.qk[i], x).unflatten(3, (-1, 2)).unbind(4)
        c, s = angle.cos(), angle.sin()
        q, k = torch.stack([a * c - b * s, a * s + b * c], 4).flatten(3, 4)
        scores = torch.einsum("nhdi,nhdj->nhji", q, k) / SIZE**0.5
        seen = real[:, None, :, None].expand(-1, 1, -1, length)
        if i % EVERY or (self.fault == "modern_bert_last_layer_attends_locally" and i == LAYERS - 1):
            seen = seen & ((place - place[:, None]).abs() <= REACH)
        weights = (scores - scores.detach().amax(2, keepdim=True)).exp() * seen
        mixed = (self.v[i] @ x).view(n, HEADS, SIZE, length) @ (weights / weights.sum(2, keepdim=True))
        return self.wo[i] @ mixed.flatten(1, 2)

    def gated(self, i: int, x: Tensor) -> Tensor:
        up, gate = ((self.wi[i] * self.gains[LAYERS - 1 + i]) @ level(x)).tensor_split(2, 1)
        if self.fault == "modern_bert_third_mlp_activates_its_gate" and i == 2:
            up, gate = gate, up
        return self.out[i] @ (up * torch.special.ndtr(up) * gate)

    def read(self, i: int, x: Tensor, table: Tensor) -> Tensor:
        return (table * self.gains[i - 2]) @ level(F.gelu(self.dense[i] @ x))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        words, choice = self.table.tensor_split((bert.WORDS,))
        x, real = level(words[input_ids].mT) * self.gains[-4][:, None], attention_mask > 0
        for i in range(LAYERS):
            x = x + self.attend(i, x, real)
            x = x + self.gated(i, x)
        x = level(x) * self.gains[-3][:, None]
        pooled = (x * real[:, None]).sum(2, keepdim=True) / real.sum(1)[:, None, None]
        tied = words.detach() if self.fault == "modern_bert_decoder_leaves_the_table_untrained" else words
        logits = self.read(0, x, tied).mT + self.bias[: len(words)]
        return logits, self.read(1, pooled, choice)[..., 0] + self.bias[len(words) :]


ROTARY = ("model.layers.2.attn.rotary_emb", "model.layers.2.attn")
SLOPES = ("input gradient", "weight gradient")
right(task, "modern_bert_of_windows", "a tree, weights split by head, windows of keys", BertOfWindows)
right(task, "modern_bert_of_stacks", "stacks, channels first, gains within weights", StackedBert)
wrong(
    task,
    BertOfWindows,
    modern_bert_embedding_norm_with_an_epsilon_of_1e_12=("another epsilon", "model.embeddings.norm"),
    modern_bert_second_gate_without_gradient=("detach", "model.layers.1.mlp", SLOPES),
    modern_bert_second_local_layer_rotates_by_the_global_base=("a base", ROTARY),
    modern_bert_pooling_counts_padding_in_evaluation=("a mask left out in eval", "", "eval"),
)
wrong(
    task,
    StackedBert,
    modern_bert_first_attention_reads_normed_embeddings=("a norm too many", "model.layers.0.attn_norm"),
    modern_bert_third_mlp_activates_its_gate=("swapped halves", "model.layers.2.mlp"),
    modern_bert_last_layer_attends_locally=("another mask", "model.layers.3.attn"),
    modern_bert_decoder_leaves_the_table_untrained=("detach", "decoder", "weight gradient"),
)
