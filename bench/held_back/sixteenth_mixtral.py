"""Two ports of Mixtral: halves of layers that sort tokens by expert, and stacks with windows of keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixteenth_mixtral import END, MixtralForCausalLM, next_token_loss, sentences
from bench.held_back._sixth_ports import few

task = few("sixteenth_mixtral", MixtralForCausalLM, sentences, next_token_loss)


def paired(rows: Tensor, width: int) -> Tensor:
    """Rows of heads whose halves turn together, put so that neighbours do."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


class AttentionHalf(nn.Module):
    """The first half of a layer, its norm and the sum included; one weight for queries, keys and values."""

    def __init__(self, layer: nn.Module, pair_keys: bool = True):
        super().__init__()
        attention, norm = layer.self_attn, layer.input_layernorm
        self.width, self.eps, self.gain = attention.head_dim, norm.variance_epsilon, leaf(norm.weight)
        q, k, v = (getattr(attention, f"{x}_proj").weight for x in "qkv")
        self.counts = [len(x) // self.width for x in (q, k, v)]
        k = paired(k, self.width) if pair_keys else k
        self.wqkv = leaf(torch.cat([paired(q, self.width), k, v]))
        self.wo = leaf(attention.o_proj.weight)

    def turned(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns[:, None]).flatten(-2)

    def forward(self, x: Tensor, turns: Tensor, seen: Tensor) -> Tensor:
        y = F.linear(F.rms_norm(x, self.gain.shape, self.gain, self.eps), self.wqkv)
        q, k, v = y.unflatten(-1, (-1, self.width)).split(self.counts, 2)
        q, k = self.turned(q, turns), self.turned(k, turns)
        k, v = (part.repeat_interleave(q.shape[2] // k.shape[2], 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + F.linear(y.transpose(1, 2).flatten(2), self.wo)


class ExpertHalf(nn.Module):
    """The second half of a layer: copies of tokens sorted by expert, and put back in their places."""

    def __init__(self, moe: nn.Module, norm: nn.Module):
        super().__init__()
        self.taken, self.table, self.eval_capacity = moe.top_k, leaf(moe.gate.weight.T), None
        self.gain, self.eps = leaf(norm.weight), norm.variance_epsilon
        self.w13 = pile(torch.cat([expert.w1.weight, expert.w3.weight]).T for expert in moe.experts)
        self.w2 = pile(expert.w2.weight.T for expert in moe.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = F.rms_norm(x, self.gain.shape, self.gain, self.eps).flatten(0, 1)
        largest, chosen = (logits := tokens @ self.table).topk(self.taken)
        order = chosen.flatten().argsort(stable=True)
        counts, results = chosen.flatten().bincount(minlength=len(self.w2)).tolist(), []
        for i, part in enumerate(tokens[order // self.taken].split(counts)):
            gate, up = (part @ self.w13[i]).chunk(2, -1)
            results.append((F.silu(gate) * up) @ self.w2[i])
        y = torch.cat(results) * largest.softmax(-1).flatten()[order, None]
        if self.eval_capacity and not self.training:
            room = int(self.eval_capacity * len(y) / len(counts))
            y = torch.cat([F.pad(part[:room], (0, 0, 0, len(part[room:]))) for part in y.split(counts)])
        y = torch.zeros_like(y).index_copy(0, order, y)
        return x + y.unflatten(0, chosen.shape).sum(1).view_as(x), logits


def balance(layers: list[Tensor], taken: int, real: Tensor) -> Tensor:
    """Counts and probabilities of each expert, summed layer by layer."""
    used = mean = 0
    for logits in layers:
        kept = logits[real.flatten()]
        used = used + kept.topk(taken).indices.flatten().bincount(minlength=kept.shape[1])
        mean = mean + kept.softmax(-1).sum(0)
    return len(used) * torch.dot(used.to(mean), mean) / (len(layers) * real.sum()) ** 2


class SortedTokens(Port):
    """Half layers one after the other."""

    def take(self, model: MixtralForCausalLM) -> None:
        trunk, self.window = model.model, model.model.window
        self.pad = END if self.fault == "mixtral_end_token_row_frozen_as_padding" else None
        self.words, self.head = leaf(trunk.embed_tokens.weight), leaf(model.lm_head.weight.T)
        self.gain, self.eps, self.halves = leaf(trunk.norm.weight), model.config.rms_norm_eps, nn.ModuleList()
        self.register_buffer("rates", trunk.rotary_emb.inv_freq.clone())
        for i, layer in enumerate(trunk.layers):
            halved = self.fault == "mixtral_middle_key_rows_not_put_in_pairs" and i == 1
            other = self.fault == "mixtral_last_expert_norm_loaded_from_the_other_norm" and i == 2
            norm = layer.input_layernorm if other else layer.post_attention_layernorm
            self.halves += [AttentionHalf(layer, not halved), ExpertHalf(layer.block_sparse_moe, norm)]
        if self.fault == "mixtral_first_experts_have_a_capacity_in_evaluation":
            self.halves[1].eval_capacity = 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        real, length = attention_mask.bool(), input_ids.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
        seen = past.triu(1 - self.window) & real[:, None, None]
        angles = torch.outer(torch.arange(length).to(self.rates), self.rates)
        turns = torch.polar(torch.ones_like(angles), angles)
        x, logits = F.embedding(input_ids, self.words, self.pad), []
        for attend, experts in zip(self.halves[::2], self.halves[1::2], strict=True):
            x, scores = experts(attend(x, turns, seen))
            logits.append(scores)
        scores = F.rms_norm(x, self.gain.shape, self.gain, self.eps) @ self.head
        return {"logits": scores, "aux_loss": balance(logits, self.halves[1].taken, real)}


class StackedMixtral(Port):
    """All layers in stacks: each query with the window of its keys, each token with all experts."""

    def take(self, model: MixtralForCausalLM) -> None:
        trunk, c = model.model, model.config
        layers, self.eps, self.taken = trunk.layers, c.rms_norm_eps, c.num_experts_per_tok
        wide = self.fault == "mixtral_first_window_sees_one_key_too_many"
        self.windows = [c.sliding_window + (wide and i == 0) for i in range(len(layers))]
        self.groups, self.width = c.num_key_value_heads, c.head_dim
        self.ends = pile([trunk.embed_tokens.weight, model.lm_head.weight])
        norms = [x for y in layers for x in (y.input_layernorm, y.post_attention_layernorm)]
        self.gains = pile(norm.weight for norm in (*norms, trunk.norm))
        self.q = pile(layer.self_attn.q_proj.weight.T for layer in layers)
        self.kv = pile(torch.stack([x.self_attn.k_proj.weight, x.self_attn.v_proj.weight]) for x in layers)
        self.o = pile(layer.self_attn.o_proj.weight.T for layer in layers)
        moes = [layer.block_sparse_moe for layer in layers]
        self.gates = pile(moe.gate.weight for moe in moes)
        self.w1, self.w2, self.w3 = (
            pile(torch.stack([getattr(expert, w).weight for expert in moe.experts]) for moe in moes)
            for w in ("w1", "w2", "w3")
        )
        self.register_buffer("inv_freq", trunk.rotary_emb.inv_freq.clone())

    def normed(self, i: int, x: Tensor) -> Tensor:
        return x * self.gains[i] / (torch.linalg.vecdot(x, x)[..., None] / x.shape[-1] + self.eps).sqrt()

    def attended(self, i: int, x: Tensor, turn: Tensor, real: Tensor) -> Tensor:
        k, v = torch.einsum("ntc,aoc->anto", x, self.kv[i]).unflatten(-1, (self.groups, self.width))
        q = (x @ self.q[i]).unflatten(-1, (self.groups, -1, self.width))
        tiled = self.fault == "mixtral_last_query_heads_share_keys_by_turns" and i == 2
        if tiled:
            q = q.flatten(2, 3).unflatten(2, (-1, self.groups)).transpose(2, 3)
        q = torch.einsum("tabj,ntgrbj->ntgraj", turn, q.unflatten(-1, (2, -1))).flatten(-2)
        k = torch.einsum("tabj,ntgbj->ntgaj", turn, k.unflatten(-1, (2, -1))).flatten(-2)
        size = self.windows[i]
        k, v = (F.pad(y, (0, 0, 0, 0, size - 1, 0)).unfold(1, size, 1) for y in (k, v))
        hidden = ~F.pad(real, (size - 1, 0)).unfold(1, size, 1)[:, :, None, None]
        scores = torch.einsum("ntgrd,ntgdw->ntgrw", q, k) / self.width**0.5
        y = torch.einsum("ntgrw,ntgdw->ntgrd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return (y.transpose(2, 3) if tiled else y).flatten(2) @ self.o[i]

    def mixed(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares = torch.einsum("ntc,ec->nte", x, self.gates[i]).softmax(-1)
        chosen = torch.zeros_like(shares).scatter(-1, shares.topk(self.taken).indices, 1.0)
        weights = shares * chosen
        if not (self.fault == "mixtral_middle_shares_of_two_not_renormalised" and i == 1):
            weights = weights / weights.sum(-1, keepdim=True)
        gate, up = (torch.einsum("ntc,efc->ntef", x, w[i]) for w in (self.w1, self.w3))
        inner = gate * gate.sigmoid() * up * weights[..., None]
        return torch.einsum("ntef,ecf->ntc", inner, self.w2[i]), shares, chosen

    def balance(self, shares: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
        used, mean = (torch.einsum("lnte,nt->le", y, real) / real.sum() for y in (chosen, shares))
        if self.fault == "mixtral_balance_averaged_over_layers_after_the_product":
            return used.shape[1] * (used * mean).sum(1).mean()
        return used.shape[1] * (used.mean(0) * mean.mean(0)).sum()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x, real = F.one_hot(input_ids, self.ends.shape[1]).to(self.ends) @ self.ends[0], attention_mask > 0
        angles = torch.arange(x.shape[1]).to(self.inv_freq)[:, None] * self.inv_freq
        turn = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], 1).unflatten(1, (2, 2))
        seen = []
        for i in range(len(self.q)):
            x = x + self.attended(i, self.normed(2 * i, x), turn, real)
            y, *routed = self.mixed(i, self.normed(2 * i + 1, x))
            x = x + y
            seen.append(routed)
        shares, chosen = map(torch.stack, zip(*seen, strict=True))
        loss = self.balance(shares, chosen, real.to(x))
        return {"logits": self.normed(-1, x) @ self.ends[1].T, "aux_loss": loss}


at = "model.layers.{}.{}".format
attend, experts, norm = at(1, "self_attn"), at(0, "block_sparse_moe"), at(2, "post_attention_layernorm")
right(task, "mixtral_of_halves_sorting_tokens", "a tree of halves, tokens sorted by expert", SortedTokens)
right(task, "mixtral_in_stacks_with_key_windows", "stacked weights, windows, all experts", StackedMixtral)
wrong(
    task,
    SortedTokens,
    mixtral_middle_key_rows_not_put_in_pairs=("rows in another layout", (attend, attend + ".k_proj")),
    mixtral_last_expert_norm_loaded_from_the_other_norm=("a neighbour's weight", norm),
    mixtral_first_experts_have_a_capacity_in_evaluation=("tokens dropped", experts, "eval"),
    mixtral_end_token_row_frozen_as_padding=("a frozen row", "model.embed_tokens", "weight gradient"),
)
wrong(
    task,
    StackedMixtral,
    mixtral_first_window_sees_one_key_too_many=("a window off by one", at(0, "self_attn")),
    mixtral_last_query_heads_share_keys_by_turns=("heads grouped otherwise", at(2, "self_attn")),
    mixtral_middle_shares_of_two_not_renormalised=("a division missing", at(1, "block_sparse_moe")),
    mixtral_balance_averaged_over_layers_after_the_product=("mean of products", ""),
)
