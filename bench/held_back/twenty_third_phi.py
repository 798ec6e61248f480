"""Two ports of a small Phi: halves of a block fused, with complex turns, and one pass over stacks."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_third_phi import PhiForCausalLM, counted, next_words

task = few("twenty_third_phi", PhiForCausalLM, counted, next_words)


class Fan(nn.Module):
    """Several layers that read the same rows, as one product."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.kernel = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.shift = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> list[Tensor]:
        y = torch.addmm(self.shift, x.flatten(0, 1), self.kernel)
        return list(y.unflatten(0, x.shape[:2]).split(self.sizes, 2))


class Look(nn.Module):
    """Attention of heads [N, H, T, D] without its projections; it gives back what is to be kept."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.size, self.turned, self.late, self.cut = old.head_dim, old.rotary_ndims, False, False
        self.asked, self.held = deepcopy(old.q_layernorm), deepcopy(old.k_layernorm)

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        real, imaginary, still = x.tensor_split([self.turned // 2, self.turned], 3)
        moved = torch.complex(real, imaginary) * turns
        return torch.cat([moved.real, moved.imag, still], 3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, turns: Tensor, seen: Tensor, kept: tuple | None):
        q, k, v = (x.unflatten(2, (-1, self.size)).transpose(1, 2) for x in (q, k, v))
        k = self.held(self.turn(k, turns)) if self.late else self.turn(self.held(k), turns)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1].detach() if self.cut else kept[1], v], 2)
        q = self.turn(self.asked(q), turns)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2), (k, v)


class Twin(nn.Module):
    """A block: one product into both halves, one out; ``serial`` lets the MLP read the attention."""

    def __init__(self, old: nn.Module):
        super().__init__()
        attn, mlp = old.self_attn, old.mlp
        self.norm, self.look, self.serial = deepcopy(old.input_layernorm), Look(attn), False
        self.fan = Fan(attn.q_proj, attn.k_proj, attn.v_proj, mlp.fc1)
        self.join = leaf(torch.cat([attn.dense.weight, mlp.fc2.weight], 1).T)
        self.shifts = pile([attn.dense.bias, mlp.fc2.bias])

    def forward(self, x: Tensor, turns: Tensor, seen: Tensor, kept: tuple | None) -> tuple[Tensor, tuple]:
        *heads, inner = self.fan(self.norm(x))
        mixed, kept = self.look(*heads, turns, seen, kept)
        if self.serial:
            inner = self.fan(self.norm(x + mixed @ self.join[: mixed.shape[2]] + self.shifts[0]))[-1]
        both = torch.cat([mixed, F.gelu(inner, approximate="tanh")], 2)
        return x + both @ self.join + self.shifts.sum(0), kept


class TwinHalves(Port):
    """The prompt, then the rest, through the same blocks; what a block keeps is handed on by the caller."""

    def take(self, model: PhiForCausalLM) -> None:
        body = model.model
        self.words, self.blocks = leaf(body.embed_tokens.weight), nn.ModuleList(map(Twin, body.layers))
        self.register_buffer("rates", body.rotary_emb.inv_freq.clone(), persistent=False)
        self.norm, self.head = deepcopy(body.final_layernorm), Fan(model.lm_head)
        self.blocks[0].look.late = self.fault == "phi_first_layer_norms_its_keys_after_their_turn"
        self.blocks[1].serial = self.fault == "phi_middle_mlp_reads_the_stream_after_its_attention"
        self.blocks[2].look.cut = self.fault == "phi_last_layer_caches_values_without_gradient"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        (count, length), spare = input_ids.shape, continuation.shape[1]
        real, order = F.pad(attention_mask, (0, spare), value=1), torch.arange(length + spare).to(input_ids)
        spots = torch.where(real > 0, real.cumsum(1) - 1, 1)
        if self.fault == "phi_continuation_counts_the_padding_in_its_positions":
            spots = torch.cat([spots[:, :length], order[length:].expand(count, -1)], 1)
        angles = spots[:, None, :, None].to(self.rates) * self.rates
        turns, kept, found = torch.polar(torch.ones_like(angles), angles), [None] * len(self.blocks), []
        for ids, here in ((input_ids, slice(0, length)), (continuation, slice(length, None))):
            seen = (order[: here.stop] <= order[here, None]) & (real[:, None, : here.stop] > 0)
            if self.fault == "phi_continuation_sees_the_padding_in_evaluation" and here.start:
                seen = seen if self.training else (order <= order[here, None]).expand_as(seen)
            seen, x = (seen | ~seen.any(2, True))[:, None], F.embedding(ids, self.words)
            for i, block in enumerate(self.blocks):
                x, kept[i] = block(x, turns[:, :, here], seen, kept[i])
            found += self.head(self.norm(x))
        return dict(zip(("prompt_logits", "logits"), found, strict=True))


def whole(layer: nn.Linear) -> Tensor:
    """A layer's weights, its bias as one more column."""
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


