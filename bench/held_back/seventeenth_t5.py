"""Two ports of T5 v1.1: sublayers with their norms and sums inside, and stacks of all weights by einsum."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._seventeenth_t5 import T5ForConditionalGeneration, surprise, tasks
from bench.held_back._sixth_ports import few

task = few("seventeenth_t5", T5ForConditionalGeneration, tasks, surprise)


def scale(norm: nn.Module) -> nn.RMSNorm:
    new = nn.RMSNorm(len(norm.weight), norm.variance_epsilon)
    new.weight = leaf(norm.weight)
    return new


class Distances(nn.Module):
    """A value for each head and offset, laid out over queries and keys; ``last`` keeps one query only."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.table, self.both = leaf(attention.relative_attention_bias.weight.T), attention.bidirectional
        self.count, self.farthest, self.last = attention.num_buckets, attention.max_distance, False

    def slot(self, offset: int) -> int:
        count = self.count // 2 if self.both else self.count
        distance, near = abs(offset) if self.both else max(-offset, 0), count // 2
        if distance >= near:
            share = math.log(distance / near) / math.log(self.farthest / near)
            distance = min(near + int(share * (count - near)), count - 1)
        return distance + (count if self.both and offset > 0 else 0)

    def forward(self, length: int) -> Tensor:
        lines = self.table[:, [self.slot(i) for i in range(1 - length, length)]].unfold(1, length, 1).flip(1)
        return lines[:, -1:] if self.last and not self.training else lines


