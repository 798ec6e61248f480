"""Ports of a language model with latent attention: a tree of blocks, and few flat weights with absorption."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eleventh_latent_attention import DeepseekForCausalLM, counting, next_token
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("eleventh_latent_attention", DeepseekForCausalLM, counting, next_token)


def dense(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    return filled(nn.Linear(*weight.T.shape, bias is not None), weight, bias)


def rms(old: nn.Module) -> nn.RMSNorm:
    return filled(nn.RMSNorm(len(old.weight), old.variance_epsilon), old.weight)


def turned(x: Tensor, base: float, halves: bool = False) -> Tensor:
    """[..., T, R] with its pairs turned by their positions: pairs of neighbours, or ``halves`` apart."""
    powers = torch.arange(0, 1, 2 / x.shape[-1], dtype=x.dtype, device=x.device)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype, device=x.device), base**-powers)
    a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
    pair = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)


class Attend(nn.Module):
    def __init__(self, old: nn.Module, config: object, place: int, fault: str):
        super().__init__()
        self.place, self.fault, self.c = place, fault, config
        q, kv, q_bias = old.q_a_proj, old.kv_a_proj_with_mqa, old.q_a_proj.bias
        if self.fault == "latent_query_bias_left_out_at_first" and place == 0:
            q_bias = torch.zeros_like(q_bias)
        self.squeeze = dense(torch.cat([q.weight, kv.weight]), torch.cat([q_bias, kv.bias]))
        self.q_norm, self.kv_norm = rms(old.q_a_layernorm), rms(old.kv_a_layernorm)
        k, v = old.kv_b_proj.weight.unflatten(0, (old.num_heads, -1)).tensor_split([old.qk_nope_head_dim], 1)
        self.q, self.k, self.v = dense(old.q_b_proj.weight), dense(k.flatten(0, 1)), dense(v.flatten(0, 1))
        self.out = dense(old.o_proj.weight, old.o_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        c, plain, rank = self.c, self.c.qk_nope_head_dim, self.c.kv_lora_rank
        q, kv = self.squeeze(x).tensor_split([c.q_lora_rank], -1)
        latent, tied = kv.tensor_split([rank], -1)
        if self.fault == "latent_normed_with_the_rotary_key" and self.place == 3:
            latent = self.kv_norm.weight * F.rms_norm(kv, kv.shape[-1:], eps=c.rms_norm_eps)[..., :rank]
        else:
            latent = self.kv_norm(latent)
        products = self.q(self.q_norm(q)), self.k(latent), self.v(latent)
        q, k, v = (y.unflatten(-1, (c.num_attention_heads, -1)).transpose(1, 2) for y in products)
        halves = self.fault == "latent_rotation_by_halves_in_the_second" and self.place == 1
        tied = turned(tied, c.rope_theta, halves)[:, None].expand(-1, c.num_attention_heads, -1, -1)
        q = torch.cat([q[..., :plain], turned(q[..., plain:], c.rope_theta, halves)], -1)
        mixed = F.scaled_dot_product_attention(q, torch.cat([k, tied], -1), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Swiglu(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.wide = dense(torch.cat([old.gate_proj.weight, old.up_proj.weight]))
        self.narrow = dense(old.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wide(x).chunk(2, -1)
        return self.narrow(F.silu(gate) * up)


class Mixture(nn.Module):
    def __init__(self, old: nn.Module, config: object, place: int, fault: str):
        super().__init__()
        self.place, self.fault, self.c = place, fault, config
        self.router, self.always = dense(old.gate.weight), Swiglu(old.shared_experts)
        self.register_buffer("lean", old.gate.e_score_correction_bias.clone())
        self.experts = nn.ModuleList(map(Swiglu, old.experts))

    def forward(self, x: Tensor) -> Tensor:
        c, rows = self.c, x.reshape(-1, x.shape[-1])
        scores = self.router(rows).sigmoid()
        ranked = scores + self.lean
        groups = ranked.view(len(rows), c.n_group, -1).topk(2).values.sum(2).topk(c.topk_group).indices
        shut = F.one_hot(groups, c.n_group).sum(1).repeat_interleave(len(self.lean) // c.n_group, 1) == 0
        chosen = ranked.masked_fill(shut, -torch.inf).topk(c.num_experts_per_tok).indices
        if self.fault == "latent_experts_weighed_with_their_bias" and self.place == 2:
            scores = ranked
        weights = c.routed_scaling_factor * F.normalize(scores.gather(1, chosen), p=1, dim=1)
        load = torch.bincount(chosen.flatten(), minlength=c.n_routed_experts)
        if self.training:
            self.lean.sub_((load - load.to(x.dtype).mean()).sign(), alpha=c.bias_update_speed)
        order = chosen.flatten().argsort(stable=True)
        stretches = rows[order // c.num_experts_per_tok].split(load.tolist())
        out = torch.cat([expert(y) for expert, y in zip(self.experts, stretches, strict=True)])
        return (weights[:, None] @ out[order.argsort()].view(*chosen.shape, -1)).view_as(x) + self.always(x)


class Blocks(Port):
    def take(self, model: DeepseekForCausalLM) -> None:
        self.tokens = filled(nn.Embedding(*model.lm_head.weight.shape), model.model.embed_tokens.weight)
        self.blocks, c = nn.ModuleList(), model.config
        for i, old in enumerate(model.model.layers):
            feed = Mixture(old.mlp, c, i, self.fault) if i else Swiglu(old.mlp)
            attend = Attend(old.self_attn, c, i, self.fault)
            self.blocks.append(nn.Sequential(rms(old.input_layernorm), attend))
            self.blocks.append(nn.Sequential(rms(old.post_attention_layernorm), feed))
        self.norm, self.scores = rms(model.model.norm), dense(model.lm_head.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = x + block(x)
        if self.fault == "latent_final_norm_centred":
            x = x - x.mean(-1, keepdim=True)
        return self.scores(self.norm(x))


class Absorbing(Port):
    """All experts on all rows; values mixed as latents; in eval mode the keys stay latents as well."""

    def take(self, model: DeepseekForCausalLM) -> None:
        names = "q_down q_bias q_norm q_up kv_down kv_bias kv_norm kv_up out out_bias gate up down pre post"
        self.c, self.w, moe = model.config, nn.ModuleList(), [x.mlp for x in model.model.layers[1:]]
        for x in model.model.layers:
            plain = [p for n, p in x.named_parameters() if not n.startswith(("mlp.experts.", "mlp.gate."))]
            self.w.append(nn.ParameterDict(dict(zip(names.split(), map(leaf, plain), strict=True))))
        experts = [map(torch.stack, zip(*(e.parameters() for e in m.experts), strict=True)) for m in moe]
        self.gates, self.ups, self.downs = map(pile, zip(*experts, strict=True))
        self.routes, self.head = pile(m.gate.weight.T for m in moe), leaf(model.lm_head.weight.T)
        self.register_buffer("lean", torch.stack([m.gate.e_score_correction_bias for m in moe]))
        self.tokens, self.last = leaf(model.model.embed_tokens.weight), leaf(model.model.norm.weight)

    def rms(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.c.rms_norm_eps)

    def attend(self, i: int, x: Tensor) -> Tensor:
        c, w, base = self.c, self.w[i], self.c.rope_theta
        q_up, kv_up = (w[name].unflatten(0, (c.num_attention_heads, -1)) for name in ("q_up", "kv_up"))
        k_up, v_up = kv_up.tensor_split([c.qk_nope_head_dim], 1)
        q = self.rms(F.linear(x, w["q_down"], w["q_bias"]), w["q_norm"])[:, None] @ q_up.mT
        q, turning = q.tensor_split([c.qk_nope_head_dim], -1)
        latent, tied = F.linear(x, w["kv_down"], w["kv_bias"])[:, None].tensor_split([c.kv_lora_rank], -1)
        latent, turns = self.rms(latent, w["kv_norm"]), turned(turning, base) @ turned(tied, base).mT
        later, width = torch.ones_like(turns[0, 0], dtype=torch.bool).triu(1), q_up.shape[1]
        if self.training:
            scores = q @ (latent @ k_up.mT).mT
        else:
            scores = q @ k_up @ latent.mT
            if self.fault == "latent_absorbed_scores_scaled_by_the_rank" and i == 2:
                width = c.kv_lora_rank + c.qk_rope_head_dim
        shares = ((scores + turns) / width**0.5).masked_fill(later, -torch.inf).softmax(-1)
        return F.linear((shares @ latent @ v_up.mT).transpose(1, 2).flatten(2), w["out"], w["out_bias"])

    def shares(self, m: int, x: Tensor) -> Tensor:
        c, scores = self.c, (x @ self.routes[m]).sigmoid()
        groups = (scores + self.lean[m]).unflatten(-1, (c.n_group, -1))
        best_only = self.fault == "latent_groups_ranked_by_their_best_expert" and m == 0
        strength = groups.topk(1 if best_only else 2).values.sum(-1)
        shut = torch.ones_like(strength).scatter(-1, strength.topk(c.topk_group).indices, 0).bool()
        best = groups.masked_fill(shut[..., None], -torch.inf).flatten(-2).topk(c.num_experts_per_tok).indices
        chosen = torch.zeros_like(scores).scatter(-1, best, 1)
        if self.training:
            step = c.bias_update_speed * (chosen.sum() / chosen.shape[-1] - chosen.sum((0, 1))).sign()
            self.lean[m] += -step if self.fault == "latent_bias_lifts_the_busy_experts" and m == 2 else step
        return c.routed_scaling_factor * chosen * scores / (chosen * scores).sum(-1, keepdim=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens[input_ids]
        for i, w in enumerate(self.w):
            x = x + self.attend(i, self.rms(x, w["pre"]))
            y = self.rms(x, w["post"])
            x = x + (F.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
            if i:
                gate, up = (torch.einsum("ntc,eic->ntei", y, z[i - 1]) for z in (self.gates, self.ups))
                made = torch.einsum("ntei,eci->ntec", F.silu(gate) * up, self.downs[i - 1])
                x = x + (self.shares(i - 1, y)[..., None] * made).sum(2)
        return self.rms(x, self.last) @ self.head


right(task, "latent_attention_in_blocks", "other modules, fused products, rows sorted by expert", Blocks)
right(task, "latent_attention_absorbed", "absorbed products in eval mode, experts batched", Absorbing)
wrong(
    task,
    Blocks,
    latent_query_bias_left_out_at_first=("a bias not loaded", "model.layers.0.self_attn.q_a_proj"),
    latent_rotation_by_halves_in_the_second=("another rotary layout", "model.layers.1.self_attn"),
    latent_experts_weighed_with_their_bias=("choice's bias in the weights", "model.layers.2.mlp.gate"),
    latent_normed_with_the_rotary_key=("norm over too much", "model.layers.3.self_attn.kv_a_layernorm"),
    latent_final_norm_centred=("layer norm for RMS norm", "model.norm"),
)
wrong(
    task,
    Absorbing,
    latent_groups_ranked_by_their_best_expert=("another score of groups", "model.layers.1.mlp.gate"),
    latent_absorbed_scores_scaled_by_the_rank=("wrong softmax scale", "model.layers.2.self_attn", "eval"),
    latent_bias_lifts_the_busy_experts=("wrong sign of an update", "model.layers.3.mlp.gate", "buffer"),
)
