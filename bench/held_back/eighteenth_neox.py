"""Two ports of a GPT-NeoX: one pass over prompt and rest without a cache, and stacks that cache keys."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighteenth_neox import GPTNeoXForCausalLM, continued_texts, next_token_loss
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("eighteenth_neox", GPTNeoXForCausalLM, continued_texts, next_token_loss)

HEADS, SIZE, TURNED, EPS = 3, 8, 4, 1e-5


def plain(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


class Angles(nn.Module):
    """The mask -> factors [N, 1, T, size] of a head and of its mate; those of what stays are one and zero."""

    def __init__(self, speeds: Tensor):
        super().__init__()
        self.register_buffer("speeds", speeds.clone(), persistent=False)

    def forward(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.where(mask > 0, mask.cumsum(1) - 1, 1)
        angles = (places.unsqueeze(-1) * self.speeds)[:, None]
        cos, sin = angles.cos(), angles.sin()
        own, other = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return F.pad(own, (0, SIZE - TURNED), value=1.0), F.pad(other, (0, SIZE - TURNED))


class Look(nn.Module):
    """Attention on plain states; the gain and shift of its norm are its own."""

    def __init__(self, norm: nn.Module, attention: nn.Module):
        super().__init__()
        self.gain, self.shift = map(leaf, norm.parameters())
        self.out, self.out_b = map(leaf, attention.dense.parameters())
        rows = (
            x.unflatten(0, (HEADS, 3, SIZE)).transpose(0, 1) for x in attention.query_key_value.parameters()
        )
        self.into, self.into_b = (leaf(x.flatten(0, 2)) for x in rows)
        self.mates = [2, 3, 0, 1, *range(TURNED, SIZE)]

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        made = F.linear(torch.addcmul(self.shift, x, self.gain), self.into, self.into_b)
        q, k, v = made.unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        q, k = (torch.addcmul(y * angles[0], y[..., self.mates], angles[1]) for y in (q, k))
        y = (q @ k.mT * SIZE**-0.5 + bias).softmax(-1) @ v
        return F.linear(y.transpose(1, 2).flatten(2), self.out, self.out_b)


class Think(nn.Module):
    """The MLP on plain states with its norm's gain and shift; in evaluation some places at a time."""

    def __init__(self, norm: nn.Module, mlp: nn.Module, piece: int = 5):
        super().__init__()
        self.gain, self.shift = map(leaf, norm.parameters())
        self.up, self.up_b = map(leaf, mlp.dense_h_to_4h.parameters())
        self.down, self.down_b = map(leaf, mlp.dense_4h_to_h.parameters())
        self.piece, self.whole_only = piece, False

    def through(self, x: Tensor) -> Tensor:
        x = torch.addcmul(self.shift, x, self.gain)
        return F.linear(F.gelu(F.linear(x, self.up, self.up_b)), self.down, self.down_b)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1] if self.training else self.piece
        count = x.shape[1] // size if self.whole_only else None
        y = torch.cat([self.through(part) for part in x.split(size, 1)[:count]], 1)
        return F.pad(y, (0, 0, 0, x.shape[1] - y.shape[1]))


