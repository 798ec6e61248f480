"""Two ports of a small Gemma 2: a tree of sandwiches and einsums, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_third_gemma_two as two
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_third_gemma_two", two.Gemma2ForCausalLM, two.progressions, two.next_token)
HEADS, KEY_HEADS, HEAD_DIM = two.HEADS, two.KEY_HEADS, two.HEAD_DIM
GROUP = HEADS // KEY_HEADS


class Scale(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain = leaf(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.gain, two.EPS)


class Embedder(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.table, self.fixed = leaf(weight), False

    def encode(self, tokens: Tensor) -> Tensor:
        table = self.table.detach() if self.fixed else self.table
        return math.sqrt(two.WIDTH) * table[tokens]

    def decode(self, x: Tensor) -> Tensor:
        return two.LOGIT_CAP * torch.tanh(torch.einsum("ntd,vd->ntv", x, self.table) / two.LOGIT_CAP)


class Attend(nn.Module):
    """Queries [D, K, G, H] by group of the key head they share; keys and values [2, D, K, H]."""

    def __init__(self, layer: nn.Module, window: int | None):
        super().__init__()
        old, sizes = layer.self_attn, (KEY_HEADS, HEAD_DIM)
        self.ask = leaf(old.q_proj.weight.T.unflatten(1, (KEY_HEADS, GROUP, HEAD_DIM)))
        self.hold = pile(x.weight.T.unflatten(1, sizes) for x in (old.k_proj, old.v_proj))
        self.give = leaf(old.o_proj.weight.T.unflatten(0, (KEY_HEADS, GROUP, HEAD_DIM)))
        self.window, self.tiled = window, False

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        left, other = x.chunk(2, -1)
        angle = angle.view(-1, *[1] * (x.dim() - 3), angle.shape[-1])
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([left * cos - other * sin, other * cos + left * sin], -1)

    def forward(self, x: Tensor, seen: Tensor, angle: Tensor) -> Tensor:
        q = self.turn(torch.einsum("ntd,dkgh->ntkgh", x, self.ask), angle) / math.sqrt(two.SCALAR)
        k, v = torch.einsum("ntd,edkh->entkh", x, self.hold)
        k = self.turn(k, angle)
        if self.tiled:
            q = q.flatten(2, 3).unflatten(2, (GROUP, KEY_HEADS)).transpose(2, 3)
        place = torch.arange(x.shape[1], device=x.device)
        gap = place[:, None] - place
        near = (gap >= 0) if self.window is None else (gap >= 0) & (gap < self.window)
        scores = two.SCORE_CAP * torch.tanh(torch.einsum("ntkgh,nskh->nkgts", q, k) / two.SCORE_CAP)
        hidden = ~(near & seen[:, None, None, None])
        mixed = torch.einsum("nkgts,nskh->ntkgh", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        if self.tiled:
            mixed = mixed.transpose(2, 3).flatten(2, 3).unflatten(2, (KEY_HEADS, GROUP))
        return torch.einsum("ntkgh,kghd->ntd", mixed, self.give)


class Gated(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.open = pile([mlp.gate_proj.weight.T, mlp.up_proj.weight.T])
        self.close, self.bend = leaf(mlp.down_proj.weight.T), "tanh"

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        gate, up = torch.einsum("ntd,edf->entf", x, self.open)
        return (up * F.gelu(gate, approximate=self.bend)) @ self.close


class Sandwich(nn.Module):
    def __init__(self, before: nn.Module, inside: nn.Module, after: nn.Module):
        super().__init__()
        self.before, self.inside, self.after = Scale(before), inside, Scale(after)

    def forward(self, x: Tensor, seen: Tensor, angle: Tensor) -> Tensor:
        return x + self.after(self.inside(self.before(x), seen, angle))


class GemmaOfSandwiches(Port):
    """A table that encodes and decodes, and a row of sandwiches, of which every other one attends."""

    def take(self, model: two.Gemma2ForCausalLM) -> None:
        old, fault, self.stack = model.model, self.fault, nn.ModuleList()
        self.embedder, self.last = Embedder(old.embed_tokens.weight), Scale(old.norm)
        self.register_buffer("speed", old.rotary_emb.inv_freq.clone())
        for i, x in enumerate(old.layers):
            attend, gated = Attend(x, None if i % 2 else two.WINDOW), Gated(x.mlp)
            self.stack.append(Sandwich(x.input_layernorm, attend, x.post_attention_layernorm))
            self.stack.append(Sandwich(x.pre_feedforward_layernorm, gated, x.post_feedforward_layernorm))
        self.embedder.fixed = fault == "gemma_two_embeddings_looked_up_without_gradient"
        self.stack[2].inside.tiled = fault == "gemma_two_second_layer_tiles_its_key_heads"
        self.stack[4].inside.window += fault == "gemma_two_third_layer_window_one_wider"
        self.stack[7].inside.bend = "none" if fault == "gemma_two_last_gate_has_the_exact_gelu" else "tanh"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedder.encode(input_ids)
        angle = torch.arange(x.shape[1], device=x.device).to(x).outer(self.speed)
        for part in self.stack:
            x = part(x, attention_mask.bool(), angle)
        return self.embedder.decode(self.last(x))


class StackedGemma(Port):
    """Time first; stacks by layer, pairs of a rotation side by side as complex numbers."""

    def take(self, model: two.Gemma2ForCausalLM) -> None:
        old, layers = model.model, model.model.layers
        attend, mlps = [x.self_attn for x in layers], [x.mlp for x in layers]

        def paired(weight: Tensor) -> Tensor:
            return weight.unflatten(0, (-1, 2, HEAD_DIM // 2)).transpose(1, 2).flatten(0, 2)

        qkv = ([paired(x.q_proj.weight), paired(x.k_proj.weight), x.v_proj.weight] for x in attend)
        self.qkv, self.out = pile(map(torch.cat, qkv)), pile(x.o_proj.weight for x in attend)
        self.wide = pile(torch.cat([x.up_proj.weight, x.gate_proj.weight]) for x in mlps)
        self.narrow = pile(x.down_proj.weight for x in mlps)
        sides = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self.gains = pile(
            torch.stack([getattr(x, f"{side}_layernorm").weight for side in sides]) for x in layers
        )
        self.end, self.words = leaf(old.norm.weight), leaf(old.embed_tokens.weight.T)
        self.register_buffer("speed", old.rotary_emb.inv_freq.clone())

    def norm(self, x: Tensor, gain: Tensor, fixed: bool = False) -> Tensor:
        size = (x.square().sum(-1, True) / x.shape[-1] + two.EPS).sqrt()
        return x / (size.detach() if fixed else size) * gain

    def mix(self, i: int, x: Tensor, hidden: Tensor) -> Tensor:
        time, texts, _ = x.shape
        heads = F.linear(x, self.qkv[i]).view(time, texts, -1, HEAD_DIM)
        qk, v = heads.split([HEADS + KEY_HEADS, KEY_HEADS], 2)
        angle = torch.arange(time, device=x.device).to(x)[:, None, None, None] * self.speed
        turned = torch.view_as_complex(qk.unflatten(3, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
        qk = torch.view_as_real(turned).flatten(3)
        by_head = self.fault == "gemma_two_first_layer_scores_scaled_by_the_head_width" and i == 0
        rate = (HEAD_DIM if by_head else two.SCALAR) ** -0.5 / two.SCORE_CAP
        mixed = []
        for h in range(HEADS):
            key = h // GROUP
            scores = torch.einsum("tnc,snc->nts", rate * qk[:, :, h], qk[:, :, HEADS + key])
            scores = (two.SCORE_CAP * scores.tanh()).masked_fill(hidden, -math.inf)
            mixed.append(torch.einsum("nts,snc->tnc", scores.softmax(-1), v[:, :, key]))
        return F.linear(torch.cat(mixed, -1), self.out[i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = two.WIDTH**0.5 * self.words.T[input_ids.T]
        ones = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device)
        hidden = ones.triu(1) | (attention_mask == 0)[:, None]
        for i in range(two.LAYERS):
            gains = 1 + self.gains[i]
            far = hidden if i % 2 else hidden | ones.tril(-two.WINDOW)
            y = self.mix(i, self.norm(x, gains[0]), far)
            late = self.fault == "gemma_two_second_layer_norms_the_sum_after_attention" and i == 1
            x = self.norm(x + y, gains[1]) if late else x + self.norm(y, gains[1])
            up, gate = F.linear(self.norm(x, gains[2]), self.wide[i]).chunk(2, -1)
            gate = gate * torch.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3))
            x = x + self.norm(F.linear(gate * up, self.narrow[i]), gains[3])
        x = self.norm(x, 1 + self.end, self.fault == "gemma_two_final_norm_takes_its_size_for_a_constant")
        logits = (x @ self.words).transpose(0, 1)
        if self.fault == "gemma_two_logits_uncapped_in_evaluation" and not self.training:
            return logits
        return two.LOGIT_CAP * (logits / two.LOGIT_CAP).tanh()


SLOPES = ("input gradient", "weight gradient")
right(task, "gemma_two_of_sandwiches", "a tree, einsums by group, fused keys and values", GemmaOfSandwiches)
right(task, "gemma_two_of_stacked_weights", "packed stacks, time first, complex rotations", StackedGemma)
wrong(
    task,
    GemmaOfSandwiches,
    gemma_two_embeddings_looked_up_without_gradient=("detach", "model.embed_tokens", "weight gradient"),
    gemma_two_second_layer_tiles_its_key_heads=("another head order", "model.layers.1.self_attn"),
    gemma_two_third_layer_window_one_wider=("a count off by one", "model.layers.2"),
    gemma_two_last_gate_has_the_exact_gelu=("another activation", "model.layers.3.mlp.act_fn"),
)
wrong(
    task,
    StackedGemma,
    gemma_two_first_layer_scores_scaled_by_the_head_width=("a wrong scale", "model.layers.0.self_attn"),
    gemma_two_second_layer_norms_the_sum_after_attention=("another order", "model.layers.1"),
    gemma_two_final_norm_takes_its_size_for_a_constant=("detach", "model.norm", SLOPES),
    gemma_two_logits_uncapped_in_evaluation=("a cap left out in eval", "", "eval"),
)
