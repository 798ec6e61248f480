"""Two ports of a small Mistral: a tree that keeps rings by slot, and flat code that needs no cache at all."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_seventh_mistral as its
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_seventh_mistral", its.MistralForCausalLM, its.progressions, its.next_tokens)
EPS, WINDOW, PROMPT, LAYERS = its.EPS, its.WINDOW, its.PROMPT, its.LAYERS
HEADS, KV_HEADS, HEAD_DIM = its.HEADS, its.KV_HEADS, its.HEAD_DIM
HALF, GROUP = HEAD_DIM // 2, HEADS // KV_HEADS


class Scale(nn.Module):
    def __init__(self, norm: nn.Module, eps: float = EPS):
        super().__init__()
        self.gain, self.eps = leaf(norm.weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, True) + self.eps).sqrt() * self.gain


def neighbours(weight: Tensor) -> Tensor:
    """Rows by head whose two halves were rotated together, as pairs of neighbours; [D, heads x size]."""
    return weight.unflatten(0, (-1, 2, HALF)).transpose(1, 2).flatten(0, 2).T


def turned(x: Tensor, angle: Tensor) -> Tensor:
    angle = angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), HALF)
    a, b, cos, sin = x[..., ::2], x[..., 1::2], angle.cos(), angle.sin()
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class Ring(nn.Module):
    """Attention with its norm; it gives back the keys and values of the window by slot."""

    def __init__(self, layer: nn.Module, eps: float):
        super().__init__()
        each, self.norm = layer.self_attn, Scale(layer.input_layernorm, eps)
        turning = (neighbours(x.weight) for x in (each.q_proj, each.k_proj))
        self.into, self.out = leaf(torch.cat([*turning, each.v_proj.weight.T], 1)), leaf(each.o_proj.weight.T)
        self.in_order, self.silent = False, False

    def keep(self, x: Tensor) -> Tensor:
        last, slots = x.shape[1] - 1, torch.arange(WINDOW, device=x.device)
        held = last - (last - slots) % WINDOW
        ring = x[:, held.sort()[0] if self.in_order else held]
        return ring.detach() if self.silent else ring

    def forward(self, x: Tensor, angle: Tensor, seen: Tensor, ring: list | None, at: int) -> tuple:
        size = KV_HEADS * HEAD_DIM
        q, k, v = (self.norm(x) @ self.into).split([GROUP * size, size, size], 2)
        q = turned(q.unflatten(2, (KV_HEADS, GROUP, HEAD_DIM)), angle)
        k, v = turned(k.unflatten(2, (KV_HEADS, HEAD_DIM)), angle), v.unflatten(2, (KV_HEADS, HEAD_DIM))
        if ring is None:
            ring = [self.keep(k), self.keep(v)]
        else:
            here = (torch.arange(WINDOW, device=x.device) == at % WINDOW)[:, None, None]
            ring = k, v = [torch.where(here, new, old) for new, old in zip((k, v), ring, strict=True)]
        score = torch.einsum("ntkgd,nskd->nkgts", q / HEAD_DIM**0.5, k)
        share = torch.where(seen[:, None, None], score, -torch.inf).softmax(-1)
        return x + torch.einsum("nkgts,nskd->ntkgd", share, v).flatten(2) @ self.out, ring


class Gated(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        each, self.norm = layer.mlp, Scale(layer.post_attention_layernorm)
        self.into = leaf(torch.cat([each.up_proj.weight, each.gate_proj.weight]).T)
        self.out = leaf(each.down_proj.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = (self.norm(x) @ self.into).chunk(2, -1)
        return x + (up * gate * gate.sigmoid()) @ self.out


class MistralOfRings(Port):
    """Sublayers with their norm and their residual, grouped queries, pairs of neighbours, rings by slot."""

    def take(self, model: its.MistralForCausalLM) -> None:
        stem, fault = model.model, self.fault
        finer = fault == "mistral_first_norm_with_a_smaller_eps"
        self.words, self.head = leaf(stem.embed_tokens.weight), leaf(model.lm_head.weight.T)
        rings = [Ring(x, 1e-6 if finer and i == 0 else EPS) for i, x in enumerate(stem.layers)]
        rings[1].in_order = fault == "mistral_second_layer_fills_its_ring_from_slot_zero"
        rings[0].silent = fault == "mistral_first_layer_caches_its_prompt_without_gradient"
        self.rings, self.gates = nn.ModuleList(rings), nn.ModuleList(map(Gated, stem.layers))
        self.last = Scale(stem.norm)
        self.register_buffer("speed", stem.rotary_emb.inv_freq.clone())

    def seen(self, real: Tensor, at: int) -> Tensor:
        """What the prompt's queries see of each other, or which slots the newest sees: [N, T, S]."""
        if at == 0:
            ones = real.new_ones(real.shape[1], real.shape[1])
            band = ones.tril() & ones.triu(1 - WINDOW)
            return (band & real[:, None]) | torch.eye(len(ones), device=real.device).bool()
        held = at - (at - torch.arange(WINDOW, device=real.device)) % WINDOW
        filled = (held >= 0).expand(len(real), 1, -1)
        if self.fault == "mistral_padded_slots_seen_in_evaluation" and not self.training:
            return filled
        return filled & real[:, None, held.clamp(min=0)]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        rings, found = [None] * LAYERS, []
        for at in (0, *range(PROMPT, input_ids.shape[1])):
            part = slice(at, at + 1 if at else PROMPT)
            seen = self.seen(attention_mask[:, : part.stop] > 0, at)
            x, angle = self.words[input_ids[:, part]], position_ids[:, part, None] * self.speed
            for i, (ring, gate) in enumerate(zip(self.rings, self.gates, strict=True)):
                x, rings[i] = ring(x, angle, seen, rings[i], at)
                x = gate(x)
            found.append(self.last(x))
        return torch.cat(found, 1) @ self.head


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return slope * ctx.saved_tensors[0].sigmoid()