class OnePass(Port):
    """Stacks with biases inside; prompt and rest in one pass, turned channels in pairs of neighbours."""

    def take(self, model: PhiForCausalLM) -> None:
        body, layers, rates = model.model, model.model.layers, model.model.rotary_emb.inv_freq.clone()
        looks, units = [x.self_attn for x in layers], [(x.mlp.fc1, x.mlp.fc2) for x in layers]
        size, self.pairs = looks[0].head_dim, len(rates)
        order = sorted(range(size), key=lambda n: (n >= 2 * self.pairs, n % self.pairs))
        if self.fault == "phi_rates_spread_over_the_whole_head":
            rates = rates ** (2 * self.pairs / size)
        self.register_buffer("rates", rates, persistent=False)
        shape = (-1, looks[0].num_key_value_groups, size)
        self.ask = pile(whole(x.q_proj).unflatten(0, shape)[:, :, order] for x in looks)
        self.keys = pile(whole(x.k_proj).unflatten(0, (-1, size))[:, order] for x in looks)
        self.values = pile(whole(x.v_proj).unflatten(0, (-1, size)) for x in looks)
        self.back, self.head = pile(whole(x.dense).T for x in looks), leaf(whole(model.lm_head))
        self.rise, self.fall = (pile(whole(x).T for x in each) for each in zip(*units, strict=True))
        norms = [norm for x in looks for norm in (x.q_layernorm, x.k_layernorm)]
        self.narrow = pile(torch.stack([norm.weight, norm.bias])[:, order] for norm in norms)
        norms = [*(layer.input_layernorm for layer in layers), body.final_layernorm]
        self.wide, self.eps = pile(torch.stack([norm.weight, norm.bias]) for norm in norms), norms[0].eps
        self.words = leaf(body.embed_tokens.weight.T)

    def normed(self, x: Tensor, by: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * by[0] + by[1]

    def turned(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs, still = x[..., : 2 * self.pairs].unflatten(3, (-1, 2)), x[..., 2 * self.pairs :]
        return torch.cat([torch.einsum("btpij,bthpj->bthpi", turns, pairs).flatten(3), still], 3)

    def attend(self, i: int, x: Tensor, turns: Tensor, seen: Tensor) -> Tensor:
        q = torch.einsum("btc,kgdc->btkgd", x, self.ask[i])
        k, v = (torch.einsum("btc,kdc->btkd", x, held) for held in (self.keys[i], self.values[i]))
        q = self.turned(self.normed(q, self.narrow[2 * i]).flatten(2, 3), turns).view_as(q)
        k = self.turned(self.normed(k, self.narrow[2 * i + 1]), turns)
        if self.fault == "phi_middle_shared_keys_take_the_mean_of_their_gradients" and i == 1:
            k = k.detach() + (k - k.detach()) / q.shape[3]
        scores = torch.einsum("btkgd,bskd->bkgts", q / q.shape[4] ** 0.5, k)
        share = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(4)
        mixed = torch.einsum("bkgts,bskd->btkgd", share, v).flatten(2)
        return F.pad(mixed, (0, 1), value=1) @ self.back[i]

    def unit(self, i: int, x: Tensor) -> Tensor:
        x = x @ self.rise[i]
        y = x * torch.sigmoid((8 / torch.pi) ** 0.5 * x * (1 + 0.044715 * x * x))
        if self.fault == "phi_last_mlp_by_the_exact_gelu" and i == 2:
            y = 0.5 * x * (1 + torch.erf(x / 2**0.5))
        return F.pad(y, (0, 1), value=1) @ self.fall[i]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        ids, length = torch.cat([input_ids, continuation], 1), input_ids.shape[1]
        real = torch.cat([attention_mask, continuation.new_ones(continuation.shape)], 1)
        angles = (real.cumsum(1) - 1).abs()[:, :, None] * self.rates
        cos, sin = angles.cos(), angles.sin()
        turns = torch.stack([cos, -sin, sin, cos], 3).unflatten(3, (2, 2))
        seen = real[:, None].bool() & torch.ones_like(ids[0][:, None] * ids[0]).tril().bool()
        prompt = torch.arange(ids.shape[1], device=ids.device) < length
        seen, x = torch.where(real[:, :, None] > 0, seen, prompt), self.words.T[ids]
        for i in range(len(self.rise)):
            y = F.pad(self.normed(x, self.wide[i]), (0, 1), value=1)
            x = x + self.attend(i, y, turns, seen) + self.unit(i, y)
        logits = F.linear(self.normed(x, self.wide[-1]), self.head[:, :-1], self.head[:, -1])
        return {"prompt_logits": logits[:, :length], "logits": logits[:, length:]}


keys = [(f"model.layers.{i}.self_attn", f"model.layers.{i}.self_attn.k_layernorm") for i in range(2)]
MLP, SLOPES = "model.layers.2.mlp", ("input gradient", "weight gradient")
right(task, "phi_of_twin_halves_in_one_product", "products fused across halves, complex turns", TwinHalves)
right(task, "phi_in_one_pass_over_stacks", "stacked weights, one pass without a cache", OnePass)
wrong(
    task,
    TwinHalves,
    phi_continuation_counts_the_padding_in_its_positions=("positions off", ("", "model.rotary_emb")),
    phi_first_layer_norms_its_keys_after_their_turn=("order of two steps", keys[0]),
    phi_middle_mlp_reads_the_stream_after_its_attention=("in series, not side by side", "model.layers.1"),
    phi_last_layer_caches_values_without_gradient=("detach", "model.layers.2.self_attn", SLOPES),
    phi_continuation_sees_the_padding_in_evaluation=("mask left out in eval", ("model", ""), "eval"),
)
wrong(
    task,
    OnePass,
    phi_rates_spread_over_the_whole_head=("rates of another width", "model.rotary_emb"),
    phi_middle_shared_keys_take_the_mean_of_their_gradients=("scaled gradient", keys[1], SLOPES),
    phi_last_mlp_by_the_exact_gelu=("another activation", (MLP + ".activation_fn", MLP)),
)
