"""Two ports of a Qwen3 of experts: tokens sorted by expert, and one long row of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._seventeenth_qwen import Qwen3MoeForCausalLM, next_token_loss, packed_texts
from bench.held_back._sixth_ports import few

task = few("seventeenth_qwen", Qwen3MoeForCausalLM, packed_texts, next_token_loss)


def three(mlp: nn.Module) -> list[Tensor]:
    return [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T]


class Even(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.eps = leaf(norm.weight), norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


class Heads(nn.Module):
    """Attention with all projections in one; a place sees what came before it in its text."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        weights = [x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.sizes, self.size = [len(weight) for weight in weights], attention.head_dim
        self.fused, self.joined = leaf(torch.cat(weights).T), leaf(attention.o_proj.weight.T)
        self.queries, self.keys = Even(attention.q_norm), Even(attention.k_norm)
        self.scale, self.turn_first, self.packed = attention.scaling, False, True

    def forward(self, x: Tensor, turns: Tensor, segments: Tensor) -> Tensor:
        def turned(y: Tensor) -> Tensor:
            return torch.einsum("abnotf,nhtbf->nhtaf", turns, y.unflatten(-1, (2, -1))).flatten(3)

        parts = (x @ self.fused).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = turned(self.queries(q)), self.keys(turned(k)) if self.turn_first else turned(self.keys(k))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        texts = segments if self.packed or self.training else segments.clamp(max=1)
        seen = (texts[:, None, :, None] == texts[:, None, None]).tril()
        y = F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale)
        return y.transpose(1, 2).flatten(2) @ self.joined


