"""Two ports of a GPT-OSS: shards that add up, and stacks with windows of keys and all experts at once."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._nineteenth_gpt_oss import GptOssConfig, GptOssForCausalLM, balanced_loss, texts
from bench.held_back._sixth_ports import few

task = few("nineteenth_gpt_oss", GptOssForCausalLM, texts, balanced_loss)
CONFIG = GptOssConfig()
LIMIT, GROUPS = CONFIG.swiglu_limit, CONFIG.num_key_value_heads


class Shard(nn.Module):
    def __init__(self, attention: nn.Module, rank: int):
        super().__init__()
        self.size, self.fused = attention.head_dim, False
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = leaf(torch.cat([f.weight.chunk(GROUPS)[rank] for f in layers]).T)
        self.bias = leaf(torch.cat([f.bias.chunk(GROUPS)[rank] for f in layers]))
        self.out = leaf(attention.o_proj.weight.chunk(GROUPS, 1)[rank])
        self.out_bias = leaf(attention.o_proj.bias) if rank == 0 else None
        self.sinks = leaf(attention.sinks.chunk(GROUPS)[rank][:, None, None])

    def forward(self, x: Tensor, turn: Tensor, seen: Tensor) -> Tensor:
        heads = (x @ self.qkv + self.bias).unflatten(-1, (-1, self.size)).transpose(1, 2)
        (a, b), (cos, sin) = heads[:, :-1].chunk(2, -1), turn
        turned, v = torch.cat([a * cos - b * sin, a * sin + b * cos], -1), heads[:, -1:]
        q, k = turned[:, :-1], turned[:, -1:]
        if self.fused and not self.training:
            y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), seen)
        else:
            scores = (q @ k.mT / self.size**0.5).masked_fill(~seen, -torch.inf)
            most = torch.maximum(scores.amax(-1, keepdim=True), self.sinks).detach()
            powers = (scores - most).exp()
            y = powers @ v / (powers.sum(-1, keepdim=True) + (self.sinks - most).exp())
        return F.linear(y.transpose(1, 2).flatten(2), self.out, self.out_bias)


class Expert(nn.Module):
    def __init__(self, experts: nn.Module, number: int):
        super().__init__()
        self.gate_up = leaf(experts.gate_up_proj[number].unflatten(1, (-1, 2)).movedim(2, 0))
        self.bias = leaf(experts.gate_up_proj_bias[number].view(-1, 2).T)
        self.down, self.down_bias = leaf(experts.down_proj[number]), leaf(experts.down_proj_bias[number])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.baddbmm(self.bias[:, None], x.expand(2, -1, -1), self.gate_up).clamp_max(LIMIT)
        bent = gate * (1.702 * gate).sigmoid()
        return torch.addcmul(bent, bent, up.clamp_min(-LIMIT)) @ self.down + self.down_bias


class Floor(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        norms, router = (layer.input_layernorm, layer.post_attention_layernorm), layer.mlp.router
        self.gains, self.taken, self.bias_weighs = pile(x.weight for x in norms), router.top_k, True
        self.shards = nn.ModuleList(Shard(layer.self_attn, i) for i in range(GROUPS))
        self.table = leaf(torch.cat([router.weight, router.bias[:, None]], 1).T)
        self.experts = nn.ModuleList(Expert(layer.mlp.experts, i) for i in range(CONFIG.num_local_experts))

    def forward(self, x: Tensor, turn: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        y = F.rms_norm(x, x.shape[-1:], self.gains[0], 1e-5)
        x = x + sum(shard(y, turn, seen) for shard in self.shards)
        tokens = F.rms_norm(x, x.shape[-1:], self.gains[1], 1e-5).flatten(0, 1)
        plain = tokens @ self.table[:-1]
        scores = plain + self.table[-1]
        best = scores.topk(self.taken).indices
        shares = (scores if self.bias_weighs else plain).gather(1, best).softmax(-1).flatten()
        owners, order = best.flatten().sort(stable=True)
        sent = tokens[order // self.taken].split(owners.bincount(minlength=len(self.experts)).tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.experts, sent, strict=True)])
        y = torch.zeros_like(tokens).index_add(0, order // self.taken, y * shares[order, None])
        return x + y.view_as(x), scores


class Sharded(Port):
    """A tower of floors; the first shard of each holds the bias of all."""

    def take(self, model: GptOssForCausalLM) -> None:
        body, rotary = model.model, model.model.rotary_emb
        self.words, self.head = leaf(body.embed_tokens.weight), leaf(model.lm_head.weight.T)
        self.floors = nn.ModuleList(Floor(layer) for layer in body.layers)
        self.gain, self.stretch = leaf(body.norm.weight), rotary.attention_scaling
        self.register_buffer("speeds", rotary.inv_freq.clone())
        first, middle, last = self.floors
        if self.fault == "gpt_oss_last_output_bias_added_by_both_shards":
            last.shards[1].out_bias = leaf(body.layers[2].self_attn.o_proj.bias)
        if self.fault == "gpt_oss_middle_expert_biases_cut_in_halves_not_by_turns":
            for expert in middle.experts:
                expert.bias = leaf(expert.bias.T.reshape(2, -1))
        for shard in middle.shards:
            shard.fused = self.fault == "gpt_oss_middle_sinks_unknown_to_the_fused_evaluation"
        first.bias_weighs = self.fault != "gpt_oss_first_router_bias_chooses_but_does_not_weigh"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        steps = input_ids.shape[1]
        angles = torch.arange(steps, device=input_ids.device).to(self.speeds)[:, None] * self.speeds
        turn = self.stretch * torch.stack([angles.cos(), angles.sin()])
        seen = attention_mask.bool()[:, None, None].expand(-1, 1, steps, -1).tril()
        masks, states, scores = (seen.triu(1 - CONFIG.sliding_window), seen), [self.words[input_ids]], []
        for i, floor in enumerate(self.floors):
            x, found = floor(states[-1], turn, masks[i % 2])
            states, scores = [*states, x], [*scores, found]
        states[-1] = F.rms_norm(x, x.shape[-1:], self.gain, 1e-5)
        x, scores, states = states[-1] @ self.head, torch.stack(scores), torch.stack(states)
        return {"logits": x, "router_logits": scores, "hidden_states": states}


class Stacked(Port):
    """Stacked weights, channels in pairs; each query has a window of keys, each token all experts."""

    def take(self, model: GptOssForCausalLM) -> None:
        body, attentions = model.model, [x.self_attn for x in model.model.layers]
        routers, experts = zip(*((x.mlp.router, x.mlp.experts) for x in body.layers), strict=True)
        norms = [y for x in body.layers for y in (x.input_layernorm, x.post_attention_layernorm)]
        self.gains = pile(x.weight for x in (*norms, body.norm))
        self.ends = pile([body.embed_tokens.weight, model.lm_head.weight])
        (base, factor, *turns, length), size = CONFIG.rope, CONFIG.head_dim
        rows = torch.arange(len(attentions[0].sinks) * size + 2 * GROUPS * size).view(-1, size)
        rows[:-GROUPS] = rows[:-GROUPS].unflatten(1, (2, -1)).mT.flatten(1)
        both, qkvs = ("weight", "bias"), [(x.q_proj, x.k_proj, x.v_proj) for x in attentions]
        self.qkv, self.qkv_b = (pile(torch.cat([getattr(f, n) for f in x])[rows] for x in qkvs) for n in both)
        self.o, self.o_b = (pile(getattr(x.o_proj, n) for x in attentions) for n in both)
        self.sinks = pile(x.sinks.view(GROUPS, -1, 1) for x in attentions)
        self.routers, self.routers_b = (pile(getattr(x, n) for x in routers) for n in both)
        self.up, self.up_b = (pile(getattr(x, "gate_up_proj" + n) for x in experts) for n in ("", "_bias"))
        self.down, self.down_b = (pile(getattr(x, "down_proj" + n) for x in experts) for n in ("", "_bias"))
        low, high = (size * math.log(length / n / 2 / math.pi, base) / 2 for n in turns)
        if self.fault == "gpt_oss_yarn_ramp_between_whole_channels":
            low, high = math.floor(low), math.ceil(high)
        pair = torch.arange(size // 2, dtype=torch.float64)
        kept = ((high - pair) / (high - low)).clamp(0, 1)
        speeds = base ** (-2 * pair / size) * (kept + (1 - kept) / factor)
        self.register_buffer("speeds", speeds.float().to(body.rotary_emb.inv_freq))

    def attend(self, i: int, x: Tensor, turn: Tensor, real: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.gains[2 * i], 1e-5)
        heads = torch.einsum("ntc,hdc->nthd", y, self.qkv[i]) + self.qkv_b[i]
        turned, v = heads.split([heads.shape[2] - GROUPS, GROUPS], 2)
        turned = torch.einsum("tpab,nthpb->nthpa", turn, turned.unflatten(-1, (-1, 2))).flatten(-2)
        q, k = turned[:, :, :-GROUPS].unflatten(2, (GROUPS, -1)), turned[:, :, -GROUPS:]
        size = x.shape[1] if i % 2 else CONFIG.sliding_window
        k, v = (F.pad(y, (0, 0, 0, 0, size - 1, 0)).unfold(1, size, 1) for y in (k, v))
        seen = F.pad(real, (size - 1, 0)).unfold(1, size, 1)[:, :, None, None]
        scores = torch.einsum("ntkgd,ntkdw->ntkgw", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~seen, torch.finfo(x.dtype).min)
        total = scores.logsumexp(-1, keepdim=True)
        y = torch.einsum("ntkgw,ntkdw->ntkgd", scores.softmax(-1), v)
        if self.fault == "gpt_oss_first_sinks_by_a_normaliser_without_gradient" and i == 0:
            total = total.detach()
        return x + (y * (total - self.sinks[i]).sigmoid()).flatten(2) @ self.o[i].T + self.o_b[i]

    def mix(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.rms_norm(x, x.shape[-1:], self.gains[2 * i + 1], 1e-5)
        scores = y @ self.routers[i].T + self.routers_b[i]
        best = scores.topk(CONFIG.num_experts_per_tok).values
        shares = scores.where(scores >= best[..., -1:], -torch.inf).softmax(-1)
        y = torch.einsum("ntc,ecf->ntef", y, self.up[i]) + self.up_b[i]
        both = self.fault == "gpt_oss_last_experts_clamp_the_gate_from_below_too" and i == 2
        gate, up = y[..., ::2].clamp(-LIMIT if both else None, LIMIT), y[..., 1::2].clamp(-LIMIT, LIMIT)
        inner = (gate + gate * up) * (1.702 * gate).sigmoid() * shares[..., None]
        x = x + torch.einsum("ntef,efc->ntc", inner, self.down[i]) + shares @ self.down_b[i]
        return x, scores.flatten(0, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x, real = F.one_hot(input_ids, self.ends.shape[1]).to(self.ends) @ self.ends[0], attention_mask > 0
        angles = torch.arange(x.shape[1], device=x.device).to(self.speeds)[:, None] * self.speeds
        cos, sin = (f(angles) * (1 + math.log(CONFIG.rope[1]) / 10) for f in (torch.cos, torch.sin))
        turn = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))
        states, scores = [x], []
        for i in range(len(self.qkv)):
            x, found = self.mix(i, self.attend(i, x, turn, real))
            states, scores = [*states, x], [*scores, found]
        x = F.rms_norm(x, x.shape[-1:], self.gains[-1], 1e-5)
        if self.fault != "gpt_oss_last_hidden_state_reported_before_the_final_norm":
            states[-1] = x
        outputs = {"router_logits": torch.stack(scores), "hidden_states": torch.stack(states)}
        return {"logits": x @ self.ends[1].T, **outputs}


right(task, "gpt_oss_in_shards_that_sort_tokens", "a tree of shards, tokens sorted by expert", Sharded)
right(task, "gpt_oss_in_stacks_with_windows_of_keys", "stacked weights, windows, all experts", Stacked)
AT, BACK = "model.layers.", ("input gradient", "weight gradient")
wrong(
    task,
    Sharded,
    gpt_oss_last_output_bias_added_by_both_shards=("a bias added twice", AT + "2.self_attn.o_proj"),
    gpt_oss_middle_expert_biases_cut_in_halves_not_by_turns=("another layout", AT + "1.mlp.experts"),
    gpt_oss_middle_sinks_unknown_to_the_fused_evaluation=("a term lost", AT + "1.self_attn", "eval"),
    gpt_oss_first_router_bias_chooses_but_does_not_weigh=("a bias in one use only", AT + "0.mlp.router"),
)
wrong(
    task,
    Stacked,
    gpt_oss_first_sinks_by_a_normaliser_without_gradient=("a detach", AT + "0.self_attn", BACK),
    gpt_oss_yarn_ramp_between_whole_channels=("rounded bounds", "model.rotary_emb"),
    gpt_oss_last_experts_clamp_the_gate_from_below_too=("a clamp on both sides", AT + "2.mlp.experts"),
    gpt_oss_last_hidden_state_reported_before_the_final_norm=("another step's output", ("model", "")),
)
