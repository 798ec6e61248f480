"""Two ports of a small Funnel: a tree that looks distances up, and flat code of factors, time first."""

import math
from copy import deepcopy as own

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fifth_funnel import EPS, HEAD, HEADS, WIDTH, Funnel, sentences, tagging

task = few("thirty_fifth_funnel", Funnel, sentences, tagging)


class Looking(nn.Module):
    """Attention of queries to a memory: content, distance and segment, each with a bias of its own."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.ask, self.mix, self.norm = own(layer.q_head), own(layer.post_proj), own(layer.layer_norm)
        self.tell = leaf(torch.cat([layer.k_head.weight, layer.v_head.weight]))
        self.told = leaf(torch.cat([layer.k_head.bias, layer.v_head.bias]))
        self.biases = leaf(torch.stack([layer.r_w_bias, layer.r_r_bias, layer.r_s_bias])[:, None, :, None])
        self.far, self.segments = leaf(layer.r_kernel.permute(1, 2, 0)), leaf(layer.seg_embed.movedim(0, 2))
        self.silent = False

    def forward(self, x: Tensor, memory: Tensor, table: Tensor, same: Tensor, mask: Tensor) -> Tensor:
        k, v = F.linear(memory, self.tell, self.told).unflatten(2, (2, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        q = self.ask(x).unflatten(2, (HEADS, HEAD)).transpose(1, 2)
        by_word, by_place, by_segment = q + self.biases
        far = torch.einsum("bnic,ijc->bnij", by_place @ self.far, table)
        other, alike = (by_segment @ (self.segments.detach() if self.silent else self.segments)).split(1, 3)
        beside = F.pad((far + other + (alike - other) * same[:, None])[:, :, 1:, 1:], (1, 0, 1, 0))
        beside = (beside / math.sqrt(HEAD)).masked_fill(~mask[:, None, None], -math.inf)
        seen = F.scaled_dot_product_attention(by_word, k, v, attn_mask=beside)
        return self.norm(x + self.mix(seen.transpose(1, 2).flatten(2)))


class Thinking(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.look, self.norm = Looking(layer.attention), own(layer.ffn.layer_norm)
        self.up, self.down, self.curve = own(layer.ffn.linear_1), own(layer.ffn.linear_2), "tanh"

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = self.look(x, *others)
        return self.norm(x + self.down(F.gelu(self.up(x), approximate=self.curve)))


def distances(like: Tensor, rows: Tensor, columns: int, stride: int) -> Tensor:
    """[I, J, C]: the encoding of each row's distance from each column."""
    slow = torch.exp(torch.arange(WIDTH // 2, dtype=like.dtype) * (-2 * math.log(10000) / WIDTH))
    angle = (stride * (rows[:, None] - torch.arange(columns)))[..., None] * slow
    return torch.cat([angle.sin(), angle.cos()], -1)


class FunnelOfSteps(Port):
    """A chain of layers, each told which distances and segments it sees."""

    def take(self, model: Funnel) -> None:
        self.words = leaf(model.embeddings.word_embeddings.weight)
        self.norm = own(model.embeddings.layer_norm)
        self.steps = nn.ModuleList(Thinking(x) for block in model.encoder.blocks for x in block)
        self.last, self.name = Thinking(model.decoder.layers[0]), own(model.classifier)
        self.steps[1].look.silent = self.fault == "funnel_segments_without_gradient"
        if self.fault == "funnel_fourth_layer_gelu_by_the_error_function":
            self.steps[3].curve = "none"

    def shorter(self, x: Tensor, mask: Tensor) -> Tensor:
        """The class token, then the means of pairs of the rest but the last."""
        rest = F.avg_pool1d(x[:, 1:-1].transpose(1, 2), 2, ceil_mode=True)
        if self.fault == "funnel_padding_left_out_of_the_pooled_means":
            some = mask[:, 1:-1].to(x.dtype)
            share = F.avg_pool1d(some[:, None], 2, ceil_mode=True)
            full = F.avg_pool1d((x[:, 1:-1] * some[..., None]).transpose(1, 2), 2, ceil_mode=True)
            rest = full / share.clamp(min=0.5)
        return torch.cat([x[:, :1], rest.transpose(1, 2)], 1)

    def forward(self, input_ids: Tensor, mask: Tensor, token_type_ids: Tensor) -> Tensor:
        x, kinds, mask = self.norm(self.words[input_ids]), token_type_ids, mask > 0
        whole, first = (mask, kinds[:, :, None] == kinds[:, None]), x
        back = 0 if self.fault == "funnel_pooled_queries_stand_on_the_second_of_their_pair" else 1
        for i, step in enumerate(self.steps):
            stride, count = (1, 1, 2, 2, 4)[i], x.shape[1]
            if i in (2, 4):
                short = self.shorter(x, mask)
                fewer, places = torch.cat([kinds[:, :1], kinds[:, 1:-1:2]], 1), torch.arange(short.shape[1])
                table = distances(x, 2 * places - back, count, stride // 2)
                x = step(short, x, table, fewer[:, :, None] == kinds[:, None], mask)
                late = F.pad(mask[:, 2:-1:2], (0, count % 2), value=True)
                mask, kinds = torch.cat([mask[:, :1], mask[:, 1:-1:2] & late], 1), fewer
            else:
                table = distances(x, torch.arange(count), count, stride)
                x = step(x, x, table, kinds[:, :, None] == kinds[:, None], mask)
            first = x if i < 2 else first
        x = F.pad(x, (0, 0, 0, 1))[:, (torch.arange(first.shape[1]) + 3) // 4] + first
        return self.name(self.last(x, x, distances(x, torch.arange(x.shape[1]), x.shape[1], 1), *whole[::-1]))


def columns(layer: nn.Module) -> tuple[Tensor, ...]:
    """The layer's matrices by their inputs, its projections' biases, its own biases and its norms."""
    a, f = layer.attention, layer.ffn
    into = torch.cat([a.q_head.weight, a.k_head.weight, a.v_head.weight, a.r_kernel.flatten(1).T]).T
    inner = torch.cat([f.linear_1.weight, f.linear_2.weight.T, f.linear_1.bias[:, None]], 1)
    small = [a.r_w_bias, a.r_r_bias, a.r_s_bias, *a.seg_embed, a.k_head.bias, a.v_head.bias]
    small = torch.stack([x.flatten() for x in small])
    norms = (a.layer_norm.weight, a.layer_norm.bias, f.layer_norm.weight, f.layer_norm.bias)
    wide = torch.stack([a.post_proj.bias, f.linear_2.bias, *norms])
    return into, a.post_proj.weight.T, inner, small, wide


class FlatFunnel(Port):
    """Six layers of five stacks of weights; [T, N, D]; distances as products of waves."""

    def take(self, model: Funnel) -> None:
        layers = [x for block in model.encoder.blocks for x in block] + list(model.decoder.layers)
        self.w = nn.ParameterList(pile(each) for each in zip(*map(columns, layers), strict=True))
        start = model.embeddings
        table = [start.word_embeddings.weight, start.layer_norm.weight[None], start.layer_norm.bias[None]]
        self.start = leaf(torch.cat(table))
        self.end = leaf(torch.cat([model.classifier.weight.T, model.classifier.bias[None]]))

    def layer(self, n: int, x: Tensor, memory: Tensor, a: Tensor, b: Tensor, same: Tensor, mask: Tensor):
        (into, out, inner, small, wide), size = (w[n] for w in self.w), HEADS * HEAD
        wq, wk, wv, wr = into.split(size, 1)
        w, r, s, other, alike, k, v = small
        q = (x @ wq) / HEAD**0.5
        scaled = 1 if self.fault == "funnel_fifth_layer_segment_bias_not_scaled" and n == 4 else HEAD**-0.5
        k, v = ((memory @ m + c).unflatten(2, (HEADS, HEAD)) for m, c in ((wk, k), (wv, v)))
        place = (q + r / HEAD**0.5).unflatten(2, (HEADS, HEAD))
        qs, qc = torch.einsum("tbnh,dnh->tbnd", place, wr.unflatten(1, (HEADS, HEAD))).chunk(2, 3)
        sa, ca = a.sin()[:, None, None], a.cos()[:, None, None]
        score = torch.einsum("ibnd,jd->bnij", qs * sa + qc * ca, b.cos())
        score = score + torch.einsum("ibnd,jd->bnij", qc * sa - qs * ca, b.sin())
        kinds = torch.stack([other, alike]).unflatten(1, (HEADS, HEAD))
        apart = torch.einsum("ibnh,snh->sbni", (q + s * scaled).unflatten(2, (HEADS, HEAD)), kinds)
        score = score + torch.where(same[:, None], apart[1][..., None], apart[0][..., None])
        inside = torch.ones_like(score[0, 0])
        inside[0], inside[:, 0] = 0, 0
        words = (q + w / HEAD**0.5).unflatten(2, (HEADS, HEAD))
        score = score * inside + torch.einsum("ibnh,jbnh->bnij", words, k)
        power = (score - score.amax(-1, keepdim=True).detach()).exp() * mask[:, None, None]
        seen = torch.einsum("bnij,jbnh->ibnh", power / power.sum(-1, keepdim=True), v).flatten(2)
        x = F.layer_norm(x + seen @ out + wide[0], (WIDTH,), wide[2], wide[3], EPS)
        h, down = x @ inner[:, :WIDTH].T + inner[:, -1], inner[:, WIDTH:-1]
        h = h * torch.sigmoid(math.sqrt(8 / math.pi) * (h + 0.044715 * h**3)) @ down + wide[1]
        if self.fault == "funnel_decoder_damped_in_evaluation" and n == 5 and not self.training:
            h = 0.9 * h
        return F.layer_norm(x + h, (WIDTH,), wide[4], wide[5], EPS)

    def forward(self, input_ids: Tensor, mask: Tensor, token_type_ids: Tensor) -> Tensor:
        eps = 1e-5 if self.fault == "funnel_embedding_norm_with_a_larger_epsilon" else EPS
        x = F.layer_norm(self.start[input_ids.T], (WIDTH,), self.start[-2], self.start[-1], eps)
        slow = 10000 ** (-torch.arange(0, WIDTH, 2, dtype=x.dtype) / WIDTH)
        spots = torch.arange(len(x))[:, None] * slow
        seen, same = mask, token_type_ids[:, :, None] == token_type_ids[:, None]
        whole, first = (spots, spots, same, seen), x
        for n in range(5):
            if n in (2, 4):
                keep = torch.tensor([0, *range(1, len(x) - 1, 2)])
                pair = torch.cat([keep[:1], keep[1:] + 1]).clamp(max=len(x) - 2)
                there = torch.cat([spots[:1] - n // 2 * slow, spots[keep[1:]]])
                x = self.layer(n, (x[keep] + x[pair]) / 2, x, there, spots, same[:, keep], seen)
                spots, same, seen = there, same[:, keep][:, :, keep], seen[:, keep] * seen[:, pair]
            else:
                x = self.layer(n, x, x, spots, spots, same, seen)
            first = x if n < 2 else first
        rest = x[1:].repeat_interleave(4, 0)
        if self.fault == "funnel_decoder_tiles_the_states_instead_of_repeating":
            rest = x[1:].repeat(4, 1, 1)
        x = torch.cat([x[:1], rest, torch.zeros_like(rest[:3])])[: len(first)] + first
        return (self.layer(5, x, x, *whole) @ self.end[:-1] + self.end[-1]).transpose(0, 1)


SHARED, ACT = "encoder.attention_structure", "encoder.blocks.1.1.ffn.activation_function"
right(task, "funnel_of_steps_with_distances_looked_up", "a tree, fused, distances in a table", FunnelOfSteps)
right(task, "funnel_of_flat_stacks_time_first", "packed stacks, waves as products, time first", FlatFunnel)
wrong(
    task,
    FunnelOfSteps,
    funnel_padding_left_out_of_the_pooled_means=("a masked mean", SHARED),
    funnel_pooled_queries_stand_on_the_second_of_their_pair=("positions off by one", SHARED),
    funnel_segments_without_gradient=("detach", "encoder.blocks.0.1.attention", "weight gradient"),
    funnel_fourth_layer_gelu_by_the_error_function=("the exact gelu", ACT),
)
wrong(
    task,
    FlatFunnel,
    funnel_embedding_norm_with_a_larger_epsilon=("another eps", "embeddings.layer_norm"),
    funnel_fifth_layer_segment_bias_not_scaled=("a scale left out", "encoder.blocks.2.0.attention"),
    funnel_decoder_tiles_the_states_instead_of_repeating=("tiled, not repeated", "decoder"),
    funnel_decoder_damped_in_evaluation=("a scale in eval", "decoder.layers.0.ffn", "eval"),
)