class Pair(nn.Module):
    """Attention and MLP on the same plain states; ``in_turn`` if the second waits for the first."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.look = Look(block.input_layernorm, block.attention)
        self.think, self.in_turn = Think(block.post_attention_layernorm, block.mlp), False

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        y = x + self.look(plain(x), angles, bias)
        return y + self.think(plain(y if self.in_turn else x))


class NeoxInOnePass(Port):
    """Prompt and rest as one text; the mask keeps all of the rest from the prompt."""

    def take(self, model: GPTNeoXForCausalLM) -> None:
        body = model.gpt_neox
        self.words, self.scorer = leaf(body.embed_in.weight), leaf(model.embed_out.weight)
        self.pairs = nn.ModuleList(Pair(block) for block in body.layers)
        self.gain, self.shift = map(leaf, body.final_layer_norm.parameters())
        self.angles, look = Angles(body.rotary_emb.inv_freq), self.pairs[2].look
        if self.fault == "neox_last_fused_rows_cut_into_thirds":
            look.into, look.into_b = map(leaf, body.layers[2].attention.query_key_value.parameters())
        if self.fault == "neox_frequencies_spread_over_the_whole_head":
            self.angles.speeds = 10000.0 ** -(torch.arange(0, TURNED, 2).to(self.angles.speeds) / SIZE)
        self.pairs[1].in_turn = self.fault == "neox_middle_block_runs_its_mlp_after_attention"
        self.pairs[2].think.whole_only = self.fault == "neox_last_mlp_in_evaluation_drops_the_tail"

    def forward(self, prompt_ids: Tensor, following_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        ids, start = torch.cat([prompt_ids, following_ids], 1), prompt_ids.shape[1]
        states, x, angles = [], F.embedding(ids, self.words), self.angles(attention_mask)
        seen = (attention_mask > 0)[:, None].expand(-1, ids.shape[1], -1).tril()[:, None]
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        bias[:, :, :start, start:] = -math.inf
        for pair in self.pairs:
            states, x = [*states, x], pair(x, angles, bias)
        x = torch.addcmul(self.shift, plain(x), self.gain)
        first, second = (x @ self.scorer.T).tensor_split([start], 1)
        states = torch.stack([*states, x])[:, :, start:]
        return {"prompt_logits": first, "logits": second, "hidden_states": states}


class NeoxStacks(Port):
    """Stacked weights; the cache holds keys as projected, and every call turns all of them."""

    def take(self, model: GPTNeoXForCausalLM) -> None:
        body, layers = model.gpt_neox, model.gpt_neox.layers
        self.tables = pile([body.embed_in.weight, model.embed_out.weight])
        norms = [norm for x in layers for norm in (x.input_layernorm, x.post_attention_layernorm)]
        self.norms = pile(torch.stack([*x.parameters()]) for x in [*norms, body.final_layer_norm])
        self.w_in = pile(x.attention.query_key_value.weight.unflatten(0, (HEADS, 3, SIZE)) for x in layers)
        self.b_in = pile(x.attention.query_key_value.bias.view(HEADS, 3, 1, 1, SIZE) for x in layers)
        self.w_up = pile(x.mlp.dense_h_to_4h.weight for x in layers)
        self.b_up = pile(x.mlp.dense_h_to_4h.bias for x in layers)
        ends = [(x.attention.dense, x.mlp.dense_4h_to_h) for x in layers]
        self.w_out = pile(torch.cat([x.weight, y.weight], 1).T for x, y in ends)
        self.b_out = pile(torch.stack([x.bias, y.bias]) for x, y in ends)
        self.register_buffer("speeds", body.rotary_emb.inv_freq.clone(), persistent=False)

    def normed(self, i: int, x: Tensor) -> Tensor:
        away, (gain, shift) = x - x.mean(-1, keepdim=True), self.norms[i]
        return away / (away.square().mean(-1, keepdim=True) + EPS).sqrt() * gain + shift

    def turned(self, i: int, x: Tensor, places: Tensor) -> Tensor:
        adjacent = self.fault == "neox_first_heads_turned_in_adjacent_pairs" and i == 0
        shape, axis = ((-1, 2), -1) if adjacent else ((2, -1), -2)
        angles = torch.einsum("nt,f->ntf", places.to(self.speeds), self.speeds)
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :TURNED].unflatten(-1, shape).unbind(axis)
        front = torch.stack([a * cos - b * sin, b * cos + a * sin], axis).flatten(-2)
        return torch.cat([front, x[..., TURNED:]], -1)

    def mixed(self, i: int, x: Tensor, mask: Tensor, held: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        query, *new = (torch.einsum("ntw,hpdw->hpntd", x, self.w_in[i]) + self.b_in[i]).unbind(1)
        key, value = (torch.cat(part, 2) for part in zip(held, new, strict=True)) if held else new
        index, start = torch.arange(mask.shape[1], device=x.device), mask.shape[1] - x.shape[1]
        places = (mask.cumsum(1) - 1).where(mask > 0, 1)
        query = self.turned(i, query, places[:, start:])
        if self.fault == "neox_last_cached_keys_turned_as_if_unpadded" and i == 2:
            places = torch.where(index < start, index, places)
        spun = self.turned(i, key, places)
        if self.fault == "neox_middle_keys_turned_behind_autograd" and i == 1:
            spun = key + (spun - key).detach()
        hidden = (index > index[start:, None]) | (mask == 0)[:, None]
        scores = torch.einsum("hntd,hnsd->hnts", query / math.sqrt(SIZE), spun)
        shares = (scores + torch.finfo(x.dtype).min * hidden.to(x)).softmax(-1)
        return torch.einsum("hnts,hnsd->nthd", shares, value).flatten(2), [key, value]

    def read(self, ids: Tensor, mask: Tensor, cache: list) -> tuple[Tensor, Tensor, list]:
        x, states, kept = self.tables[0][ids], [], []
        for i in range(len(self.w_in)):
            y, new = self.mixed(i, self.normed(2 * i, x), mask, cache[i])
            states, kept = [*states, x], [*kept, new]
            inner = self.normed(2 * i + 1, x) @ self.w_up[i].T + self.b_up[i]
            bent = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
            x = x + torch.cat([y, bent], -1) @ self.w_out[i] + self.b_out[i].sum(0)
        last = self.normed(-1, x)
        raw = self.fault == "neox_last_state_reported_before_the_final_norm"
        return last @ self.tables[1].T, torch.stack([*states, x if raw else last]), kept

    def forward(self, prompt_ids: Tensor, following_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        first, _, cache = self.read(prompt_ids, attention_mask[:, : prompt_ids.shape[1]], [[], [], []])
        second, states, _ = self.read(following_ids, attention_mask, cache)
        return {"prompt_logits": first, "logits": second, "hidden_states": states}


right(task, "neox_in_one_pass_over_prompt_and_rest", "a tree of pairs, no cache", NeoxInOnePass)
right(task, "neox_in_stacks_with_plain_keys_cached", "stacked weights, keys turned late", NeoxStacks)
look, back = "gpt_neox.layers.{}.attention".format, ("input gradient", "weight gradient")
wrong(
    task,
    NeoxInOnePass,
    neox_last_fused_rows_cut_into_thirds=("another layout", (look(2) + ".query_key_value", look(2))),
    neox_frequencies_spread_over_the_whole_head=("other frequencies", "gpt_neox.rotary_emb"),
    neox_middle_block_runs_its_mlp_after_attention=("in series, not parallel", "gpt_neox.layers.1"),
    neox_last_mlp_in_evaluation_drops_the_tail=("a remainder lost", "gpt_neox.layers.2.mlp", "eval"),
)
wrong(
    task,
    NeoxStacks,
    neox_first_heads_turned_in_adjacent_pairs=("other pairs", look(0)),
    neox_last_cached_keys_turned_as_if_unpadded=("old places of a cache", look(2)),
    neox_middle_keys_turned_behind_autograd=("a detach too many", look(1), back),
    neox_last_state_reported_before_the_final_norm=("another output", "gpt_neox"),
)
