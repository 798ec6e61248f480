"""Two ports of a small OPT with LoRA: a tree that puts time first, and one class of packed weights."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fourth_opt_lora import HEADS, OPTForCausalLM, next_token, texts

task = few("thirty_fourth_opt_lora", OPTForCausalLM, texts, next_token)


def fixed(values: Tensor) -> nn.Parameter:
    """A weight that is not trained."""
    return nn.Parameter(values.detach().clone(), requires_grad=False)


class Affine(nn.Module):
    """A frozen product from the right."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.matrix, self.offset = fixed(layer.weight.T), fixed(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, -2), self.matrix).unflatten(0, x.shape[:-1])


class Standard(nn.Module):
    """A frozen layer norm by moments."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.floor = fixed(norm.weight), fixed(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.floor).sqrt() * self.gain + self.shift


class Adapted(nn.Module):
    """A frozen product with its adapter beside it in training, and within it in evaluation."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.down, self.up = leaf(layer.lora_A["default"].weight.T), leaf(layer.lora_B["default"].weight.T)
        self.base, self.rate = Affine(layer.base_layer), layer.scaling["default"]
        self.still, self.plain = False, False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            thin = x @ self.down
            return self.base(x) + (self.rate * (thin.detach() if self.still else thin)) @ self.up
        merged = self.down @ self.up * (1 if self.plain else self.rate)
        return x @ (self.base.matrix + merged) + self.base.offset


