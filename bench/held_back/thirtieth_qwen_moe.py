"""Two ports of a small Qwen3-MoE: a tree of grouped weights, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirtieth_qwen_moe as qwen
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirtieth_qwen_moe", qwen.Qwen3MoeForCausalLM, qwen.ladders, qwen.next_tokens)
HEADS, GROUPS, SIZE, LAYERS = qwen.HEADS, qwen.KV_HEADS, qwen.HEAD_DIM, qwen.LAYERS
EXPERTS, CHOSEN, WINDOW = qwen.EXPERTS, qwen.TOP_K, qwen.WINDOW
RATES = qwen.THETA ** (-torch.arange(0, SIZE, 2) / SIZE)


def scale(weight: Tensor, eps: float = qwen.EPS) -> nn.RMSNorm:
    norm = nn.RMSNorm(len(weight), eps)
    norm.weight = leaf(weight)
    return norm


def paired(x: Tensor) -> Tensor:
    """The two halves of the last axis in turns, so that what turns together stands together."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def sheet(*layers: nn.Module) -> Tensor:
    return torch.cat([x.weight for x in layers])


class Look(nn.Module):
    """Norm and attention: for each group its queries, its key and its value from one weight."""

    def __init__(self, layer: nn.Module, window: int, eps: float, tiled: bool):
        super().__init__()
        old, self.window, self.tiled = layer.self_attn, window, tiled
        self.before = scale(layer.input_layernorm.weight, eps)
        q, k, v = (x.weight.unflatten(0, (GROUPS, -1, SIZE)) for x in (old.q_proj, old.k_proj, old.v_proj))
        q, k = (paired(x.transpose(2, 3)).transpose(2, 3) for x in (q, k))
        self.sight = leaf(torch.cat([q, k, v], 1))
        self.query, self.key = scale(paired(old.q_norm.weight)), scale(paired(old.k_norm.weight))
        self.out = leaf(old.o_proj.weight)

    def turn(self, x: Tensor) -> Tensor:
        angle = (torch.arange(x.shape[1]).to(x)[:, None] * RATES.to(x))[:, None, None]
        cos, sin, a, b = angle.cos(), angle.sin(), x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: Tensor, real: Tensor, found: list) -> Tensor:
        sight = torch.einsum("nth,gadh->ntgad", self.before(x), self.sight)
        q, k, v = sight.split([HEADS // GROUPS, 1, 1], 3)
        q, k = (self.turn(y).flatten(4) for y in (self.query(q), self.key(k)))
        if self.tiled:
            q = q.flatten(2, 3).unflatten(2, (-1, GROUPS)).transpose(2, 3)
        back = torch.arange(x.shape[1], device=x.device)
        back = back[:, None] - back
        seen = (back >= 0) & (back < self.window) & real[:, None]
        scores = torch.einsum("nqgad,nkgd->ngaqk", q / SIZE**0.5, k[:, :, :, 0])
        scores = scores.where(seen[:, None, None], float("-inf"))
        y = torch.einsum("ngaqk,nkgd->nqgad", scores.softmax(-1), v[:, :, :, 0])
        return x + (y.transpose(2, 3) if self.tiled else y).flatten(2) @ self.out.T


class Gated(nn.Module):
    def __init__(self, layer: nn.Module, swapped: bool):
        super().__init__()
        self.before, old = scale(layer.post_attention_layernorm.weight), layer.mlp
        self.wide = leaf(sheet(old.gate_proj, old.up_proj).T)
        self.narrow, self.swapped = leaf(old.down_proj.weight.T), swapped

    def forward(self, x: Tensor, real: Tensor, found: list) -> Tensor:
        gate, up = (self.before(x) @ self.wide).chunk(2, -1)[:: -1 if self.swapped else 1]
        return x + (gate * gate.sigmoid() * up) @ self.narrow


class Crowd(nn.Module):
    """Norm and all experts for all tokens, of which the softmax of the best logits leaves a few."""

    def __init__(self, layer: nn.Module, silent: bool):
        super().__init__()
        self.before, old = scale(layer.post_attention_layernorm.weight), layer.mlp
        self.choose, self.silent = leaf(old.gate.weight), silent
        self.wide = pile(sheet(x.gate_proj, x.up_proj) for x in old.experts)
        self.down = pile(x.down_proj.weight for x in old.experts)

    def forward(self, x: Tensor, real: Tensor, found: list) -> Tensor:
        y = self.before(x)
        logits = F.linear(y, self.choose)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(CHOSEN, -1)[1], True)
        found.append((logits.softmax(-1)[real], chosen[real]))
        share = logits.where(chosen, float("-inf")).softmax(-1)
        share = share.detach() if self.silent else share
        gate, up = torch.einsum("nth,eih->ntei", y, self.wide).chunk(2, -1)
        return x + torch.einsum("ntei,ehi->nth", F.silu(gate) * up * share[..., None], self.down)


class QwenOfGroups(Port):
    """Steps that hold their norm and their sum: attention by groups of heads, experts side by side."""

    def take(self, model: nn.Module) -> None:
        fault, self.steps = self.fault, nn.ModuleList()
        for i, layer in enumerate(model.model.layers):
            eps = 1e-5 if i == 0 and fault == "qwen_moe_first_norm_has_the_epsilon_of_llama" else qwen.EPS
            tiled = i == 2 and fault == "qwen_moe_third_attention_tiles_its_keys_and_values"
            self.steps.append(Look(layer, WINDOW if i in qwen.SLIDING_LAYERS else qwen.LENGTH, eps, tiled))
            if i in qwen.DENSE_LAYERS:
                self.steps.append(Gated(layer, fault == "qwen_moe_dense_layer_activates_up_for_gate"))
            else:
                self.steps.append(Crowd(layer, i == 3 and fault == "qwen_moe_last_router_weights_detached"))
        self.words, self.say = leaf(model.model.embed_tokens.weight), leaf(model.lm_head.weight)
        self.last = scale(model.model.norm.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x, found = self.words[input_ids], []
        for step in self.steps:
            x = step(x, attention_mask.bool(), found)
        chance, chosen = map(torch.cat, zip(*found, strict=True))
        return self.last(x) @ self.say.T, EXPERTS * chance.mean(0) @ chosen.to(chance).mean(0)


class StackedQwen(Port):
    """Stacks of weights by layer, and for each token the weights of its experts."""

    def take(self, model: nn.Module) -> None:
        layers = model.model.layers
        attention, dense = [x.self_attn for x in layers], layers[1].mlp
        sparse = [x.mlp for x in layers if hasattr(x.mlp, "experts")]
        self.norms = pile(sheet(x.input_layernorm, x.post_attention_layernorm).view(2, -1) for x in layers)
        self.small = pile(sheet(x.q_norm, x.k_norm).view(2, -1) for x in attention)
        self.look = pile(sheet(x.q_proj, x.k_proj, x.v_proj) for x in attention)
        self.back, self.last = pile(x.o_proj.weight for x in attention), leaf(model.model.norm.weight)
        self.route = pile(x.gate.weight.T for x in sparse)
        self.fan = pile(torch.stack([sheet(y.gate_proj, y.up_proj) for y in x.experts]) for x in sparse)
        self.fold = pile(torch.stack([y.down_proj.weight for y in x.experts]) for x in sparse)
        self.dense = pile((dense.gate_proj.weight, dense.up_proj.weight, dense.down_proj.weight.T))
        self.ends = leaf(sheet(model.model.embed_tokens, model.lm_head))

    def norm(self, x: Tensor, weight: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
        return x * weight / (x.square().mean(axes, keepdim=True) + qwen.EPS).sqrt()

    def attend(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (x @ self.look[i].T).unflatten(2, (-1, SIZE)).split([HEADS, GROUPS, GROUPS], 2)
        together = i == 1 and self.fault == "qwen_moe_second_query_norm_is_over_all_heads"
        q = self.norm(q, self.small[i, 0], (-2, -1) if together else (-1,))
        at = torch.arange(x.shape[1], device=x.device)
        angle = (at.to(x)[:, None] * RATES.to(x))[:, None]
        a, b = torch.cat([q, self.norm(k, self.small[i, 1])], 2).chunk(2, 3)
        turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 3)
        q, k = turned.split([HEADS, GROUPS], 2)
        seen = (at <= at[:, None]) & real[:, None]
        wider = i == 3 and self.fault == "qwen_moe_last_window_is_one_wider"
        seen = seen & (at[:, None] - at < (WINDOW + wider if i % 2 else qwen.LENGTH))
        k, v = (y.repeat_interleave(HEADS // GROUPS, 2).transpose(1, 2) for y in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen[:, None])
        return y.transpose(1, 2).flatten(2) @ self.back[i].T

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x, real, chances, counts = self.ends[input_ids], attention_mask > 0, [], []
        for i in range(LAYERS):
            x = x + self.attend(i, self.norm(x, self.norms[i, 0]), real)
            y = self.norm(x, self.norms[i, 1])
            if i == 1:
                x = x + (F.silu(y @ self.dense[0].T) * (y @ self.dense[1].T)) @ self.dense[2]
                continue
            j = max(i - 1, 0)
            chance = (y @ self.route[j]).softmax(-1)
            share, chosen = chance.topk(CHOSEN, -1)
            if i != 2 or self.training or self.fault != "qwen_moe_third_router_renormalises_in_training_only":
                share = share / share.sum(-1, keepdim=True)
            gate, up = torch.einsum("nth,ntkih->ntki", y, self.fan[j][chosen]).chunk(2, -1)
            x = x + torch.einsum("ntk,ntki,ntkhi->nth", share, F.silu(gate) * up, self.fold[j][chosen])
            chances.append((chance * real[..., None]).sum((0, 1)) / real.sum())
            counts.append(chosen[real].flatten().bincount(minlength=EXPERTS) / real.sum().to(x))
        chance, count = torch.stack(chances), torch.stack(counts)
        if self.fault != "qwen_moe_balance_is_taken_layer_by_layer":
            chance, count = chance.mean(0, True), count.mean(0, True)
        return self.norm(x, self.last) @ self.ends[qwen.VOCABULARY :].T, EXPERTS**2 * (chance * count).mean()


SLOPES, SECOND = ("input gradient", "weight gradient"), "model.layers.1.self_attn"
right(task, "qwen_moe_of_groups", "a tree, grouped and paired weights, experts side by side", QwenOfGroups)
right(task, "qwen_moe_of_stacked_weights", "packed stacks, gathered experts, fused attention", StackedQwen)
wrong(
    task,
    QwenOfGroups,
    qwen_moe_first_norm_has_the_epsilon_of_llama=("another epsilon", "model.layers.0.input_layernorm"),
    qwen_moe_dense_layer_activates_up_for_gate=("swapped halves", "model.layers.1.mlp"),
    qwen_moe_third_attention_tiles_its_keys_and_values=("another head order", "model.layers.2.self_attn"),
    qwen_moe_last_router_weights_detached=("detach", "model.layers.3.mlp", SLOPES),
)
wrong(
    task,
    StackedQwen,
    qwen_moe_second_query_norm_is_over_all_heads=("a norm over more axes", (SECOND + ".q_norm", SECOND)),
    qwen_moe_third_router_renormalises_in_training_only=("no division in eval", "model.layers.2.mlp", "eval"),
    qwen_moe_last_window_is_one_wider=("a count off by one", "model.layers.3.self_attn"),
    qwen_moe_balance_is_taken_layer_by_layer=("another order of means", ""),
)