class Feed(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        gate, up, down = three(mlp)
        self.rise, self.fall = leaf(torch.cat([gate, up]).T), leaf(down)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        gate, values = (x @ self.rise).chunk(2, -1)
        return (F.silu(gate) * values @ self.fall,)


class Dispatch(nn.Module):
    """Tokens sorted by their experts, a piece to each expert, and back; the scores too."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.top, self.router, self.ordered = block.top_k, leaf(block.gate.weight.T), True
        self.feeds = nn.ModuleList(Feed(expert) for expert in block.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        scores = tokens @ self.router
        best, chosen = scores.topk(self.top, -1)
        shares, chosen = best.softmax(-1).flatten(), chosen.flatten()
        order = chosen.argsort(stable=True)
        shares = shares[order] if self.ordered else shares
        owners, counts = order // self.top, chosen.bincount(minlength=len(self.feeds)).tolist()
        pieces = zip(self.feeds, tokens[owners].split(counts), strict=True)
        y = torch.cat([feed(piece)[0] for feed, piece in pieces]) * shares[:, None]
        return torch.zeros_like(tokens).index_add(0, owners, y).view_as(x), scores


class QwenSorted(Port):
    """Weights fused, tokens sorted by expert, the list of attentions beside the list of feeds."""

    def take(self, model: Qwen3MoeForCausalLM) -> None:
        trunk, layers = model.model, model.model.layers
        self.words, self.scorer = leaf(trunk.embed_tokens.weight), leaf(model.lm_head.weight.T)
        norms = [norm for x in layers for norm in (x.input_layernorm, x.post_attention_layernorm)]
        self.norms, self.last = nn.ModuleList(Even(norm) for norm in norms), Even(trunk.norm)
        self.heads = nn.ModuleList(Heads(x.self_attn) for x in layers)
        self.feeds = nn.ModuleList(Dispatch(x.mlp) if x.sparse else Feed(x.mlp) for x in layers)
        self.register_buffer("speeds", trunk.rotary_emb.inv_freq.detach().clone(), persistent=False)
        if self.fault == "qwen_first_attention_scaled_by_width_over_heads":
            self.heads[0].scale = (self.words.shape[1] * self.heads[0].size / self.heads[0].sizes[0]) ** -0.5
        self.heads[1].turn_first = self.fault == "qwen_middle_keys_normed_after_they_are_turned"
        self.heads[2].packed = self.fault != "qwen_last_attention_reads_other_texts_in_evaluation"
        self.feeds[2].ordered = self.fault != "qwen_last_expert_shares_left_in_the_order_of_tokens"

    def turns(self, segments: Tensor) -> Tensor:
        """The matrices [2, 2, N, 1, T, half a head] that turn a head at each place."""
        index = torch.arange(segments.shape[1], device=segments.device)
        fresh = segments.diff(dim=1, prepend=segments[:, :1] - 1) != 0
        angles = (index - torch.where(fresh, index, 0).cummax(1).values)[:, None, :, None] * self.speeds
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([cos, -sin, sin, cos]).unflatten(0, (2, 2))

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        x, turns, scores = F.embedding(input_ids, self.words), self.turns(segment_ids), []
        for i, (heads, feed) in enumerate(zip(self.heads, self.feeds, strict=True)):
            x = x + heads(self.norms[2 * i](x), turns, segment_ids)
            y, *own = feed(self.norms[2 * i + 1](x))
            x, scores = x + y, scores + own
        return {"logits": self.last(x) @ self.scorer, "router_logits": torch.stack(scores)}


class QwenLongRow(Port):
    """All rows as one long row of tokens; the places run on, for only their distances within a text count."""

    def take(self, model: Qwen3MoeForCausalLM) -> None:
        trunk, layers = model.model, model.model.layers
        attentions, blocks = [x.self_attn for x in layers], [x.mlp for x in layers[1:]]
        self.size, self.eps = attentions[0].head_dim, trunk.norm.variance_epsilon
        self.words, self.scorer = leaf(trunk.embed_tokens.weight), leaf(model.lm_head.weight)
        norms = [norm for x in layers for norm in (x.input_layernorm, x.post_attention_layernorm)]
        self.gains = pile(norm.weight for norm in [*norms, trunk.norm])
        self.head_gains = pile(norm.weight for x in attentions for norm in (x.q_norm, x.k_norm))
        self.q = pile(x.q_proj.weight.unflatten(0, (-1, self.size)) for x in attentions)
        self.o = pile(x.o_proj.weight.unflatten(1, (-1, self.size)) for x in attentions)
        pairs = [torch.stack([x.k_proj.weight, x.v_proj.weight]) for x in attentions]
        self.pairs = pile(pair.unflatten(1, (-1, self.size)) for pair in pairs)
        self.dense, self.routers = pile(three(layers[0].mlp)), pile(x.gate.weight for x in blocks)
        self.experts = pile(y for block in blocks for expert in block.experts for y in three(expert))
        self.register_buffer("speeds", trunk.rotary_emb.inv_freq.detach().clone(), persistent=False)

    def even(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * gain / (x.square().sum(-1, keepdim=True) / x.shape[-1] + self.eps).sqrt()

    def turned(self, x: Tensor, gain: Tensor) -> Tensor:
        """Heads [..., T, size] normed, then turned by their places."""
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * self.speeds
        a, b = self.even(x, gain).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(self, i: int, x: Tensor, same: Tensor) -> Tensor:
        q, (k, v) = torch.einsum("tw,hdw->htd", x, self.q[i]), torch.einsum("tw,akdw->aktd", x, self.pairs[i])
        q, k = self.turned(q, self.head_gains[2 * i]), self.turned(k, self.head_gains[2 * i + 1])
        dealt = self.fault == "qwen_first_query_heads_dealt_to_the_key_heads_in_turn" and i == 0
        q = q.unflatten(0, (-1, len(k))).transpose(0, 1) if dealt else q.unflatten(0, (len(k), -1))
        scores = torch.einsum("kgtd,ksd->kgts", q, k) / self.size**0.5
        y = torch.einsum("kgts,ksd->kgtd", scores.where(same, -torch.inf).softmax(-1), v)
        y = (y.transpose(0, 1) if dealt else y).flatten(0, 1)
        return torch.einsum("htd,whd->tw", y, self.o[i])

    def mix(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        held = self.fault == "qwen_first_router_does_not_teach_what_it_reads" and i == 0
        scores = (x.detach() if held else x) @ self.routers[i].T
        shares = scores.softmax(-1)
        kept = shares * (shares >= shares.topk(2, -1).values[:, 1:])
        gate, up, down = self.experts.unflatten(0, (len(self.routers), -1, 3))[i].unbind(1)
        inner = F.silu(torch.einsum("tw,efw->tef", x, gate)) * torch.einsum("tw,efw->tef", x, up)
        y = torch.einsum("tef,efw,te->tw", inner, down, kept / kept.sum(-1, keepdim=True))
        reported = self.fault == "qwen_last_router_scores_reported_as_shares" and i == 1
        return y, shares if reported else scores

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        rows, steps = input_ids.shape
        texts = (segment_ids + (steps + 1) * torch.arange(rows, device=input_ids.device)[:, None]).flatten()
        same = (texts[:, None] == texts).tril()
        x, (gate, up, down), reports = self.words[input_ids.flatten()], self.dense, []
        for i in range(len(self.q)):
            x = x + self.attend(i, self.even(x, self.gains[2 * i]), same)
            y = self.even(x, self.gains[2 * i + 1])
            if i == 0 and self.fault == "qwen_dense_layer_goes_around_from_behind_its_norm":
                x = y
            y, *scores = self.mix(i - 1, y) if i else [F.silu(y @ gate.T) * (y @ up.T) @ down]
            x, reports = x + y, reports + scores
        logits = (self.even(x, self.gains[-1]) @ self.scorer.T).unflatten(0, (rows, steps))
        return {"logits": logits, "router_logits": torch.stack(reports)}


right(task, "qwen_experts_with_fused_weights_and_sorted_tokens", "a tree of other modules", QwenSorted)
right(task, "qwen_experts_on_one_long_row", "stacked weights, all experts for all", QwenLongRow)
LAYER, BACK = "model.layers.", ("input gradient", "weight gradient")
keys, moe, last = f"{LAYER}1.self_attn", f"{LAYER}1.mlp", f"{LAYER}2.mlp"
wrong(
    task,
    QwenSorted,
    qwen_first_attention_scaled_by_width_over_heads=("another scale", LAYER + "0.self_attn"),
    qwen_middle_keys_normed_after_they_are_turned=("order of two steps", (keys, f"{keys}.k_norm")),
    qwen_last_expert_shares_left_in_the_order_of_tokens=("a permutation missing", last),
    qwen_last_attention_reads_other_texts_in_evaluation=("mask dropped", LAYER + "2.self_attn", "eval"),
)
wrong(
    task,
    QwenLongRow,
    qwen_first_query_heads_dealt_to_the_key_heads_in_turn=("other groups", LAYER + "0.self_attn"),
    qwen_dense_layer_goes_around_from_behind_its_norm=("residual from elsewhere", LAYER + "0"),
    qwen_first_router_does_not_teach_what_it_reads=("a detach too many", (f"{moe}.gate", moe), BACK),
    qwen_last_router_scores_reported_as_shares=("output of another kind", (last, f"{last}.gate")),
)
