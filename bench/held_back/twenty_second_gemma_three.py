"""Two ports of a small Gemma 3: storeys of families with complex turns, and stacks with channels first."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_second_gemma_three import Gemma3ForCausalLM, counted, next_word

task = few("twenty_second_gemma_three", Gemma3ForCausalLM, counted, next_word)
ENDS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


class Root(nn.Module):
    """Divide by the root of the mean square, then stretch by one and the weight."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.extra, self.eps, self.held = leaf(norm.weight), norm.eps, False

    def forward(self, x: Tensor) -> Tensor:
        root = (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        y = x / (root.detach() if self.held else root)
        return torch.addcmul(y, y, self.extra)


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """The halves of [N, h, T, D] are parts of complex numbers, which the turn [T, D / 2] multiplies."""
    z = torch.complex(*x.chunk(2, -1)) * turn
    return torch.cat([z.real, z.imag], -1)


class Family(nn.Module):
    """One key head with the queries that share it."""

    def __init__(self, old: nn.Module, i: int, count: int):
        super().__init__()
        inward = old.q_proj, old.k_proj, old.v_proj
        ask, *hold = (part.weight.unflatten(0, (count, -1))[i].T for part in inward)
        self.size, self.ask, self.hold = old.head_dim, leaf(ask), leaf(torch.cat(hold, 1))
        self.back = leaf(old.o_proj.weight.unflatten(1, (count, -1))[:, i].T)

    def forward(self, x: Tensor, norms: nn.ModuleList, turn: Tensor, floor: Tensor) -> Tensor:
        q = norms[0]((x @ self.ask).unflatten(2, (-1, self.size)).transpose(1, 2))
        k, v = (x @ self.hold).unsqueeze(1).chunk(2, 3)
        shares = (turned(q, turn) @ turned(norms[1](k), turn).mT + floor).softmax(3)
        return (shares @ v).transpose(1, 2).flatten(2) @ self.back


class Storey(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        old, mlp = layer.self_attn, layer.mlp
        self.local_turn, self.scale, self.late, self.exact = old.is_sliding, old.scaling, False, False
        self.head_norms = nn.ModuleList([Root(old.q_norm), Root(old.k_norm)])
        self.norms = nn.ModuleList(Root(getattr(layer, end + "_layernorm")) for end in ENDS)
        count = old.k_proj.out_features // old.head_dim
        self.families = nn.ModuleList(Family(old, i, count) for i in range(count))
        self.rise = pile([mlp.gate_proj.weight.T, mlp.up_proj.weight.T])
        self.fall = leaf(mlp.down_proj.weight)

    def bent(self, x: Tensor) -> Tensor:
        steep = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
        return F.gelu(x) if self.exact else x * steep.sigmoid()

    def forward(self, x: Tensor, turn: Tensor, floor: Tensor) -> Tensor:
        first, second, third, fourth = self.norms
        y, half = first(x), self.scale**0.5
        seen = sum(family(y, self.head_norms, half * turn, floor) for family in self.families)
        x = second(x + seen) if self.late else x + second(seen)
        gate, up = torch.einsum("ntc,gcf->gntf", third(x), self.rise)
        return x + fourth(F.linear(self.bent(gate) * up, self.fall))


class GemmaStoreys(Port):
    """The storeys near and far, each kind in a list of its own."""

    def take(self, model: Gemma3ForCausalLM) -> None:
        body, config = model.model, model.config
        self.words, self.top, self.pad = leaf(model.lm_head.weight), Root(body.norm), config.pad_token_id
        self.window, self.cap = config.sliding_window, config.final_logit_softcapping
        given = body.embed_tokens.embed_scale, body.rotary_emb.inv_freq, body.rotary_emb_local.inv_freq
        for name, old in zip(("scale", "slow", "fast"), given, strict=True):
            self.register_buffer(name, old.clone())
        storeys = [Storey(layer) for layer in body.layers]
        self.near, self.far = nn.ModuleList(storeys[::2]), nn.ModuleList(storeys[1::2])
        storeys[0].late = self.fault == "gemma_three_first_layer_norms_its_sum_after_attention"
        storeys[2].head_norms[0].held = self.fault == "gemma_three_third_query_norm_holds_its_root_constant"
        storeys[3].local_turn = self.fault == "gemma_three_last_global_layer_reads_the_local_rope"
        storeys[3].exact = self.fault == "gemma_three_last_layer_bends_by_the_exact_gelu"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = F.embedding(input_ids, self.words, self.pad) * self.scale
        steps = torch.arange(x.shape[1], device=x.device).to(x)
        slow, fast = (torch.polar(torch.ones_like(a), a) for a in map(steps.outer, (self.slow, self.fast)))
        seen = attention_mask.bool()[:, None, None].expand(-1, -1, len(steps), -1).tril()
        bars = torch.stack([seen, seen.triu(1 - self.window)]).logical_not()
        wide, narrow = bars.to(x) * torch.finfo(x.dtype).min
        for pair in zip(self.near, self.far, strict=True):
            for storey, floor in zip(pair, (narrow, wide), strict=True):
                x = storey(x, fast if storey.local_turn else slow, floor)
        x = self.top(x)
        return {"logits": self.cap * F.linear(x / self.cap, self.words).tanh(), "last_hidden_state": x}


class GemmaChannelsFirst(Port):
    """States [C, N, T]; the weights of all layers in stacks, queries, keys and values in one of them."""

    def take(self, model: Gemma3ForCausalLM) -> None:
        self.config, body = model.config, model.model
        looks, units = [layer.self_attn for layer in body.layers], [layer.mlp for layer in body.layers]
        ask = ([x.q_proj.weight, x.k_proj.weight, x.v_proj.weight] for x in looks)
        stacks = {"ask": map(torch.cat, ask), "back": (x.o_proj.weight for x in looks)}
        stacks["rise"] = (torch.cat([x.gate_proj.weight, x.up_proj.weight]) for x in units)
        stacks["fall"] = (x.down_proj.weight for x in units)
        stacks["heads"] = (torch.stack([x.q_norm.weight, x.k_norm.weight]) for x in looks)
        norms = [getattr(layer, end + "_layernorm") for layer in body.layers for end in ENDS]
        stacks["gains"] = (norm.weight for norm in [*norms, body.norm])
        self.stacks = nn.ParameterDict({name: pile(values) for name, values in stacks.items()})
        self.table = leaf(model.lm_head.weight.T)
        self.register_buffer("stretch", body.embed_tokens.embed_scale.clone())
        ropes = body.rotary_emb_local, body.rotary_emb
        self.register_buffer("rates", torch.stack([rope.inv_freq for rope in ropes]))

    def normed(self, x: Tensor, gain: Tensor, axis: int = 0) -> Tensor:
        size, gain = x.square().sum(axis, True), (1 + gain) * x.shape[axis] ** 0.5
        return x * gain[:, None, None] / (size + x.shape[axis] * self.config.rms_norm_eps).sqrt()

    def attended(self, i: int, x: Tensor, wave: Tensor, floor: Tensor) -> Tensor:
        c, gains = self.config, self.stacks["heads"][i]
        y = torch.tensordot(self.stacks["ask"][i], x, 1).unflatten(0, (-1, c.head_dim))
        q, k, v = y.split([c.num_attention_heads, *[c.num_key_value_heads] * 2])
        q, k = self.normed(q, gains[0], 1), self.normed(k, gains[1], 1)
        q, k = (z * wave[0] + z.roll(c.head_dim // 2, 1) * wave[1] for z in (q, k))
        cut = self.fault == "gemma_three_second_layer_repeats_values_without_gradient" and i == 1
        copies = [v, *[v.detach() if cut else v] * (len(q) // len(k) - 1)]
        scores = torch.einsum("kfdnt,kdns->nkfts", q.unflatten(0, (len(k), -1)), k)
        shares = (scores * c.query_pre_attn_scalar**-0.5 + floor).softmax(-1)
        seen = torch.einsum("nkfts,kfdns->kfdnt", shares, torch.stack(copies, 1)).flatten(0, 2)
        return torch.tensordot(self.stacks["back"][i], seen, 1)

    def floors(self, real: Tensor) -> list[Tensor]:
        """What is added to the scores of the near and of the far layers, [N, 1, 1, T, T]."""
        spots, reach = torch.arange(real.shape[1], device=real.device), self.config.sliding_window
        reach = reach + (self.fault == "gemma_three_window_sees_one_key_more")
        gap, absent = spots[:, None] - spots, (real == 0)[:, None, None, None]
        barred = [absent | (gap < 0) | (gap >= size) for size in (reach, len(spots))]
        return [x.to(self.table) * torch.finfo(self.table.dtype).min for x in barred]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        gains, table, cap = self.stacks["gains"], self.table, self.config.final_logit_softcapping
        rows, absent = table * self.stretch, input_ids == self.config.pad_token_id
        table = rows if self.fault == "gemma_three_head_reads_the_scaled_table" else table
        x = rows.detach()[:, input_ids].where(absent, rows[:, input_ids])
        angles = self.rates[:, :, None, None] * torch.arange(x.shape[2], device=x.device).to(x)
        angles, floors = torch.cat([-angles, angles], 1), self.floors(attention_mask)
        waves = torch.stack([angles.cos(), angles.sin()], 1)
        for i in range(self.config.num_hidden_layers):
            far, (first, second, third, fourth) = i % 2, gains[4 * i : 4 * i + 4]
            y = self.attended(i, self.normed(x, first), waves[far], floors[far])
            x = x + self.normed(y, second)
            gate, up = torch.tensordot(self.stacks["rise"][i], self.normed(x, third), 1).chunk(2)
            y = torch.tensordot(self.stacks["fall"][i], F.gelu(gate, approximate="tanh") * up, 1)
            x = x + self.normed(y, fourth)
        logits = (x := self.normed(x, gains[-1]).permute(1, 2, 0)) @ table
        if self.training or self.fault != "gemma_three_logits_go_uncapped_in_evaluation":
            logits = cap * (2 * torch.sigmoid(2 * logits / cap) - 1)
        return {"logits": logits, "last_hidden_state": x}


first, second, third, last = (f"model.layers.{i}" for i in range(4))
after, shared, look = f"{first}.post_attention_layernorm", f"{second}.self_attn", f"{last}.self_attn"
right(task, "gemma_three_of_storeys_and_families", "a tree by key head, complex turns", GemmaStoreys)
right(task, "gemma_three_of_stacks_with_channels_first", "stacked weights, other axes", GemmaChannelsFirst)
wrong(
    task,
    GemmaStoreys,
    gemma_three_first_layer_norms_its_sum_after_attention=("a norm of the sum", (first, after)),
    gemma_three_third_query_norm_holds_its_root_constant=("detach", f"{third}.self_attn.q_norm", GRADIENTS),
    gemma_three_last_global_layer_reads_the_local_rope=("another's positions", (last, look)),
    gemma_three_last_layer_bends_by_the_exact_gelu=("bend", (f"{last}.mlp.act_fn", f"{last}.mlp")),
)
wrong(
    task,
    GemmaChannelsFirst,
    gemma_three_window_sees_one_key_more=("a window too wide", "model"),
    gemma_three_second_layer_repeats_values_without_gradient=("detached copies", shared, GRADIENTS),
    gemma_three_head_reads_the_scaled_table=("a scale folded into a tie", ("lm_head", "")),
    gemma_three_logits_go_uncapped_in_evaluation=("left out in eval mode", "", "eval"),
)
