"""Two ports of BLOOM: a tree whose queries carry the slopes, and one pass over both parts in stacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twentieth_bloom import BloomForCausalLM, counting, surprise

task = few("twentieth_bloom", BloomForCausalLM, counting, surprise)
LAYERS = "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"


def tilts(heads: int) -> list[float]:
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return tilts(lower) + tilts(2 * lower)[::2][: heads - lower]


class Evened(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, F.layer_norm(x, x.shape[-1:], eps=self.eps), self.gain)


class Gaze(nn.Module):
    """Queries have the slope of their head as one channel more, and keys have their place."""

    def __init__(self, old: nn.Module, thirds: bool):
        super().__init__()
        fused, heads, self.cut = old.query_key_value, old.num_heads, False
        order = (3, heads, -1) if thirds else (heads, 3, -1)
        maps, shifts = (x.unflatten(0, order).movedim(order.index(3), 0) for x in fused.parameters())
        self.ask, self.key, self.value = (leaf(part.mT) for part in maps)
        self.shifts = leaf(shifts[:, :, None])
        self.back, self.back_b = leaf(old.dense.weight.T.unflatten(0, (heads, -1))), leaf(old.dense.bias)

    def forward(self, x: Tensor, kept: dict, hidden: Tensor, places: Tensor) -> Tensor:
        maps = zip((self.ask, self.key, self.value), self.shifts, strict=True)
        q, k, v = (x[:, None] @ weight + shift for weight, shift in maps)
        if kept:
            earlier = kept["k"].detach() if self.cut else kept["k"]
            k, v = torch.cat([earlier, k], 2), torch.cat([kept["v"], v], 2)
        kept.update(k=k, v=v)
        slopes = torch.tensor(tilts(q.shape[1])).to(q)[:, None, None].expand(*q.shape[:3], 1)
        places = places.to(k)[:, None, :, None].expand(*k.shape[:3], 1)
        scores = torch.cat([q / q.shape[3] ** 0.5, slopes], 3) @ torch.cat([k, places], 3).mT
        shares = scores.masked_fill(hidden[:, None], torch.finfo(scores.dtype).min).softmax(3)
        return torch.einsum("nhtk,nhkd,hdc->ntc", shares, v, self.back) + self.back_b


class Swell(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.rise, self.rise_b = leaf(old.dense_h_to_4h.weight.T), leaf(old.dense_h_to_4h.bias)
        self.fall, self.fall_b = leaf(old.dense_4h_to_h.weight.T), leaf(old.dense_4h_to_h.bias)
        self.bare = False

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.rise + self.rise_b
        y = y * torch.sigmoid(2 * 0.79788456 * (y + 0.044715 * y**3))
        y = sum(a @ b for a, b in zip(y.chunk(4, 2), self.fall.chunk(4), strict=True))
        return y if self.bare and not self.training else y + self.fall_b


class Floor(nn.Module):
    def __init__(self, old: nn.Module, thirds: bool = False):
        super().__init__()
        self.before, self.between = Evened(old.input_layernorm), Evened(old.post_attention_layernorm)
        self.gaze, self.swell = Gaze(old.self_attention, thirds), Swell(old.mlp)
        self.from_norm = [old.post_layernorm] * 2

    def forward(self, x: Tensor, kept: dict, hidden: Tensor, places: Tensor) -> Tensor:
        y = self.before(x)
        x = self.gaze(y, kept, hidden, places) + (y if self.from_norm[0] else x)
        y = self.between(x)
        return self.swell(y) + (y if self.from_norm[1] else x)


class BloomTower(Port):
    """Floors one above the other, each with a dictionary of what it has kept of the first part."""

    def take(self, model: BloomForCausalLM) -> None:
        body = model.transformer
        thirds = self.fault == "bloom_first_layer_splits_the_fused_projection_by_thirds", False, False
        self.words, self.entry = leaf(body.word_embeddings.weight), Evened(body.word_embeddings_layernorm)
        self.floors, self.roof = nn.ModuleList(map(Floor, body.h, thirds)), Evened(body.ln_f)
        raw = self.fault == "bloom_middle_layer_mlp_adds_the_stream_before_its_norm"
        self.floors[1].from_norm[1] &= not raw
        self.floors[2].gaze.cut = self.fault == "bloom_last_layer_detaches_the_cached_keys"
        self.floors[2].swell.bare = self.fault == "bloom_last_mlp_sums_slices_without_bias_in_evaluation"

    def read(self, words: Tensor, real: Tensor, places: Tensor, kept: list[dict]) -> Tensor:
        later = real.new_ones(words.shape[1], real.shape[1]).triu(1 + real.shape[1] - words.shape[1])
        hidden, x = (later + (1 - real)[:, None]) > 0, self.entry(F.embedding(words, self.words))
        for floor, memory in zip(self.floors, kept, strict=True):
            x = floor(x, memory, hidden, places)
        return self.roof(x)

    def forward(self, first: Tensor, second: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        start, kept = first.shape[1], [{} for _ in self.floors]
        real, places = attention_mask, attention_mask.cumsum(1)
        if self.fault == "bloom_second_part_counts_its_positions_from_its_own_start":
            places = torch.cat([places[:, :start], real[:, start:].cumsum(1)], 1)
        begun = self.read(first, real[:, :start], places[:, :start], kept)
        states = torch.cat([begun, self.read(second, real, places, kept)], 1)
        return {"logits": F.linear(states, self.words), "last_hidden_state": states}


class BloomAtOnce(Port):
    """Both parts in one pass, time first; layers stacked, with each bias as the last row of its matrix."""

    def take(self, model: BloomForCausalLM) -> None:
        body, blocks = model.transformer, list(model.transformer.h)
        self.table = leaf(body.word_embeddings.weight)
        self.heads, self.post = body.num_heads, [x.post_layernorm for x in blocks]
        pairs = [norm for x in blocks for norm in (x.input_layernorm, x.post_attention_layernorm)]
        norms = [body.word_embeddings_layernorm, *pairs, body.ln_f]
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)
        layers = ([x.get_submodule(name) for x in blocks] for name in LAYERS)
        stacks = (pile(torch.cat([y.weight.T, y.bias[None]]) for y in layer) for layer in layers)
        fused, self.dense, self.up, self.down = stacks
        self.fused = leaf(fused.unflatten(2, (self.heads, 3, -1)).movedim(3, 1))

    def normed(self, i: int, x: Tensor) -> Tensor:
        fixed = self.fault == "bloom_embedding_norm_keeps_its_statistics_from_the_gradient" and i == 0
        spread, center = torch.var_mean(x.detach() if fixed else x, -1, correction=0, keepdim=True)
        return (x - center) / torch.sqrt(spread + 1e-5) * self.norms[i, 0] + self.norms[i, 1]

    def slopes(self, like: Tensor) -> Tensor:
        next_one = self.fault == "bloom_alibi_slopes_of_the_next_power_of_two"
        lower = 2 ** (self.heads.bit_length() - 1 + next_one)
        own, odd = torch.arange(1, lower + 1) * 8 / lower, torch.arange(1, 2 * lower, 2) * 4 / lower
        return torch.exp2(-torch.cat([own, odd])[: self.heads].to(like))

    def attend(self, i: int, x: Tensor, seen: Tensor, blind: Tensor, tilt: Tensor) -> Tensor:
        """[T, N, D] with what is seen [N, 1, T, K]; a blind word weighs all that it sees the same."""
        q, k, v = torch.einsum("tnd,sdhc->stnhc", F.pad(x, (0, 1), value=1), self.fused[i])
        scores = torch.einsum("tnhc,knhc->nhtk", q, k) * q.shape[3] ** -0.5 + tilt
        shares = scores.masked_fill(blind, 0).masked_fill(~seen, -torch.inf).softmax(3)
        mixed = torch.einsum("nhtk,knhc->tnhc", shares, v).flatten(2)
        return F.pad(mixed, (0, 1), value=1) @ self.dense[i]

    def swell(self, i: int, x: Tensor) -> Tensor:
        y = F.pad(x, (0, 1), value=1) @ self.up[i]
        risen = y / 2 + y / 2 * torch.tanh(0.79788456 * y + 0.79788456 * 0.044715 * y.pow(3))
        if self.fault == "bloom_middle_gelu_by_the_error_function" and i == 1:
            risen = F.gelu(y)
        return F.pad(risen, (0, 1), value=1) @ self.down[i]

    def forward(self, first: Tensor, second: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x, places = self.normed(0, self.table[torch.cat([first, second], 1).T]), attention_mask.cumsum(1)
        whole = x.new_ones(len(x), len(x)).bool()
        seen = whole.tril() & (attention_mask > 0)[:, None, None]
        blind, whole[: first.shape[1], first.shape[1] :] = ~seen.any(3, keepdim=True), False
        seen, distance = torch.where(blind, whole, seen), places[:, None] - places[:, :, None]
        tilt = distance[:, None] * self.slopes(x)[:, None, None]
        for i, post in enumerate(self.post):
            y = self.normed(2 * i + 1, x)
            x = (y if post else x) + self.attend(i, y, seen, blind, tilt)
            y = self.normed(2 * i + 2, x)
            x = (y if post else x) + self.swell(i, y)
        x = self.normed(-1, x).transpose(0, 1)
        return {"logits": x @ self.table.T, "last_hidden_state": x}


BODY, GRADIENTS = "transformer", ("input gradient", "weight gradient")
first, middle, last = (f"{BODY}.h.{i}" for i in range(3))
split = first + ".self_attention.query_key_value", first + ".self_attention"
down, entry = (last + ".mlp.dense_4h_to_h", last + ".mlp"), BODY + ".word_embeddings_layernorm"
right(task, "bloom_tower_of_split_projections", "slopes and places as one more channel", BloomTower)
right(task, "bloom_of_both_parts_at_once", "no cache, time first, biases as rows of a stack", BloomAtOnce)
wrong(
    task,
    BloomTower,
    bloom_second_part_counts_its_positions_from_its_own_start=("positions behind a cache", BODY),
    bloom_first_layer_splits_the_fused_projection_by_thirds=("layout", split),
    bloom_middle_layer_mlp_adds_the_stream_before_its_norm=("residual from elsewhere", middle),
    bloom_last_layer_detaches_the_cached_keys=("detach", last + ".self_attention", GRADIENTS),
    bloom_last_mlp_sums_slices_without_bias_in_evaluation=("bias left out in eval", down, "eval"),
)
wrong(
    task,
    BloomAtOnce,
    bloom_alibi_slopes_of_the_next_power_of_two=("slopes of other heads", BODY),
    bloom_embedding_norm_keeps_its_statistics_from_the_gradient=("detach of statistics", entry, GRADIENTS),
    bloom_middle_gelu_by_the_error_function=("another formula", middle + ".mlp.gelu_impl"),
)