class Mix(nn.Module):
    """A sublayer of attention: norm, a product for the queries and one for the rest, sum."""

    def __init__(self, norm: nn.Module, attention: nn.Module):
        super().__init__()
        self.scale, self.heads, self.norm_all = scale(norm), attention.n_heads, False
        self.wide = leaf(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]))
        self.back = leaf(attention.o.weight.T)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y, inner = self.scale(x), len(self.wide) // 3
        read = y if memory is None else self.scale(memory) if self.norm_all else memory
        q, (k, v) = F.linear(y, self.wide[:inner]), F.linear(read, self.wide[inner:]).chunk(2, -1)
        q, k, v = (z.view(len(z), z.shape[1], self.heads, -1).transpose(1, 2) for z in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return x + mixed.transpose(1, 2).flatten(2) @ self.back


class Think(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        unit, self.scale = layer.DenseReluDense, scale(layer.layer_norm)
        self.rise, self.fall = leaf(torch.cat([unit.wi_1.weight, unit.wi_0.weight]).T), leaf(unit.wo.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (self.scale(x) @ self.rise).chunk(2, -1)
        return torch.add(x, (F.gelu(gate, approximate="tanh") * value) @ self.fall)


class Tower(nn.Module):
    def __init__(self, stack: nn.Module):
        super().__init__()
        self.distances, self.rounds = Distances(stack.block[0].layer[0].SelfAttention), nn.ModuleList()
        for block in stack.block:
            own, *cross, last = block.layer
            mixes = [(own.layer_norm, own.SelfAttention), *((x.layer_norm, x.EncDecAttention) for x in cross)]
            self.rounds.append(nn.ModuleList([*(Mix(*parts) for parts in mixes), Think(last)]))
        self.final = scale(stack.final_layer_norm)

    def forward(self, x: Tensor, hidden: Tensor, *memory: Tensor) -> Tensor:
        bias = self.distances(x.shape[1]).masked_fill(hidden, torch.finfo(x.dtype).min)
        for own, *rest in self.rounds:
            x = own(x, bias)
            for part in rest:
                x = part(x, *memory) if isinstance(part, Mix) else part(x)
        return self.final(x)


class SublayerTowers(Port):
    def take(self, model: T5ForConditionalGeneration) -> None:
        self.words, self.head = leaf(model.shared.weight), leaf(model.lm_head.weight.T)
        self.reader, self.writer, config = Tower(model.encoder), Tower(model.decoder), model.config
        self.start, self.filler = config.decoder_start_token_id, config.pad_token_id
        self.skipped = self.filler if self.fault == "t5_filler_row_of_the_word_table_never_learns" else None
        self.temper = config.d_model**-0.5 if self.fault == "t5_untied_head_scaled_as_if_tied" else 1.0
        self.writer.rounds[0][1].norm_all = self.fault == "t5_first_cross_norm_on_the_memory_too"
        self.writer.distances.last = self.fault == "t5_writer_evaluates_with_the_distances_of_its_last_word"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = attention_mask[:, None, None] == 0
        memory = self.reader(F.embedding(input_ids, self.words, padding_idx=self.skipped), hidden)
        ids = labels.new_full(labels.shape, self.start)
        ids[:, 1:] = labels[:, :-1].where(labels[:, :-1] >= 0, self.filler)
        future = torch.ones_like(ids[0]).expand(ids.shape[1], -1).triu(1) > 0
        absent = torch.zeros_like(hidden, dtype=memory.dtype).masked_fill(hidden, -torch.inf)
        x = self.writer(F.embedding(ids, self.words, padding_idx=self.skipped), future, absent, memory)
        return {"logits": (self.temper * x) @ self.head, "encoder_last_hidden_state": memory}


class StackedT5(Port):
    """All weights in stacks: attentions [A, H, C, D], units [L, 2, D, C], gains [G, D]."""

    def take(self, model: T5ForConditionalGeneration) -> None:
        config, blocks = model.config, [*model.encoder.block, *model.decoder.block]
        self.depth, self.count = config.num_layers, config.relative_attention_num_buckets
        self.farthest, self.eps = config.relative_attention_max_distance, config.layer_norm_epsilon
        self.start, cut = config.decoder_start_token_id, (config.num_heads, config.d_kv)
        mix = [block.layer[0].SelfAttention for block in blocks]
        mix += [block.layer[1].EncDecAttention for block in blocks[self.depth :]]
        self.q, self.k, self.v = (pile(getattr(x, n).weight.unflatten(0, cut).mT for x in mix) for n in "qkv")
        self.o = pile(x.o.weight.T.unflatten(0, cut) for x in mix)
        units = [block.layer[-1].DenseReluDense for block in blocks]
        self.rise = pile(torch.stack([unit.wi_0.weight, unit.wi_1.weight]) for unit in units)
        self.fall = pile(unit.wo.weight for unit in units)
        norms = [layer.layer_norm for block in blocks for layer in block.layer]
        norms += [stack.final_layer_norm for stack in (model.encoder, model.decoder)]
        self.gains = pile(norm.weight for norm in norms)
        self.tables = pile(mix[i].relative_attention_bias.weight for i in (0, self.depth))
        self.words, self.head = leaf(model.shared.weight), leaf(model.lm_head.weight)

    def normed(self, i: int, x: Tensor) -> Tensor:
        power = torch.einsum("ntc,ntc->nt", x, x)[..., None] / x.shape[2]
        return self.gains[i] * x / (power + self.eps).sqrt()

    def buckets(self, distance: Tensor, count: int, farthest: int = 128) -> Tensor:
        near, far = count // 2, count - count // 2
        begins = [*range(near), *(near * (farthest / near) ** (i / far) for i in range(far))]
        return (distance[..., None] >= torch.tensor(begins, device=distance.device)).sum(-1) - 1

    def distances(self, side: int, length: int) -> Tensor:
        place, half = torch.arange(length, device=self.words.device), self.count // 2
        ahead = place - place[:, None]
        index = self.buckets(ahead.abs(), half, self.farthest) + half * (ahead > 0)
        if side == 1:
            reach = () if self.fault == "t5_writer_buckets_reach_to_the_usual_distance" else (self.farthest,)
            index = self.buckets(ahead.neg().relu(), self.count, *reach)
        return torch.einsum("tsb,bh->hts", F.one_hot(index, self.count).to(self.words), self.tables[side])

    def attend(self, i: int, y: Tensor, hidden: Tensor, bias: Tensor | float, *memory: Tensor) -> Tensor:
        k, v = (torch.einsum("nsc,hcd->nhsd", memory[0] if memory else y, w[i]) for w in (self.k, self.v))
        scores = torch.einsum("ntc,hcd,nhsd->nhts", y, self.q[i], k) + bias
        scores = torch.where(hidden, torch.finfo(scores.dtype).min, scores)
        return torch.einsum("nhts,nhsd,hdc->ntc", scores.softmax(-1), v, self.o[i])

    def unit(self, i: int, y: Tensor) -> Tensor:
        gate, value = torch.einsum("ntc,pfc->pntf", y, self.rise[i])
        slope = (2 * (2 / math.pi) ** 0.5 * gate * (1 + 0.044715 * gate * gate)).sigmoid()
        return torch.einsum("ntf,cf->ntc", gate * slope * value, self.fall[i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, x = (attention_mask < 1)[:, None, None], self.words[input_ids]
        bias = self.distances(0, x.shape[1])
        for i in range(self.depth):
            turned = self.fault == "t5_middle_reader_hides_queries_in_place_of_keys" and i == 1
            x = x + self.attend(i, self.normed(2 * i, x), hidden.mT if turned else hidden, bias)
            x = x + self.unit(i, self.normed(2 * i + 1, x))
        memory = self.normed(-2, x)
        ids = labels.roll(1, 1)
        if self.fault != "t5_labels_rolled_so_that_the_last_begins_the_row":
            ids[:, 0] = self.start
        x = self.words[ids.clamp(min=0)]
        bias, future = self.distances(1, x.shape[1]), torch.ones_like(ids[0]).diag().cumsum(0) < 1
        for j, i in enumerate(range(self.depth, len(self.rise))):
            n = 2 * self.depth + 3 * j
            x = x + self.attend(i, self.normed(n, x), future, bias)
            x = x + self.attend(len(self.rise) + j, self.normed(n + 1, x), hidden, 0.0, memory)
            slip = self.fault == "t5_last_unit_takes_the_gain_of_the_cross_norm" and i == len(self.rise) - 1
            x = x + self.unit(i, self.normed(n + 1 if slip else n + 2, x))
        return {"logits": self.normed(-1, x) @ self.head.T, "encoder_last_hidden_state": memory}


cross, unit, middle = "decoder.block.0.layer", "decoder.block.1.layer.2", "encoder.block.1.layer.0"
distances = f"{cross}.0.SelfAttention", f"{cross}.0.SelfAttention.relative_attention_bias"
right(task, "t5_of_sublayers_with_sums_inside", "a tree of sublayers, fused weights", SublayerTowers)
right(task, "t5_gated_in_stacks_by_einsum", "stacked weights, einsum over heads, bucket borders", StackedT5)
wrong(
    task,
    SublayerTowers,
    t5_filler_row_of_the_word_table_never_learns=("a padding index too many", "shared", "weight gradient"),
    t5_untied_head_scaled_as_if_tied=("a scale too many", ("lm_head", "")),
    t5_first_cross_norm_on_the_memory_too=("a norm too many", (f"{cross}.1", f"{cross}.1.EncDecAttention")),
    t5_writer_evaluates_with_the_distances_of_its_last_word=("one query for all", distances, "eval"),
)
wrong(
    task,
    StackedT5,
    t5_labels_rolled_so_that_the_last_begins_the_row=("no start token", ""),
    t5_middle_reader_hides_queries_in_place_of_keys=("a mask's axes", f"{middle}.SelfAttention"),
    t5_last_unit_takes_the_gain_of_the_cross_norm=("another's gain", (f"{unit}.layer_norm", unit)),
    t5_writer_buckets_reach_to_the_usual_distance=("a default kept", distances),
)