class Mixer(nn.Module):
    """The norm and the attention of [T, N, D], with an axis for the heads."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        old, self.norm = layer.self_attn, Standard(layer.self_attn_layer_norm)
        self.key, self.back = Affine(old.k_proj), Affine(old.out_proj)
        self.query, self.value = Adapted(old.q_proj), Adapted(old.v_proj)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (f(x).unflatten(2, (HEADS, -1)) for f in (self.query, self.key, self.value))
        score = torch.einsum("tnhd,snhd->nhts", q, k) / math.sqrt(q.shape[-1])
        share = score.masked_fill(hidden, -1e9).softmax(-1)
        return self.back(torch.einsum("nhts,snhd->tnhd", share, v).flatten(2))


def thinker(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(Standard(layer.final_layer_norm), Affine(layer.fc1), nn.ReLU(), Affine(layer.fc2))


class TimeFirstOPT(Port):
    """A tree of mixers and thinkers in turn, with the axis of time first."""

    def take(self, model: OPTForCausalLM) -> None:
        decoder, fault = model.model.decoder, self.fault
        self.words, self.widen = fixed(decoder.embed_tokens.weight), fixed(decoder.project_in.weight.T)
        self.places = fixed(decoder.embed_positions.weight[1:])
        self.mixers = nn.ModuleList(map(Mixer, decoder.layers))
        self.thinkers = nn.ModuleList(map(thinker, decoder.layers))
        self.last, self.narrow = Standard(decoder.final_layer_norm), fixed(decoder.project_out.weight.T)
        self.head = leaf(model.lm_head.modules_to_save["default"].weight.T)
        self.mixers[0].query.still = fault == "opt_lora_first_query_adapter_detached_after_a"
        if fault == "opt_lora_second_feed_forward_norm_with_the_epsilon_of_keras":
            self.thinkers[1][0].floor = 1e-3
        self.mixers[2].value.plain = fault == "opt_lora_third_value_adapter_merged_without_its_scale"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask.T.bool()
        steps, place = torch.arange(len(real), device=real.device), real.cumsum(0).where(real, 0)
        if self.fault == "opt_lora_positions_counted_over_the_padding_too":
            place = steps[:, None] + 1
        x = self.words[input_ids.T] @ self.widen + self.places[place]
        hidden = (steps > steps[:, None]) | ~real.T[:, None, None]
        for mix, think in zip(self.mixers, self.thinkers, strict=True):
            x = x + mix(x, hidden)
            x = x + think(x)
        return (self.last(x) @ self.narrow @ self.head).transpose(0, 1)


def times(x: Tensor, matrix: Tensor) -> Tensor:
    return x @ matrix[:-1] + matrix[-1]


def shelf(layers: Iterable[nn.Module]) -> nn.Parameter:
    """Frozen layers of one shape, stacked: [L, I + 1, O], the biases in the last rows."""
    return fixed(torch.stack([torch.cat([x.weight.T, x.bias[None]]) for x in layers]))


class PackedOPT(Port):
    """Stacks by layer: queries, keys and values in one product, and adapters side by side."""

    def take(self, model: OPTForCausalLM) -> None:
        decoder, layers = model.model.decoder, model.model.decoder.layers
        old = [x.self_attn for x in layers]
        pairs = [(x.q_proj, x.v_proj) for x in old]
        self.down = pile(torch.cat([p.lora_A["default"].weight for p in pair]) for pair in pairs)
        self.up = pile(torch.cat([p.lora_B["default"].weight.T for p in pair]) for pair in pairs)
        bases = [(q.base_layer, x.k_proj, v.base_layer) for (q, v), x in zip(pairs, old, strict=True)]
        self.ask = fixed(torch.cat([shelf(x) for x in zip(*bases, strict=True)], 2))
        self.out = shelf(x.out_proj for x in old)
        self.rise, self.fall = shelf(x.fc1 for x in layers), shelf(x.fc2 for x in layers)
        norms = [y for x in layers for y in (x.self_attn_layer_norm, x.final_layer_norm)]
        norms.append(decoder.final_layer_norm)
        self.norm = fixed(torch.stack([torch.stack([x.weight, x.bias], 1) for x in norms]))
        self.words, self.places = fixed(decoder.embed_tokens.weight), fixed(decoder.embed_positions.weight)
        self.ends = fixed(torch.stack([decoder.project_in.weight.T, decoder.project_out.weight]))
        self.head = leaf(model.lm_head.modules_to_save["default"].weight)

    def even(self, i: int, x: Tensor, still: bool = False) -> Tensor:
        spread, center = torch.var_mean(x.detach() if still else x, -1, correction=0, keepdim=True)
        gain, shift = self.norm[i].unbind(1)
        rate = gain * (spread + 1e-5).rsqrt()
        return x * rate + (shift - center * rate)

    def attend(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = times(x, self.ask[i]).chunk(3, -1)
        r, s, root = 3, 5, 0.5 if i == 1 else 1.0
        thin = x @ self.down[i].T
        q = q + thin[..., :r] @ self.up[i, :r] * (8 * r**-root)
        if self.fault == "opt_lora_second_value_adapter_scaled_by_the_rank_of_the_query" and i == 1:
            s = r
        v = v + thin[..., r:] @ self.up[i, r:] * (8 * s**-root)
        mixed, size = [], x.shape[-1] // HEADS
        dealt = self.fault == "opt_lora_third_layer_deals_its_values_to_the_heads_in_turn" and i == 2
        for h in range(HEADS):
            own = slice(h * size, (h + 1) * size)
            score = (q[..., own] @ k[..., own].mT) * size**-0.5
            value = v[..., h::HEADS] if dealt else v[..., own]
            mixed.append(torch.where(seen, score, -1e9).softmax(-1) @ value)
        return times(torch.cat(mixed, -1), self.out[i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = (self.words @ self.ends[0])[input_ids]
        x = x + self.places[attention_mask.cumsum(1) * attention_mask + 1]
        length = x.shape[1]
        seen = (attention_mask[:, None] * attention_mask.new_ones(length, length).tril()).bool()
        for i in range(len(self.down)):
            y = self.even(2 * i, x)
            kept = y if self.fault == "opt_lora_first_residual_taken_after_the_norm" and i == 0 else x
            x = kept + self.attend(i, y, seen)
            x = x + times(times(self.even(2 * i + 1, x), self.rise[i]).clamp(min=0), self.fall[i])
        still = self.fault == "opt_lora_final_norm_takes_its_statistics_for_constants"
        return self.even(-1, x, still) @ (self.head @ self.ends[1]).T


SLOPES, AT = ("input gradient", "weight gradient"), "model.decoder."
QUERY = AT + "layers.0.self_attn.q_proj"
right(task, "opt_lora_with_time_first", "a tree, merged adapters in evaluation", TimeFirstOPT)
right(task, "opt_lora_of_packed_weights", "packed stacks, the head within its projection", PackedOPT)
wrong(
    task,
    TimeFirstOPT,
    opt_lora_positions_counted_over_the_padding_too=("positions", AT + "embed_positions"),
    opt_lora_first_query_adapter_detached_after_a=("detach", (QUERY, QUERY + ".lora_A.default"), SLOPES),
    opt_lora_second_feed_forward_norm_with_the_epsilon_of_keras=("epsilon", AT + "layers.1.final_layer_norm"),
    opt_lora_third_value_adapter_merged_without_its_scale=("eval", AT + "layers.2.self_attn.v_proj", "eval"),
)
wrong(
    task,
    PackedOPT,
    opt_lora_first_residual_taken_after_the_norm=("another residual", AT + "layers.0"),
    opt_lora_second_value_adapter_scaled_by_the_rank_of_the_query=("scale", AT + "layers.1.self_attn.v_proj"),
    opt_lora_third_layer_deals_its_values_to_the_heads_in_turn=("layout of heads", AT + "layers.2.self_attn"),
    opt_lora_final_norm_takes_its_statistics_for_constants=("detach", AT + "final_layer_norm", SLOPES),
)
