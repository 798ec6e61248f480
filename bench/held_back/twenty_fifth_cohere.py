"""Two ports of a small Command R: a tree of fused layers with the time first, and one class of stacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fifth_cohere import CohereForCausalLM, counts, next_token

task = few("twenty_fifth_cohere", CohereForCausalLM, counts, next_token)


class Level(nn.Module):
    """Removes the mean of the last axis and divides by its deviation, then a gain."""

    def __init__(self, norm: nn.Module, order: Tensor | slice = slice(None)):
        super().__init__()
        self.gain, self.eps = leaf(norm.weight[..., order]), norm.variance_epsilon
        self.still, self.one = False, False

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        if self.still:
            spread = spread.detach()
        return (x - middle) / (spread + self.eps).sqrt() * (self.gain[:1] if self.one else self.gain)


class Clock(nn.Module):
    """The cosine and the sine of each time, [T, 1, 1, D / 2]."""

    def __init__(self, rates: Tensor):
        super().__init__()
        self.register_buffer("rates", rates.clone())

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        angle = torch.outer(torch.arange(length).to(self.rates), self.rates)[:, None, None]
        return angle.cos(), angle.sin()


class Lookup(nn.Module):
    """Scores of keys by queries, both of them turned by halves; it mixes [T, N, H, D]."""

    def __init__(self, attention: nn.Module, order: Tensor):
        super().__init__()
        self.ask, self.tell = (Level(norm, order) for norm in (attention.q_norm, attention.k_norm))
        heads, groups = len(self.ask.gain), attention.num_key_value_groups
        self.register_buffer("owner", torch.arange(heads) // groups)

    def turn(self, x: Tensor, hands: tuple[Tensor, Tensor]) -> Tensor:
        (left, rest), (cos, sin) = x.chunk(2, -1), hands
        return torch.cat([left * cos - rest * sin, left * sin + rest * cos], -1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hands: tuple, bias: Tensor) -> Tensor:
        q = self.turn(self.ask(q), hands) / q.shape[-1] ** 0.5
        k = self.turn(self.tell(k), hands)[:, :, self.owner]
        weight = (torch.einsum("tnhd,snhd->nhts", q, k) + bias).softmax(-1)
        return torch.einsum("nhts,snhd->tnhd", weight, v[:, :, self.owner])


class Twin(nn.Module):
    """Attention and gated units by one product in and one product out; its heads have their pairs apart."""

    def __init__(self, layer: nn.Module, paired: bool):
        super().__init__()
        attention, mlp, self.size = layer.self_attn, layer.mlp, layer.self_attn.head_dim
        order = torch.arange(self.size)
        if not paired:
            order = torch.cat([order[0::2], order[1::2]])
        q, k = (x.weight.unflatten(0, (-1, self.size)) for x in (attention.q_proj, attention.k_proj))
        inward = [q[:, order].flatten(0, 1), k[:, order].flatten(0, 1), attention.v_proj.weight]
        inward += [mlp.gate_proj.weight, mlp.up_proj.weight]
        self.cuts, self.inward = [len(rows) for rows in inward], leaf(torch.cat(inward))
        self.outward = leaf(torch.cat([attention.o_proj.weight, mlp.down_proj.weight], 1))
        self.level, self.lookup = Level(layer.input_layernorm), Lookup(attention, order)

    def forward(self, x: Tensor, hands: tuple, bias: Tensor) -> Tensor:
        *heads, gate, up = F.linear(self.level(x), self.inward).split(self.cuts, -1)
        mixed = self.lookup(*(each.unflatten(-1, (-1, self.size)) for each in heads), hands, bias)
        return x + F.linear(torch.cat([mixed.flatten(2), gate * gate.sigmoid() * up], -1), self.outward)


class CohereOfTwins(Port):
    """Twins over [T, N, C], whose heads are reordered so that halves turn instead of neighbours."""

    def take(self, model: CohereForCausalLM) -> None:
        inner, fault = model.model, self.fault
        self.words, self.empty = leaf(inner.embed_tokens.weight), inner.embed_tokens.padding_idx
        self.volume = model.logit_scale
        paired = 1 if fault == "cohere_second_layer_turns_halves_of_heads_of_neighbours" else None
        self.twins = nn.ModuleList(Twin(layer, i == paired) for i, layer in enumerate(inner.layers))
        self.clock, self.last = Clock(inner.rotary_emb.inv_freq), Level(inner.norm)
        self.last.still = fault == "cohere_final_norm_takes_its_variance_for_a_constant"
        self.twins[2].lookup.ask.one = fault == "cohere_last_query_norm_gives_all_heads_the_first_gain"
        if fault == "cohere_first_norm_with_the_epsilon_of_llama":
            self.twins[0].level.eps = 1e-6

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = F.embedding(input_ids.T, self.words, self.empty)
        seen = x.new_ones(len(x), len(x)).tril().bool() & attention_mask.bool()[:, None, None]
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        hands = self.clock(len(x))
        for twin in self.twins:
            x = twin(x, hands, bias)
        return torch.einsum("tnc,vc->ntv", self.last(x) * self.volume, self.words)


class StackedCohere(Port):
    """Stacks of transposed weights by layer, queries and keys in one, head after head."""

    def take(self, model: CohereForCausalLM) -> None:
        inner = model.model
        attention, mlp = ([getattr(x, name) for x in inner.layers] for name in ("self_attn", "mlp"))
        self.table, self.volume = leaf(inner.embed_tokens.weight.T), model.logit_scale
        three = ((x.q_proj.weight, x.k_proj.weight, x.v_proj.weight) for x in attention)
        self.inward = pile(torch.cat(weights).T for weights in three)
        self.outward = pile(x.o_proj.weight.T for x in attention)
        self.wide = pile(torch.stack([x.gate_proj.weight.T, x.up_proj.weight.T]) for x in mlp)
        self.narrow = pile(x.down_proj.weight.T for x in mlp)
        self.gains = pile([*(x.input_layernorm.weight for x in inner.layers), inner.norm.weight])
        self.head_gains = pile(torch.cat([x.q_norm.weight, x.k_norm.weight])[:, None] for x in attention)
        self.heads, self.eps = len(attention[0].q_norm.weight), inner.norm.variance_epsilon
        self.register_buffer("rates", inner.rotary_emb.inv_freq.clone())

    def level(self, x: Tensor, gain: Tensor) -> Tensor:
        x, count = x - x.mean(-1, True), x.shape[-1]
        return x * gain * (count / (x.square().sum(-1, True) + count * self.eps)).sqrt()

    def turn(self, x: Tensor) -> Tensor:
        """Each pair of neighbours by the angle of its time; [N, H, T, D]."""
        angle = torch.arange(x.shape[2]).to(self.rates)[:, None, None] * self.rates[:, None]
        x = x.unflatten(-1, (-1, 2))
        crossed = x.flip(-1) * torch.cat([-angle.sin(), angle.sin()], -1)
        return (x * angle.cos() + crossed).flatten(-2)

    def attend(self, i: int, x: Tensor, bias: Tensor) -> Tensor:
        both = len(self.head_gains[i])
        shares, size = self.heads // (both - self.heads), self.head_gains.shape[-1]
        x = (x @ self.inward[i]).unflatten(2, (-1, size)).transpose(1, 2)
        turned, values, mixed = self.turn(self.level(x[:, :both], self.head_gains[i])), x[:, both:], []
        if self.fault == "cohere_last_layer_divides_scores_by_the_width_over_the_heads" and i == 2:
            size = self.inward.shape[1] // self.heads
        for head in range(self.heads):
            keys = turned[:, self.heads + head // shares]
            scores = turned[:, head] @ keys.mT / size**0.5 + bias
            weight = (scores - scores.amax(-1, True).detach()).exp()
            mixed.append((weight @ values[:, head // shares]) / weight.sum(-1, True))
        return torch.cat(mixed, -1) @ self.outward[i]

    def units(self, i: int, x: Tensor) -> Tensor:
        gate, up = x[None] @ self.wide[i][:, None]
        if self.fault == "cohere_first_mlp_gates_by_the_other_half" and i == 0:
            gate, up = up, gate
        return (up * gate / (1 + torch.exp(-gate))) @ self.narrow[i]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, time = F.embedding(input_ids, self.table.T, 0), torch.arange(input_ids.shape[1]).to(input_ids)
        hidden = (time > time[:, None]).expand(len(x), -1, -1)
        if self.training or self.fault != "cohere_padding_seen_in_evaluation":
            hidden = hidden | (attention_mask < 1)[:, None]
        bias = hidden.to(x) * torch.finfo(x.dtype).min
        for i in range(len(self.inward)):
            read = self.level(x, self.gains[i])
            x = x + self.attend(i, read, bias)
            if self.fault == "cohere_second_layer_feeds_its_mlp_what_attention_has_added_to" and i == 1:
                read = self.level(x, self.gains[i])
            x = x + self.units(i, read)
        return self.level(x, self.gains[-1]) @ (self.volume * self.table)


SLOPES = ("input gradient", "weight gradient")
right(task, "cohere_of_twins_with_time_first", "a tree, fused branches, halves turned", CohereOfTwins)
right(task, "cohere_of_stacked_weights", "transposed stacks, head by head, softmax by hand", StackedCohere)
wrong(
    task,
    CohereOfTwins,
    cohere_first_norm_with_the_epsilon_of_llama=("another epsilon", "model.layers.0.input_layernorm"),
    cohere_second_layer_turns_halves_of_heads_of_neighbours=("another pairing", "model.layers.1.self_attn"),
    cohere_last_query_norm_gives_all_heads_the_first_gain=("shared gain", "model.layers.2.self_attn.q_norm"),
    cohere_final_norm_takes_its_variance_for_a_constant=("detach", "model.norm", SLOPES),
)
wrong(
    task,
    StackedCohere,
    cohere_padding_seen_in_evaluation=("a mask left out in eval", "model", "eval"),
    cohere_first_mlp_gates_by_the_other_half=("halves exchanged", "model.layers.0.mlp"),
    cohere_second_layer_feeds_its_mlp_what_attention_has_added_to=("one after the other", "model.layers.1"),
    cohere_last_layer_divides_scores_by_the_width_over_the_heads=("a scale", "model.layers.2.self_attn"),
)
