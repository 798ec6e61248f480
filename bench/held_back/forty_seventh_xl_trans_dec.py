"""Two ports of a small decoder of sparse experts: a tree with fused weights, and stacks of all layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_seventh_xl_trans_dec as xl
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_seventh_xl_trans_dec", xl.OlmoeForCausalLM, xl.counting, xl.quarter)
EPS, EXPERTS, TOP, GROUPS, HEAD, HEADS = xl.EPS, xl.EXPERTS, xl.TOP, xl.GROUPS, xl.HEAD, xl.HEADS


def rms(x: Tensor, gain: Tensor, eps: float = EPS, parts: int = 1) -> Tensor:
    """A division by the root mean square of ``parts`` equal parts of the last axis, and a gain."""
    x = x.unflatten(-1, (parts, -1))
    return (x / (x.square().mean(-1, True) + eps).sqrt()).flatten(-2) * gain


class Gated(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.rise = leaf(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.fall, self.swapped = leaf(mlp.down_proj.weight), False

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.rise).chunk(2, -1)[:: -1 if self.swapped else 1]
        return F.linear(gate * gate.sigmoid() * up, self.fall)


class Look(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        inner, self.parts = layer.self_attn, 1
        norms = layer.input_layernorm, inner.q_norm, inner.k_norm
        self.before, self.ask, self.tell = (leaf(x.weight) for x in norms)
        self.enter = leaf(torch.cat([x.weight for x in (inner.q_proj, inner.k_proj, inner.v_proj)]))
        self.leave = leaf(inner.o_proj.weight)

    def turned(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x.unflatten(2, (GROUPS, -1, 2, HEAD // 2))
        x = torch.complex(x[..., 0, :], x[..., 1, :]) * turn[:, None, None]
        return torch.cat([x.real, x.imag], -1)

    def forward(self, x: Tensor, turn: Tensor, seen: Tensor) -> Tensor:
        q, k, v = F.linear(rms(x, self.before), self.enter).tensor_split([HEADS * HEAD, -GROUPS * HEAD], -1)
        q, k = self.turned(rms(q, self.ask), turn), rms(k, self.tell, parts=self.parts)
        scores = torch.einsum("ntgrd,nsgud->ngrts", q / HEAD**0.5, self.turned(k, turn))
        share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("ngrts,nsgd->ntgrd", share, v.unflatten(2, (GROUPS, HEAD)))
        return x + F.linear(mixed.flatten(2), self.leave)


class Choose(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        mlp, self.silent, self.before = layer.mlp, False, leaf(layer.post_attention_layernorm.weight)
        self.route = leaf(torch.cat([mlp.gate.weight, mlp.shared_expert_gate.weight]))
        self.crowd, self.common = nn.ModuleList(map(Gated, mlp.experts)), Gated(mlp.shared_expert)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = rms(x, self.before)
        route, door = F.linear(y, self.route).split([EXPERTS, 1], -1)
        share, door = route.softmax(-1), (door.detach() if self.silent else door).sigmoid()
        share = share * (share >= share.topk(TOP, -1).values[..., -1:])
        every = torch.stack([expert(y) for expert in self.crowd], -1)
        return x + (every * share[..., None, :]).sum(-1) + door * self.common(y), route


class TreeOfExperts(Port):
    """Layers of fused products, each with its norm and sum inside."""

    def take(self, model: xl.OlmoeForCausalLM) -> None:
        body, fault = model.model, self.fault
        ends = body.embed_tokens, model.lm_head, body.norm
        self.words, self.answer, self.last = (leaf(x.weight) for x in ends)
        self.looks, self.choices = (nn.ModuleList(map(make, body.layers)) for make in (Look, Choose))
        self.register_buffer("pace", body.rotary_emb.inv_freq.clone(), persistent=False)
        self.choices[0].crowd[3].swapped = fault == "xl_trans_dec_first_layer_fourth_expert_swaps_gate_and_up"
        self.choices[2].silent = fault == "xl_trans_dec_last_shared_gate_without_gradient"
        self.looks[1].parts = GROUPS if fault == "xl_trans_dec_second_layer_norms_keys_by_head" else 1

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x, real = F.embedding(input_ids, self.words), attention_mask > 0
        place, routes = torch.arange(input_ids.shape[1], device=x.device), []
        seen = ((place[:, None] >= place) & real[:, None] | (place[:, None] == place))[:, None, None]
        turn = torch.polar(torch.ones_like(self.pace), place[:, None] * self.pace)
        for look, choose in zip(self.looks, self.choices, strict=True):
            x, route = choose(look(x, turn, seen))
            routes.append(route)
        logits, route = F.linear(rms(x, self.last), self.answer), torch.stack(routes, 2)[real].flatten(0, 1)
        calm = route.logsumexp(-1).square().mean()
        if self.fault == "xl_trans_dec_balance_counts_padding":
            route = torch.stack(routes, 2).flatten(0, 2)
        share = route.softmax(-1)
        chosen = torch.zeros_like(share).scatter(1, share.topk(TOP, 1).indices, 1)
        balance = EXPERTS * chosen.mean(0) @ share.mean(0)
        after, known = labels[:, 1:], labels[:, 1:] >= 0
        loss = F.cross_entropy(logits[:, :-1][known], after[known])
        return loss + xl.BALANCE * balance + xl.CALM * calm, logits, balance, calm


def paired(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (-1, 2, HEAD // 2)).transpose(1, 2).flatten(0, 2)


class StackedExperts(Port):
    """Stacks of the layers' transposed weights; neighbours are rotated, experts are one product."""

    def take(self, model: xl.OlmoeForCausalLM) -> None:
        body, layers = model.model, model.model.layers
        attend, mix = [x.self_attn for x in layers], [x.mlp for x in layers]
        norms = [torch.stack([x.input_layernorm.weight, x.post_attention_layernorm.weight]) for x in layers]
        self.norms, self.qn = pile(norms), pile(paired(x.q_norm.weight) for x in attend)
        self.kn = pile(paired(x.k_norm.weight) for x in attend)
        self.q = pile(paired(x.q_proj.weight).T for x in attend)
        self.kv = pile(torch.cat([paired(x.k_proj.weight), x.v_proj.weight]).T for x in attend)
        self.o, self.gate = pile(x.o_proj.weight.T for x in attend), pile(x.gate.weight.T for x in mix)
        names = ("gate_proj", "up_proj", "down_proj")
        both = [[[getattr(e, n).weight.T for e in x.experts] for n in names] for x in mix]
        self.g, self.u, self.d = (pile(torch.stack(x[i]) for x in both) for i in range(3))
        shared = [[getattr(x.shared_expert, n).weight for n in names] for x in mix]
        self.common = pile(torch.stack([g, u, d.T]) for g, u, d in shared)
        self.door = pile(x.shared_expert_gate.weight[0] for x in mix)
        self.words, self.head = leaf(body.embed_tokens.weight), leaf(model.lm_head.weight.T)
        self.final, pace = leaf(body.norm.weight), body.rotary_emb.inv_freq.clone()
        if self.fault == "xl_trans_dec_rotary_base_too_low":
            pace = 9500 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("pace", pace, persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[1]).to(x), self.pace)
        (cos, sin), (a, b) = (
            (angle.cos(), angle.sin()),
            x.unflatten(2, (-1, HEAD // 2, 2)).transpose(1, 2).unbind(-1),
        )
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3)

    def attend(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        k, v = (x @ self.kv[i]).chunk(2, -1)
        q, k = self.turn(rms(x @ self.q[i], self.qn[i])), self.turn(rms(k, self.kn[i]))
        v = v.unflatten(2, (GROUPS, HEAD)).transpose(1, 2)
        order = torch.arange(HEADS, device=x.device) // (HEADS // GROUPS)
        if self.fault == "xl_trans_dec_first_layer_tiles_its_key_groups" and i == 0:
            order = torch.arange(HEADS, device=x.device) % GROUPS
        mixed = F.scaled_dot_product_attention(q, k[:, order], v[:, order], seen)
        return mixed.transpose(1, 2).flatten(2) @ self.o[i]

    def mix(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        route = x @ self.gate[i]
        best, which = torch.exp(route - route.logsumexp(-1, True)).topk(TOP, -1)
        if self.fault == "xl_trans_dec_second_layer_renormalises_in_eval" and i == 1 and not self.training:
            best = best / best.sum(-1, True)
        share = torch.zeros_like(route).scatter(-1, which, best)
        y = F.silu(torch.einsum("ntd,edh->nteh", x, self.g[i])) * torch.einsum("ntd,edh->nteh", x, self.u[i])
        y = torch.einsum("nteh,nte,ehd->ntd", y, share, self.d[i])
        g, u, d = self.common[i]
        return y + (x @ self.door[i]).sigmoid()[..., None] * ((F.silu(x @ g.T) * (x @ u.T)) @ d), route

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x, real, routes = self.words[input_ids], attention_mask.to(self.words), []
        own = torch.eye(x.shape[1], device=x.device).bool()
        seen = (torch.ones_like(own).tril() & (real.bool()[:, None] | own))[:, None]
        for i in range(xl.LAYERS):
            x = x + self.attend(i, rms(x, self.norms[i, 0]), seen)
            y, route = self.mix(i, rms(x, self.norms[i, 1]))
            x, routes = x + y, [*routes, route]
        eps = 1e-2 if self.fault == "xl_trans_dec_final_norm_with_a_larger_epsilon" else EPS
        logits, route = rms(x, self.final, eps) @ self.head, torch.stack(routes)
        share, part = route.softmax(-1), real / real.sum() / xl.LAYERS
        chosen = F.one_hot(share.topk(TOP, -1).indices, EXPERTS).sum(-2).to(x)
        often, sure = (torch.einsum("lnte,nt->e", each, part) for each in (chosen, share))
        balance, calm = EXPERTS * (often * sure).sum(), (route.logsumexp(-1) ** 2 * part).sum()
        after, counted = labels[:, 1:, None], labels[:, 1:] != -100
        told = logits[:, :-1].log_softmax(-1).gather(2, after.clamp(min=0))[..., 0]
        loss = -(told * counted).sum() / counted.sum()
        return loss + xl.BALANCE * balance + xl.CALM * calm, logits, balance, calm


right(task, "xl_trans_dec_tree_of_experts", "a tree, fused weights, dense experts", TreeOfExperts)
right(task, "xl_trans_dec_of_stacked_weights", "stacks, rotated neighbours, one product", StackedExperts)
SLOPES, LOOK, MIX = ("input gradient", "weight gradient"), "model.layers.1.self_attn", "model.layers.2.mlp"
wrong(
    task,
    TreeOfExperts,
    xl_trans_dec_first_layer_fourth_expert_swaps_gate_and_up=("a swap", "model.layers.0.mlp.experts.3"),
    xl_trans_dec_second_layer_norms_keys_by_head=("another axis of a norm", (LOOK + ".k_norm", LOOK)),
    xl_trans_dec_last_shared_gate_without_gradient=("detach", (MIX, MIX + ".shared_expert_gate"), SLOPES),
    xl_trans_dec_balance_counts_padding=("a mask left out", ""),
)
wrong(
    task,
    StackedExperts,
    xl_trans_dec_rotary_base_too_low=("another constant", "model.rotary_emb"),
    xl_trans_dec_first_layer_tiles_its_key_groups=("another head order", "model.layers.0.self_attn"),
    xl_trans_dec_second_layer_renormalises_in_eval=("a norm in eval", "model.layers.1.mlp", "eval"),
    xl_trans_dec_final_norm_with_a_larger_epsilon=("another epsilon", "model.norm"),
)
