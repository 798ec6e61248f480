"""Ports of a sparse language model: a tree of halves of blocks, and one module of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _tenth_moe as ref
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._tenth_moe import EXPERTS, HEAD, HEADS, KV_HEADS, LAYERS, THETA, TOP

task = few("tenth_moe", ref.SparseForCausalLM, ref.counting, ref.next_and_balance)


def rooted(x: Tensor, gain: Tensor) -> Tensor:
    return x * gain / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class CausalMix(Port):
    """The first half of a block, with its norm and its residual: one product for q, k and v."""

    def take(self, layer: ref.DecoderLayer) -> None:
        at, self.gain = layer.self_attn, leaf(layer.input_layernorm.weight)
        self.qkv = leaf(torch.cat([at.q_proj.weight, at.k_proj.weight, at.v_proj.weight]))
        self.qkv_b = leaf(torch.cat([at.q_proj.bias, at.k_proj.bias, at.v_proj.bias]))
        self.q_gain, self.k_gain, self.out = (leaf(m.weight) for m in (at.q_norm, at.k_norm, at.o_proj))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [B, H, T, D], the first half of each head with the second, by tables [T, D / 2]."""
        near = self.fault == "first_moe_attention_turns_neighbouring_pairs"
        a, b = (x[..., ::2], x[..., 1::2]) if near else x.chunk(2, -1)
        turned = a * cos - b * sin, b * cos + a * sin
        return torch.stack(turned, -1).flatten(-2) if near else torch.cat(turned, -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows = F.linear(rooted(x, self.gain), self.qkv, self.qkv_b).unflatten(-1, (-1, HEAD))
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], 2)
        whole = self.fault == "second_moe_queries_normed_over_all_heads"
        q = rooted(q.flatten(2), self.q_gain.repeat(HEADS)).view_as(q) if whole else rooted(q, self.q_gain)
        q, k, v = (r.transpose(1, 2) for r in (q, rooted(k, self.k_gain), v))
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        k, v = (r.repeat_interleave(HEADS // KV_HEADS, 1) for r in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.linear(mixed.transpose(1, 2).flatten(2), self.out)


class Gated(Port):
    def take(self, mlp: ref.MLP) -> None:
        self.wide = leaf(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.back = leaf(mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.wide).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.back)


class Mixture(Port):
    """The second half of a block, with its norm and its residual: each expert adds to the tokens it got."""

    def take(self, layer: ref.DecoderLayer) -> None:
        moe, self.gain = layer.mlp, leaf(layer.post_attention_layernorm.weight)
        self.choose, self.always = leaf(moe.gate.weight), None
        self.members = nn.ModuleList(Gated(expert) for expert in moe.experts)
        if moe.shared:
            self.always, self.dim = Gated(moe.shared_expert), leaf(moe.shared_expert_gate.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = rooted(x, self.gain)
        logits = F.linear(h, self.choose)
        shares, chosen = logits.softmax(-1).topk(TOP)
        shares = shares / shares.sum(-1, keepdim=True)
        y = torch.zeros_like(h)
        for i, member in enumerate(self.members):
            hits = chosen == i
            rows = hits.any(-1)
            part = (shares * hits).sum(-1)[rows][:, None] * member(h[rows])
            before = 0 if self.fault == "third_moe_later_expert_overwrites_the_earlier" else y[rows]
            y[rows] = before + part
        if self.always is not None:
            bare = self.fault == "last_moe_shared_expert_is_ungated"
            y = y + self.always(h) * (1 if bare else F.linear(h, self.dim).sigmoid())
        return x + y, logits.detach() if self.fault == "first_moe_logits_detached" else logits


class TreeOfHalves(Port):
    def take(self, model: ref.SparseForCausalLM) -> None:
        body, names = model.model, ("first", "second", "third", "last")
        faults = [self.fault if self.fault.startswith(name) else "" for name in names]
        ends = body.embed_tokens, body.norm, model.lm_head
        self.tokens, self.gain, self.head = (leaf(module.weight) for module in ends)
        self.mixes = nn.ModuleList(map(CausalMix, body.layers, faults))
        self.mixtures = nn.ModuleList(map(Mixture, body.layers, faults))
        self.register_buffer("rates", body.rotary_emb.inv_freq.clone())

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x, routers = F.embedding(input_ids, self.tokens), []
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).to(x), self.rates)
        for mix, mixture in zip(self.mixes, self.mixtures, strict=True):
            x, logits = mixture(mix(x, angles.cos(), angles.sin()))
            routers.append(logits)
        return {"logits": F.linear(rooted(x, self.gain), self.head), "router_logits": torch.stack(routers, 1)}


def woven(rows: Tensor) -> Tensor:
    """The two halves of each head's rows, one row of each in turn."""
    return rows.unflatten(0, (-1, 2, HEAD // 2)).transpose(1, 2).flatten(0, 2)


def trio(mlp: ref.MLP) -> Tensor:
    return torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T])


def fed(x: Tensor, trios: Tensor, shares: Tensor) -> Tensor:
    """All tokens [B, T, C] through all experts [E, 3, F, C], summed by their shares [B, T, E]."""
    gate, up, back = trios.unbind(1)
    inner = F.silu(torch.einsum("btc,efc->btef", x, gate)) * torch.einsum("btc,efc->btef", x, up)
    return torch.einsum("btef,efc,bte->btc", inner, back, shares)


class StackedBlocks(Port):
    """The weights of all blocks stacked, rotation by complex numbers, all experts for all tokens."""

    def take(self, model: ref.SparseForCausalLM) -> None:
        body, layers = model.model, model.model.layers
        ats, moes = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        shared, rates = [moe for moe in moes if moe.shared], body.rotary_emb.inv_freq.clone()
        if self.fault == "moe_rotary_rates_of_half_the_power":
            rates = THETA ** (-torch.arange(HEAD // 2).to(rates) / HEAD)
        self.register_buffer("rates", rates)
        linear = [(at.q_proj, at.k_proj, at.v_proj) for at in ats]
        weights = {
            "tokens": leaf(body.embed_tokens.weight),
            "norm": pile(layer.input_layernorm.weight for layer in layers),
            "norm_2": pile(layer.post_attention_layernorm.weight for layer in layers),
            "qkv": pile(torch.cat([woven(q.weight), woven(k.weight), v.weight]).T for q, k, v in linear),
            "qkv_b": pile(torch.cat([woven(q.bias), woven(k.bias), v.bias]) for q, k, v in linear),
            "sizes": pile(torch.stack([woven(at.q_norm.weight), woven(at.k_norm.weight)]) for at in ats),
            "out": pile(at.o_proj.weight.T for at in ats),
            "route": pile(moe.gate.weight.T for moe in moes),
            "trios": pile(torch.stack([trio(expert) for expert in moe.experts]) for moe in moes),
            "always": pile(trio(moe.shared_expert)[None] for moe in shared),
            "dim": pile(moe.shared_expert_gate.weight.T for moe in shared),
            "last_norm": leaf(body.norm.weight),
            "head": leaf(model.lm_head.weight.T),
        }
        self.w = nn.ParameterDict(weights)

    def attend(self, i: int, x: Tensor, spin: Tensor) -> Tensor:
        rows = (x @ self.w["qkv"][i] + self.w["qkv_b"][i]).unflatten(-1, (-1, HEAD))
        *qk, v = rows.split([HEADS, KV_HEADS, KV_HEADS], 2)
        pairs = (rooted(*both).unflatten(-1, (-1, 2)) for both in zip(qk, self.w["sizes"][i], strict=True))
        q, k = (torch.view_as_real(torch.view_as_complex(pair) * spin).flatten(-2) for pair in pairs)
        scores = torch.einsum("bqgrd,bkgd->bgrqk", q.unflatten(2, (KV_HEADS, -1)), k) / HEAD**0.5
        later = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("bgrqk,bkgd->bqgrd", shares, v).flatten(2) @ self.w["out"][i]

    def experts(self, i: int, x: Tensor, logits: Tensor) -> Tensor:
        top, chosen = logits.topk(TOP)
        shares = top.softmax(-1)
        if self.fault == "second_moe_shares_not_renormalised" and i == 1:
            shares = logits.softmax(-1).gather(-1, chosen)
        y = fed(x, self.w["trios"][i], (F.one_hot(chosen, EXPERTS) * shares[..., None]).sum(-2))
        return y + fed(x, self.w["always"][i // 2], (x @ self.w["dim"][i // 2]).sigmoid()) if i % 2 else y

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        w, x, routers = self.w, self.w["tokens"][input_ids], []
        angles = torch.arange(x.shape[1], device=x.device).to(x)[:, None, None] * self.rates
        spin = torch.polar(torch.ones_like(angles), angles)
        for i in range(LAYERS):
            x = x + self.attend(i, rooted(x, w["norm"][i]), spin)
            h = rooted(x, w["norm_2"][i])
            routers.append(h @ w["route"][i])
            x = x + self.experts(i, h, routers[-1])
        if self.fault == "last_moe_norm_takes_the_mean_away":
            x = x - x.mean(-1, keepdim=True)
        return {"logits": rooted(x, w["last_norm"]) @ w["head"], "router_logits": torch.stack(routers, 1)}


right(task, "moe_as_a_tree_of_halves", "q, k, v in one product, experts by masks", TreeOfHalves)
right(task, "moe_in_stacked_weights", "weights stacked, complex rotation, dense experts", StackedBlocks)
at, moe, back = "model.layers.1.self_attn", "model.layers.3.mlp", ("input gradient", "weight gradient")
wrong(
    task,
    TreeOfHalves,
    first_moe_attention_turns_neighbouring_pairs=("rotary pairs interleaved", "model.layers.0.self_attn"),
    first_moe_logits_detached=("a detach too many", ("model.layers.0.mlp.gate", "model.layers.0.mlp"), back),
    second_moe_queries_normed_over_all_heads=("norm over all heads", (f"{at}.q_norm", at)),
    third_moe_later_expert_overwrites_the_earlier=("assigned instead of added", "model.layers.2.mlp"),
    last_moe_shared_expert_is_ungated=("a gate missing", (f"{moe}.shared_expert_gate", moe)),
)
wrong(
    task,
    StackedBlocks,
    moe_rotary_rates_of_half_the_power=("wrong exponent", "model.rotary_emb"),
    second_moe_shares_not_renormalised=("a renormalisation missing", "model.layers.1.mlp.gate"),
    last_moe_norm_takes_the_mean_away=("mean subtracted", "model.norm"),
)