class MistralAtOnce(Port):
    """Prompt and decoded tokens in one pass under a band, which is what a rolling cache amounts to."""

    def take(self, model: its.MistralForCausalLM) -> None:
        stem, layers = model.model, model.model.layers
        attends, gates = [x.self_attn for x in layers], [x.mlp for x in layers]
        self.q = pile(x.q_proj.weight.unflatten(0, (HEADS, HEAD_DIM)) for x in attends)
        kv = ((x.k_proj.weight, x.v_proj.weight) for x in attends)
        self.kv = pile(torch.stack(x).unflatten(1, (KV_HEADS, HEAD_DIM)) for x in kv)
        self.o = pile(x.o_proj.weight.T.unflatten(0, (HEADS, HEAD_DIM)) for x in attends)
        three = ((x.gate_proj.weight, x.up_proj.weight, x.down_proj.weight.T) for x in gates)
        self.gates = pile(map(torch.stack, three))
        norms = [y for x in layers for y in (x.input_layernorm, x.post_attention_layernorm)]
        self.gains = pile(x.weight for x in (*norms, stem.norm))
        self.ends = pile([stem.embed_tokens.weight, model.lm_head.weight])
        self.register_buffer("speed", stem.rotary_emb.inv_freq.clone())

    def level(self, x: Tensor, i: int) -> Tensor:
        return x * self.gains[i] * (torch.einsum("ntc,ntc->nt", x, x)[..., None] / x.shape[-1] + EPS).rsqrt()

    def attend(self, i: int, x: Tensor, wave: tuple[Tensor, Tensor], band: Tensor) -> Tensor:
        def turn(y: Tensor) -> Tensor:
            (cos, sin), a, b = wave, y[..., :HALF], y[..., HALF:]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        q = turn(torch.einsum("ntc,hdc->nhtd", x, self.q[i]))
        k, v = torch.einsum("ntc,ehdc->enhtd", x, self.kv[i])
        heads = torch.arange(HEADS, device=x.device)
        share = heads // GROUP
        if self.fault == "mistral_second_layer_tiles_its_key_heads" and i == 1:
            share = heads % KV_HEADS
        mixed = F.scaled_dot_product_attention(q, turn(k)[:, share], v[:, share], attn_mask=band)
        return torch.einsum("nhtd,hdc->ntc", mixed, self.o[i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        back = place[:, None] - place
        band = ((back >= 0) & (back < WINDOW) & (attention_mask[:, None] == 1)) | (back == 0)
        speed = self.speed.sqrt() if self.fault == "mistral_rotary_exponents_halved" else self.speed
        angle = position_ids[:, None, :, None] * speed
        wave, x = (angle.cos(), angle.sin()), F.embedding(input_ids, self.ends[0])
        for i in range(LAYERS):
            x = x + self.attend(i, self.level(x, 2 * i), wave, band[:, None])
            bent = self.fault == "mistral_first_silu_slopes_by_its_sigmoid_alone" and i == 0
            (gate, up, down), y = self.gates[i], self.level(x, 2 * i + 1)
            if self.fault == "mistral_last_residual_taken_after_its_norm" and i == LAYERS - 1:
                x = y
            x = x + ((Bent.apply if bent else F.silu)(y @ gate.T) * (y @ up.T)) @ down
        return self.level(x, 2 * LAYERS) @ self.ends[1].T


SLOPES = ("input gradient", "weight gradient")
right(task, "mistral_of_rings_by_slot", "a tree, fused weights, pairs of neighbours", MistralOfRings)
right(task, "mistral_at_once_under_a_band", "flat stacks, no cache, one pass", MistralAtOnce)
wrong(
    task,
    MistralOfRings,
    mistral_first_norm_with_a_smaller_eps=("another eps", "model.layers.0.input_layernorm"),
    mistral_first_layer_caches_its_prompt_without_gradient=("detach", "model.layers.0.self_attn", SLOPES),
    mistral_second_layer_fills_its_ring_from_slot_zero=("slots out of step", "model.layers.1.self_attn"),
    mistral_padded_slots_seen_in_evaluation=("a mask left out in eval", "model", "eval"),
)
wrong(
    task,
    MistralAtOnce,
    mistral_rotary_exponents_halved=("another frequency", "model.rotary_emb"),
    mistral_first_silu_slopes_by_its_sigmoid_alone=("a wrong slope", "model.layers.0.mlp.act_fn", SLOPES),
    mistral_second_layer_tiles_its_key_heads=("another order of heads", "model.layers.1.self_attn"),
    mistral_last_residual_taken_after_its_norm=("another residual", "model.layers.1"),
)
