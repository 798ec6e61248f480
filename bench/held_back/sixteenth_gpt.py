"""Two ports of a GPT-2 with a cache: layers that take both parts of a text, and stacks used by einsum."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixteenth_gpt import HEADS, LAYERS, PREFIX, WIDTH, GPT2LMHeadModel, next_token, texts
from bench.held_back._sixth_ports import few

task = few("sixteenth_gpt", GPT2LMHeadModel, texts, next_token)

Pair = tuple[Tensor, Tensor]


def dense(conv: nn.Module, part: slice = slice(None)) -> nn.Linear:
    """Those outputs of a layer whose weight has the inputs first."""
    weight, bias = conv.weight[:, part].T, conv.bias[part]
    return filled(nn.Linear(weight.shape[1], weight.shape[0]), weight, bias)


def norm(layer: nn.LayerNorm) -> nn.LayerNorm:
    return filled(nn.LayerNorm(WIDTH, layer.eps), layer.weight, layer.bias)


class Look(nn.Module):
    """Norm and attention; the rest of a text looks at the prefix too."""

    def __init__(self, block: nn.Module):
        super().__init__()
        attn = block.attn
        self.norm, self.out, self.aligned = norm(block.ln_1), dense(attn.c_proj), True
        parts = (slice(i * WIDTH, (i + 1) * WIDTH) for i in range(3))
        self.ask, self.key, self.value = (dense(attn.c_attn, part) for part in parts)
        self.scale = (WIDTH // HEADS) ** -0.5 / (attn.layer_idx + 1)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def look(self, asked: Tensor, keys: Tensor, values: Tensor, absent: Tensor) -> Tensor:
        rows, columns = asked.shape[1], keys.shape[1]
        ahead = torch.ones(rows, columns, dtype=torch.bool, device=keys.device)
        ahead = ahead.triu(1 + (columns - rows if self.aligned else 0))
        mask = absent[:, None, None, :columns].masked_fill(ahead, -math.inf)
        states = (self.heads(x) for x in (asked, keys, values))
        y = F.scaled_dot_product_attention(*states, attn_mask=mask, scale=self.scale)
        return self.out(y.transpose(1, 2).reshape(asked.shape))

    def forward(self, prefix: Tensor, rest: Tensor, absent: Tensor) -> Pair:
        first, second = self.norm(prefix), self.norm(rest)
        held_keys, held_values = self.key(first), self.value(first)
        keys = torch.cat([held_keys, self.key(second)], 1)
        values = torch.cat([held_values, self.value(second)], 1)
        prefix = prefix + self.look(self.ask(first), held_keys, held_values, absent)
        return prefix, rest + self.look(self.ask(second), keys, values, absent)


class Layer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        up, down = dense(block.mlp.c_fc), dense(block.mlp.c_proj)
        self.look = Look(block)
        self.think = nn.Sequential(norm(block.ln_2), up, nn.GELU(approximate="tanh"), down)

    def forward(self, prefix: Tensor, rest: Tensor, absent: Tensor) -> Pair:
        prefix, rest = self.look(prefix, rest, absent)
        return prefix + self.think(prefix), rest + self.think(rest)


class Entry(nn.Module):
    """Tokens and their places; ``by_mask`` if those of the rest are counted by the mask."""

    def __init__(self, tokens: Tensor, places: Tensor):
        super().__init__()
        self.tokens, self.places, self.by_mask = leaf(tokens), leaf(places), True

    def forward(self, ids: Tensor, mask: Tensor) -> Pair:
        places = torch.where(mask > 0, mask.cumsum(1) - 1, 1)
        first, second = places[:, :PREFIX], places[:, PREFIX:]
        if not self.by_mask:
            second = torch.arange(PREFIX, ids.shape[1], device=ids.device).expand_as(second)
        prefix = F.embedding(ids[:, :PREFIX], self.tokens) + F.embedding(first, self.places)
        return prefix, F.embedding(ids[:, PREFIX:], self.tokens) + F.embedding(second, self.places)


class LayerByLayer(Port):
    """Each layer takes the prefix and the rest before the next one does."""

    def take(self, model: GPT2LMHeadModel) -> None:
        body = model.transformer
        self.entry = Entry(body.wte.weight, body.wpe.weight)
        self.layers = nn.ModuleList(Layer(block) for block in body.h)
        self.last, self.head = norm(body.ln_f), self.entry.tokens
        if self.fault == "gpt_last_square_projection_never_transposed":
            self.layers[-1].look.out.weight = leaf(body.h[-1].attn.c_proj.weight)
        if self.fault == "gpt_rest_positions_count_the_padding_before_it":
            self.entry.by_mask = False
        if self.fault == "gpt_first_causal_mask_of_the_rest_aligned_top_left":
            self.layers[0].look.aligned = False
        if self.fault == "gpt_head_keeps_its_own_copy_of_the_token_table":
            self.head = leaf(model.lm_head.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        prefix, rest = self.entry(input_ids, attention_mask)
        absent = (attention_mask - 1).to(prefix.dtype) * torch.finfo(prefix.dtype).max
        for layer in self.layers:
            prefix, rest = layer(prefix, rest, absent)
        return F.linear(self.last(torch.cat([prefix, rest], 1)), self.head)


class StackedEinsum(Port):
    """States [T, N, W]; what is held and what is new are two sums of one softmax."""

    def take(self, model: GPT2LMHeadModel) -> None:
        body, split = model.transformer, (3, HEADS, WIDTH // HEADS)
        attns, mlps = zip(*((block.attn, block.mlp) for block in body.h), strict=True)
        self.table, self.places = leaf(body.wte.weight), leaf(body.wpe.weight.T)
        norms = [*(x for block in body.h for x in (block.ln_1, block.ln_2)), body.ln_f]
        self.gains, self.shifts = pile(x.weight for x in norms), pile(x.bias for x in norms)
        self.w_in = pile(x.c_attn.weight.unflatten(1, split).movedim(0, 2) for x in attns)
        self.b_in = pile(x.c_attn.bias.unflatten(0, split) for x in attns)
        self.w_out = pile(x.c_proj.weight.unflatten(0, split[1:]) for x in attns)
        self.b_out = pile(torch.stack([x.attn.c_proj.bias, x.mlp.c_proj.bias]) for x in body.h)
        self.w_up, self.b_up = pile(x.c_fc.weight for x in mlps), pile(x.c_fc.bias for x in mlps)
        self.w_down = pile(x.c_proj.weight for x in mlps)

    def normed(self, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + 1e-5).rsqrt() * self.gains[i] + self.shifts[i]

    def mixed(self, i: int, x: Tensor, absent: list[Tensor], held: list[Tensor]) -> tuple[Tensor, list]:
        made = torch.einsum("tnw,shwd->sthnd", x, self.w_in[i]) + self.b_in[i][:, None, :, None]
        query, key, value = made[0] * (WIDTH // HEADS) ** -0.5, made[1] / (i + 1), made[2]
        ahead = torch.full((len(x), len(x)), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        parts = [(key, value, absent[-1] + ahead[:, :, None, None])]
        if held:
            twice = self.fault == "gpt_cached_keys_divided_by_their_layer_twice" and i == 1
            parts.append((held[0] / (i + 1) if twice else held[0], held[1], absent[0]))
        scores = [torch.einsum("thnd,shnd->tshn", query, k) + shade for k, _, shade in parts]
        top = torch.cat(scores, 1).detach().amax(1, keepdim=True)
        shares = [(part - top).exp() for part in scores]
        y = sum(torch.einsum("tshn,shnd->thnd", w, v) for w, (_, v, _) in zip(shares, parts, strict=True))
        y = y / torch.cat(shares, 1).sum(1)[..., None]
        return torch.einsum("thnd,hdw->tnw", y, self.w_out[i]) + self.b_out[i, 0], [key, value]

    def fed(self, i: int, x: Tensor) -> Tensor:
        y = torch.einsum("tnw,wu->tnu", x, self.w_up[i]) + self.b_up[i]
        bent = y * (math.sqrt(8 / math.pi) * y * (1 + 0.044715 * y * y)).sigmoid()
        return torch.einsum("tnu,uw->tnw", bent, self.w_down[i]) + self.b_out[i, 1]

    def read(self, x: Tensor, absent: list[Tensor], cache: list) -> tuple[Tensor, list]:
        kept = []
        for i in range(LAYERS):
            y, new = self.mixed(i, self.normed(2 * i, x), absent, cache[i])
            if self.fault == "gpt_cache_of_the_last_layer_without_gradient" and i == LAYERS - 1:
                new = [part.detach() for part in new]
            kept.append(new)
            x = x + y
            y = self.normed(2 * i + 1, x)
            around = y if self.fault == "gpt_first_feed_forward_added_to_its_normed_input" and i == 0 else x
            x = around + self.fed(i, y)
        return self.normed(-1, x), kept

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        there = attention_mask.T > 0
        places = (there.cumsum(0) - 1).where(there, 1)
        x = F.one_hot(input_ids.T, len(self.table)).to(self.table) @ self.table + self.places.T[places]
        absent = torch.zeros_like(x[..., :1]).masked_fill(~there[..., None], torch.finfo(x.dtype).min)
        before, after = absent.transpose(1, 2).split([PREFIX, len(x) - PREFIX])
        prefix, cache = self.read(x[:PREFIX], [before], [[]] * LAYERS)
        if self.fault == "gpt_rest_attends_to_the_padding_in_the_cache":
            before = torch.zeros_like(before)
        rest, _ = self.read(x[PREFIX:], [before, after], cache)
        return torch.einsum("tnw,vw->ntv", torch.cat([prefix, rest]), self.table)


right(task, "gpt_of_layers_that_take_both_parts", "a tree of layers, each with both parts", LayerByLayer)
right(task, "gpt_by_einsum_with_a_softmax_of_two_sums", "flat stacks, time first", StackedEinsum)
wrong(
    task,
    LayerByLayer,
    gpt_last_square_projection_never_transposed=("axes swapped", "transformer.h.2.attn.c_proj"),
    gpt_rest_positions_count_the_padding_before_it=("wrong positions", ("transformer", "transformer.wpe")),
    gpt_first_causal_mask_of_the_rest_aligned_top_left=("a mask misaligned", "transformer.h.0.attn"),
    gpt_head_keeps_its_own_copy_of_the_token_table=(
        "a tied weight untied",
        ("lm_head", "transformer.wte"),
        ("weight gradient", "update"),
    ),
)
wrong(
    task,
    StackedEinsum,
    gpt_cached_keys_divided_by_their_layer_twice=("a scale applied twice", "transformer.h.1.attn"),
    gpt_cache_of_the_last_layer_without_gradient=(
        "a detach too many",
        "transformer.h.2.attn",
        ("input gradient", "weight gradient"),
    ),
    gpt_first_feed_forward_added_to_its_normed_input=("a residual after the norm", "transformer.h.0"),
    gpt_rest_attends_to_the_padding_in_the_cache=("a mask of a part alone", ("transformer", "")),
)
