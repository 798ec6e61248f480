"""Two ports of a small Pix2Struct: a tree with the sequence first, and one class of packed stacks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_ninth_pix2struct import DISTANCE, EPS, PAD, Pix2Struct, report, words

task = few("twenty_ninth_pix2struct", Pix2Struct, report, words)


class Root(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.centred = leaf(norm.weight), False

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain


class Look(nn.Module):
    def __init__(self, norm: nn.Module, attention: nn.Module):
        super().__init__()
        layers, heads = (attention.query, attention.key, attention.value), attention.heads
        query, *others = (x.weight.unflatten(0, (heads, -1)) for x in layers)
        self.norm, self.ask, self.know = Root(norm), leaf(query), pile(others)
        self.tell = leaf(attention.output.weight.unflatten(1, (heads, -1)))
        self.scaled = self.cut = False

    def forward(self, x: Tensor, seen: Tensor, memory: Tensor | None = None, nearness: Tensor | float = 0.0):
        y = self.norm(x)
        source = y if memory is None else memory
        query = torch.einsum("snc,hdc->nhsd", y, self.ask)
        key, value = torch.einsum("tnc,khdc->knhtd", source.detach() if self.cut else source, self.know)
        scores = query @ key.mT
        scores = (scores / math.sqrt(key.shape[-1]) if self.scaled else scores) + nearness
        share = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return x + torch.einsum("nhsd,chd->snc", share @ value, self.tell)


class Think(nn.Module):
    def __init__(self, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.quick = Root(norm), False
        self.up, self.down = leaf(torch.cat([mlp.wi_1.weight, mlp.wi_0.weight]).T), leaf(mlp.wo.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (self.norm(x) @ self.up).chunk(2, -1)
        bend = 1.702 if self.quick else math.sqrt(8 / math.pi) * (1 + 0.044715 * gate.square())
        gate = gate * torch.sigmoid(bend * gate)
        return x + (gate * value) @ self.down


class Reader(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        first = model.embeddings
        self.places = leaf(torch.cat([first.row_embedder.weight, first.column_embedder.weight]))
        self.paint = nn.Linear(first.patch_projection.in_features, len(first.patch_projection.weight))
        self.paint.load_state_dict(first.patch_projection.state_dict())
        self.steps = nn.ModuleList()
        for layer in model.layer:
            self.steps.append(Look(layer.pre_attention_layer_norm, layer.attention))
            self.steps.append(Think(layer.pre_mlp_layer_norm, layer.mlp))
        self.norm = Root(model.layernorm)

    def forward(self, patches: Tensor, seen: Tensor) -> Tensor:
        index = patches[..., :2].long() + torch.tensor([0, len(self.places) // 2]).to(patches.device)
        x = self.paint(patches[..., 2:]) + self.places[index].sum(2)
        for step in self.steps:
            x = step(x, seen) if isinstance(step, Look) else step(x)
        return self.norm(x)


def buckets(length: int, device: torch.device, distance: int = DISTANCE) -> Tensor:
    far = torch.arange(length, device=device)
    borders = torch.tensor([4 * (distance / 4) ** (k / 4) for k in (1, 2, 3)], device=device)
    return torch.where(far < 4, far, 4 + (far[:, None] >= borders).sum(1))[(far[:, None] - far).clamp(min=0)]


def readable(tokens: Tensor) -> Tensor:
    there = F.pad(tokens[:, 1:] != PAD, (1, 0), value=True)
    return there[:, None, None].tile(1, 1, tokens.shape[1], 1).tril()


class Pix2StructOfSteps(Port):
    def take(self, model: Pix2Struct) -> None:
        self.reader, text, self.writer = Reader(model.encoder), model.decoder, nn.ModuleList()
        for layer in text.layer:
            own, cross, last = layer.self_attention, layer.encoder_decoder_attention, layer.mlp
            self.writer.append(Look(own.layer_norm, own.attention))
            self.writer.append(Look(cross.layer_norm, cross.attention))
            self.writer.append(Think(last.layer_norm, last.DenseReluDense))
        self.near = leaf(text.layer[0].self_attention.attention.relative_attention_bias.weight.T)
        self.speak, self.words = Root(text.final_layer_norm), leaf(text.embed_tokens.weight.T)
        self.spell = leaf(text.lm_head.weight.T)
        self.reader.steps[1].quick = self.fault == "pix2struct_first_vision_gelu_in_its_quick_form"
        self.reader.steps[2].scaled = self.fault == "pix2struct_second_vision_attention_scaled_by_its_width"
        self.writer[4].cut = self.fault == "pix2struct_last_cross_attention_reads_the_picture_detached"
        self.speak.centred = self.fault == "pix2struct_last_text_norm_subtracts_the_mean"

    def forward(self, flattened_patches: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        seen = attention_mask.bool()[:, None, None]
        memory = self.reader(flattened_patches.transpose(0, 1), seen)
        read, x = readable(decoder_input_ids), self.words[:, decoder_input_ids.T].movedim(0, 2)
        near = self.near[:, buckets(len(x), x.device)]
        for own, cross, think in zip(*(self.writer[i::3] for i in range(3)), strict=True):
            x = think(cross(own(x, read, None, near), seen, memory))
        return (self.speak(x) @ self.spell).transpose(0, 1)


def square(a: nn.Module) -> Tensor:
    return torch.cat([a.query.weight, a.key.weight, a.value.weight, a.output.weight.T])


class PackedPix2Struct(Port):
    def take(self, model: Pix2Struct) -> None:
        sight, text, start = model.encoder.layer, model.decoder, model.encoder.embeddings
        self.heads = sight[0].attention.heads, text.layer[0].self_attention.attention.heads
        self.sight = pile(square(x.attention) for x in sight)
        pairs = [(x.self_attention, x.encoder_decoder_attention) for x in text.layer]
        self.text = pile(square(x.attention) for pair in pairs for x in pair)
        both = [x.mlp for x in sight], [x.mlp.DenseReluDense for x in text.layer]
        gates = ([torch.stack([m.wi_0.weight, m.wi_1.weight, m.wo.weight.T]) for m in ms] for ms in both)
        self.sight_mlp, self.text_mlp = map(pile, gates)
        norms = [n for x in sight for n in (x.pre_attention_layer_norm, x.pre_mlp_layer_norm)]
        norms.append(model.encoder.layernorm)
        norms += [n.layer_norm for pair, x in zip(pairs, text.layer, strict=True) for n in (*pair, x.mlp)]
        self.gains = pile(n.weight for n in (*norms, text.final_layer_norm))
        self.places = pile((start.row_embedder.weight, start.column_embedder.weight))
        self.paint = leaf(torch.cat([start.patch_projection.weight, start.patch_projection.bias[:, None]], 1))
        self.near = leaf(text.layer[0].self_attention.attention.relative_attention_bias.weight)
        self.words = pile((text.embed_tokens.weight, text.lm_head.weight))

    def norm(self, i: int, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, True) + EPS) ** -0.5 * self.gains[i]

    def attend(self, w: Tensor, heads: int, x: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        q, k, v, o = w.unflatten(0, (4, heads, -1))
        q, k, v = (y[:, None] @ z.mT for y, z in ((x, q), (source, k), (source, v)))
        return (F.scaled_dot_product_attention(q, k, v, mask, scale=1.0) @ o).sum(1)

    def product(self, w: Tensor, x: Tensor) -> Tensor:
        return (F.gelu(x @ w[0].T, approximate="tanh") * (x @ w[1].T)) @ w[2]

    def forward(self, flattened_patches: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        (row, column), patches = flattened_patches[..., :2].long().unbind(-1), flattened_patches[..., 2:]
        rows, columns = self.places
        rows = rows.detach() if self.fault == "pix2struct_row_embedding_not_trained" else rows
        x = F.pad(patches, (0, 1), value=1.0) @ self.paint.T + rows[row] + columns[column]
        hide = attention_mask[:, None, None].to(x).log()
        for i in range(len(self.sight)):
            y = self.norm(2 * i, x)
            x = x + self.attend(self.sight[i], self.heads[0], y, y, hide)
            y = self.norm(2 * i + 1, x)
            if self.fault == "pix2struct_third_vision_layer_adds_to_what_was_normed" and i == 2:
                x = y
            x = x + self.product(self.sight_mlp[i], y)
        k = 2 * len(self.sight)
        memory, x = self.norm(k, x), self.words[0][decoder_input_ids]
        wide = 128 if self.fault == "pix2struct_relative_buckets_reach_as_far_as_in_t5" else DISTANCE
        near = self.near[buckets(x.shape[1], x.device, wide)].movedim(2, 0)
        near, mask = torch.where(readable(decoder_input_ids), near, -math.inf), hide
        if self.fault == "pix2struct_first_cross_attention_reads_padding_in_evaluation" and not self.training:
            mask = torch.zeros_like(hide)
        for i in range(len(self.text_mlp)):
            y = self.norm(k + 3 * i + 1, x)
            x = x + self.attend(self.text[2 * i], self.heads[1], y, y, near)
            y = self.norm(k + 3 * i + 2, x)
            x = x + self.attend(self.text[2 * i + 1], self.heads[1], y, memory, hide if i else mask)
            x = x + self.product(self.text_mlp[i], self.norm(k + 3 * i + 3, x))
        return self.norm(-1, x) @ self.words[1].T


SLOPES, SIGHT, TEXT = ("input gradient", "weight gradient"), "encoder.layer", "decoder.layer"
CROSS = [(x, f"{x}.attention") for x in (f"{TEXT}.{i}.encoder_decoder_attention" for i in (0, 1))]
right(task, "pix2struct_of_steps_sequence_first", "a tree, weights by head, fused halves", Pix2StructOfSteps)
right(task, "pix2struct_of_packed_stacks", "packed stacks and fused attention", PackedPix2Struct)
wrong(
    task,
    Pix2StructOfSteps,
    pix2struct_first_vision_gelu_in_its_quick_form=("another GELU", f"{SIGHT}.0.mlp.act"),
    pix2struct_second_vision_attention_scaled_by_its_width=("scale", f"{SIGHT}.1.attention"),
    pix2struct_last_cross_attention_reads_the_picture_detached=("detach", CROSS[1], SLOPES),
    pix2struct_last_text_norm_subtracts_the_mean=("another norm", "decoder.final_layer_norm"),
)
wrong(
    task,
    PackedPix2Struct,
    pix2struct_row_embedding_not_trained=("detach", "encoder.embeddings.row_embedder", "weight gradient"),
    pix2struct_third_vision_layer_adds_to_what_was_normed=("residual", f"{SIGHT}.2"),
    pix2struct_relative_buckets_reach_as_far_as_in_t5=("buckets", f"{TEXT}.0.self_attention.attention"),
    pix2struct_first_cross_attention_reads_padding_in_evaluation=("mask", CROSS[0], "eval"),
)
