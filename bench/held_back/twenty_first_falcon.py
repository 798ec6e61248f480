"""Two ports of Falcon: a tree whose cache keeps unturned keys, and stacks that read both parts at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_first_falcon import FalconForCausalLM, refrains, surprise

task = few("twenty_first_falcon", FalconForCausalLM, refrains, surprise)


class Dense(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.kernel, self.shift = leaf(weight.T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel) + self.shift


class TwinNorm(nn.Module):
    def __init__(self, *norms: nn.LayerNorm):
        super().__init__()
        self.gains, self.offsets = pile(x.weight for x in norms), pile(x.bias for x in norms)

    def forward(self, x: Tensor) -> list[Tensor]:
        even = F.layer_norm(x, x.shape[-1:])
        return [even * gain + offset for gain, offset in zip(self.gains, self.offsets, strict=True)]


class Turns(nn.Module):
    """A mask [N, K] -> the turn of each place as unit numbers [N, 1, 1, K, d / 2]."""

    def __init__(self, rates: Tensor):
        super().__init__()
        self.register_buffer("rates", rates.clone())
        self.slows = False

    def forward(self, real: Tensor) -> Tensor:
        speed = min(1, 8 / real.shape[1]) if self.slows and not self.training else 1
        angles = (real.cumsum(1) - 1)[:, None, None, :, None] * (speed * self.rates)
        return torch.polar(torch.ones_like(angles), angles)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat([pairs.real, pairs.imag], -1)


class GroupedLook(nn.Module):
    """Queries by group [N, G, Q, T, d] look at one key and one value of each group [N, G, K, d]."""

    def __init__(self, old: nn.Module):
        super().__init__()
        groups, fused = old.num_kv_heads, old.query_key_value
        self.shape = groups, old.num_heads // groups, old.head_dim
        split = [x.unflatten(0, (groups, -1, old.head_dim)) for x in (fused.weight, fused.bias)]
        self.ask = Dense(*(x[:, :-2].flatten(0, 2) for x in split))
        self.hold = Dense(*(x[:, -2:].transpose(0, 1).flatten(0, 2) for x in split))
        self.back, self.deals, self.lone = Dense(*old.dense.parameters()), False, False

    def forward(self, x: Tensor, hidden: Tensor, turns: Tensor, kept: Tensor | None) -> tuple[Tensor, ...]:
        groups, queries, size = self.shape
        held = self.hold(x).unflatten(2, (2, groups, size)).permute(2, 0, 3, 1, 4)
        held = held if kept is None else torch.cat([kept, held], 3)
        q = self.ask(x).unflatten(2, (groups, queries, size)).permute(0, 2, 3, 1, 4)
        k, v = held[:, :, :, None]
        if self.deals:
            k, v = held[:, :, torch.arange(groups * queries) % groups].unflatten(2, (groups, queries))
        if self.lone:
            v = torch.cat([v, v.detach().expand(-1, -1, queries - 1, -1, -1)], 2)
        scores = turned(q * size**-0.5, turns[..., -x.shape[1] :, :]) @ turned(k, turns).mT
        scores = scores.masked_fill(hidden[:, None, None], -1e30)
        return self.back((scores.softmax(-1) @ v).permute(0, 3, 1, 2, 4).flatten(2)), held


class Storey(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.norms, self.look = TwinNorm(old.ln_mlp, old.ln_attn), GroupedLook(old.self_attention)
        up, down = old.mlp.dense_h_to_4h.parameters(), old.mlp.dense_4h_to_h.parameters()
        self.wide = nn.Sequential(Dense(*up), nn.GELU(), Dense(*down))

    def forward(self, x: Tensor, *scene: Tensor | None) -> tuple[Tensor, Tensor]:
        for_wide, for_look = self.norms(x)
        seen, held = self.look(for_look, *scene)
        return x + seen + self.wide(for_wide), held


class FalconTower(Port):
    """The first part leaves keys that were not turned yet; all keys turn where they are used."""

    def take(self, model: FalconForCausalLM) -> None:
        body = model.transformer
        self.table, self.turns = leaf(body.word_embeddings.weight), Turns(body.rotary_emb.inv_freq)
        self.storeys, self.top = nn.ModuleList(map(Storey, body.h)), TwinNorm(body.ln_f)
        self.storeys[0].look.deals = self.fault == "falcon_first_layer_deals_queries_to_groups_in_turn"
        self.storeys[2].look.lone = self.fault == "falcon_last_values_learn_from_one_query_of_a_group"
        self.turns.slows = self.fault == "falcon_rotary_slows_beyond_eight_words_in_evaluation"

    def read(self, ids: Tensor, real: Tensor, kept: list[Tensor | None]) -> Tensor:
        total, length = real.shape[1], ids.shape[1]
        corner = 0 if self.fault == "falcon_second_part_masked_from_the_upper_left" else total - length
        later = torch.ones(length, total, device=ids.device).triu(corner + 1).bool()
        hidden, turns, states = later | (real == 0)[:, None], self.turns(real), [self.table[ids]]
        for i, storey in enumerate(self.storeys):
            x, kept[i] = storey(states[-1], hidden, turns, kept[i])
            states.append(x)
        return torch.stack([*states[:-1], *self.top(x)])

    def forward(self, first: Tensor, second: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        kept, length = [None] * len(self.storeys), first.shape[1]
        parts = self.read(first, attention_mask[:, :length], kept), self.read(second, attention_mask, kept)
        states = torch.cat(parts, 2)
        return {"logits": F.linear(states[-1], self.table), "hidden_states": states}


class FalconAtOnce(Port):
    """Weights of all layers in stacks; both parts at once, with a turn for each pair of places."""

    def take(self, model: FalconForCausalLM) -> None:
        body = model.transformer
        self.register_buffer("rates", body.rotary_emb.inv_freq.clone())
        into = [(x.self_attention.query_key_value, x.mlp.dense_h_to_4h) for x in body.h]
        out = [(x.self_attention.dense, x.mlp.dense_4h_to_h) for x in body.h]
        self.groups, self.fused = body.h[0].self_attention.num_kv_heads, into[0][0].out_features
        self.table = leaf(body.word_embeddings.weight)
        self.into = pile(torch.cat([x.weight, y.weight]).T for x, y in into)
        self.into_b = pile(torch.cat([x.bias, y.bias]) for x, y in into)
        self.out = pile(torch.cat([x.weight, y.weight], 1).T for x, y in out)
        self.out_b = pile(torch.stack([x.bias, y.bias]) for x, y in out)
        norms = [*(norm for x in body.h for norm in (x.ln_attn, x.ln_mlp)), body.ln_f]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)

    def normed(self, i: int, x: Tensor) -> Tensor:
        corrected = self.fault == "falcon_last_mlp_norm_corrects_its_variance" and i == 5
        spread, center = torch.var_mean(x, -1, correction=int(corrected), keepdim=True)
        return (x - center) * (spread + 1e-5).rsqrt() * self.norms[i, 0] + self.norms[i, 1]

    def look(self, i: int, x: Tensor, wheel: Tensor, seen: Tensor, blind: Tensor) -> Tensor:
        """The halves of a head are an axis that a turn of two places, of [N, T, K, r, 2, 2], mixes."""
        fused = x @ self.into[i, :, : self.fused] + self.into_b[i, : self.fused]
        fused = fused.unflatten(2, (self.groups, -1, 2, len(self.rates)))
        q, (k, v) = fused[:, :, :, :-2], fused[:, :, :, -2:].unbind(3)
        scores = torch.einsum("ntgqar,nkgbr,ntkrab->ngqtk", q, k, wheel) / (2 * len(self.rates)) ** 0.5
        shares = scores.masked_fill(blind, 0).masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("ngqtk,nkgar->ntgqar", shares, v).flatten(2)

    def forward(self, first: Tensor, second: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        counted = self.fault == "falcon_embedding_gradient_by_word_counts"
        x = F.embedding(torch.cat([first, second], 1), self.table, scale_grad_by_freq=counted)
        places, width = attention_mask.cumsum(1), x.shape[2]
        angles = (places[:, :, None] - places[:, None]).to(x)[..., None] * self.rates
        wheel = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], -1)
        wheel = wheel.unflatten(-1, (2, 2))
        whole = x.new_ones(x.shape[1], x.shape[1]).bool()
        seen = whole.tril() & (attention_mask > 0)[:, None, None, None]
        blind, whole[: first.shape[1], first.shape[1] :] = ~seen.any(-1, keepdim=True), False
        seen, states = torch.where(blind, whole, seen), [x]
        for i in range(len(self.into)):
            mixed, y = self.look(i, self.normed(2 * i, x), wheel, seen, blind), x
            if self.fault == "falcon_middle_layer_runs_its_mlp_after_attention" and i == 1:
                y = x + mixed @ self.out[i, :width] + self.out_b[i, 0]
            y = self.normed(2 * i + 1, y) @ self.into[i, :, self.fused :] + self.into_b[i, self.fused :]
            x = x + torch.cat([mixed, y * torch.special.ndtr(y)], 2) @ self.out[i] + self.out_b[i].sum(0)
            states.append(x)
        states[-1] = x = self.normed(-1, x)
        scale = width**-0.5 if self.fault == "falcon_tied_head_scales_its_states_by_width" else 1
        return {"logits": scale * x @ self.table.T, "hidden_states": torch.stack(states)}


SLOPES = "input gradient", "weight gradient"
first, middle, last = (f"transformer.h.{i}" for i in range(3))
right(task, "falcon_tower_of_unturned_keys", "split projections, complex turns at use", FalconTower)
right(task, "falcon_of_both_parts_at_once", "stacks, no cache, a turn for each pair", FalconAtOnce)
wrong(
    task,
    FalconTower,
    falcon_first_layer_deals_queries_to_groups_in_turn=("grouping", first + ".self_attention"),
    falcon_second_part_masked_from_the_upper_left=("mask behind a cache", "transformer"),
    falcon_last_values_learn_from_one_query_of_a_group=("shared value", last + ".self_attention", SLOPES),
    falcon_rotary_slows_beyond_eight_words_in_evaluation=("other rates", "transformer.rotary_emb", "eval"),
)
wrong(
    task,
    FalconAtOnce,
    falcon_embedding_gradient_by_word_counts=("scaled gradient", "transformer.word_embeddings", SLOPES[1]),
    falcon_middle_layer_runs_its_mlp_after_attention=("one branch after the other", middle),
    falcon_last_mlp_norm_corrects_its_variance=("variance corrected", last + ".ln_mlp"),
    falcon_tied_head_scales_its_states_by_width=("scale of a tied head", ("lm_head", "")),
)
