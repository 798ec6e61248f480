"""Two ports of a small GPT-J: a tree with fused products and the tokens first, and one class of stacks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_fourth_gpt_j as small
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fourth_gpt_j import HEADS, INNER, LAYERS, ROTARY, WIDTH, GPTJForCausalLM

task = few("thirty_fourth_gpt_j", GPTJForCausalLM, small.counting, small.next_token)


class Turning(nn.Module):
    """Turns the first channels of each head, two by two as a complex number."""

    def __init__(self, table: Tensor, ahead: int = 0):
        super().__init__()
        self.ahead = ahead
        self.register_buffer("sines", table.clone())

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        sin, cos = self.sines[places + self.ahead].tensor_split(2, -1)
        turned, still = x.tensor_split([ROTARY], -1)
        turned = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        turned = turned * torch.complex(cos, sin)[..., None, :]
        return torch.cat([torch.view_as_real(turned).flatten(-2), still], -1)


class Attending(nn.Module):
    """Looks from [T, N, heads, D] back on the earlier and these; ``deaf`` keys turn without a gradient."""

    def __init__(self, attn: nn.Module):
        super().__init__()
        self.turn_query, self.turn_key = Turning(attn.embed_positions), Turning(attn.embed_positions)
        self.deaf = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, open_: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = self.turn_query(q, places), self.turn_key(k, places)
        if self.deaf:
            k = torch.cat([k[..., :ROTARY].detach(), k[..., ROTARY:]], -1)
        cache = torch.cat([cache, torch.stack([k, v])], 1)
        scores = torch.einsum("qnhd,knhd->nhqk", q / math.sqrt(q.shape[-1]), cache[0])
        share = scores.masked_fill(~open_, -math.inf).softmax(-1)
        return torch.einsum("nhqk,knhd->qnhd", share, cache[1]).flatten(2), cache


class Layer(nn.Module):
    """One product into query, key, value and the inner units, one product out of both branches."""

    def __init__(self, block: nn.Module):
        super().__init__()
        attn, mlp = block.attn, block.mlp
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.load_state_dict(block.ln_1.state_dict())
        into = (attn.q_proj, attn.k_proj, attn.v_proj, mlp.fc_in)
        self.into = leaf(torch.cat([x.weight for x in into]).T)
        self.out = leaf(torch.cat([attn.out_proj.weight, mlp.fc_out.weight], 1).T)
        self.lift, self.shift = leaf(mlp.fc_in.bias), leaf(mlp.fc_out.bias)
        self.attend, self.act, self.normed = Attending(attn), nn.GELU("tanh"), False

    def forward(self, x: Tensor, cache: Tensor, open_: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        *heads, inner = (y @ self.into).split([WIDTH] * 3 + [INNER], -1)
        mixed, cache = self.attend(*(h.unflatten(-1, (HEADS, -1)) for h in heads), cache, open_, places)
        both = torch.cat([mixed, self.act(inner + self.lift)], -1)
        return (y if self.normed else x) + torch.addmm(self.shift, both.flatten(0, 1), self.out).view_as(
            x
        ), cache


class FusedGPTJ(Port):
    """Fused layers over [T, N, width], rotations of complex numbers, one mask of what is open."""

    def take(self, model: GPTJForCausalLM) -> None:
        body = model.transformer
        self.words, self.layers = leaf(body.wte.weight.T), nn.ModuleList(map(Layer, body.h))
        self.norm, self.head = nn.LayerNorm(WIDTH), leaf(model.lm_head.weight.T)
        self.norm.load_state_dict(body.ln_f.state_dict())
        self.offset = leaf(model.lm_head.bias)
        first, second, last = self.layers
        if self.fault == "gpt_j_first_mlp_takes_the_exact_gelu":
            first.act = nn.GELU()
        if self.fault == "gpt_j_second_attention_turns_its_keys_one_place_further":
            second.attend.turn_key.ahead = 1
        last.attend.deaf = self.fault == "gpt_j_last_attention_turns_its_keys_without_gradient"
        last.normed = self.fault == "gpt_j_last_block_adds_to_the_normed_stream"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, whole = input_ids.shape[1], attention_mask.shape[1]
        real = attention_mask.bool()
        places = torch.where(real, attention_mask.cumsum(1) - 1, 1)[:, whole - count :].T
        steps = torch.arange(whole, device=real.device)
        open_ = (steps <= steps[whole - count :, None]) & real[:, None, None]
        x, caches = self.words.T[input_ids.T], []
        for layer, cache in zip(self.layers, past_key_values.permute(1, 2, 4, 0, 3, 5), strict=True):
            x, cache = layer(x, cache, open_, places)
            caches.append(cache)
        logits = self.norm(x) @ self.head + self.offset
        return logits.transpose(0, 1), torch.stack(caches).permute(3, 0, 1, 4, 2, 5)


class StackedGPTJ(Port):
    """Stacks by layer, whose queries and keys are reordered so that they turn by halves."""

    def take(self, model: GPTJForCausalLM) -> None:
        body, size = model.transformer, WIDTH // HEADS
        order = torch.cat(
            [torch.arange(0, ROTARY, 2), torch.arange(1, ROTARY, 2), torch.arange(ROTARY, size)]
        )
        self.register_buffer("order", order)
        self.register_buffer("sines", body.h[0].attn.embed_positions.clone())
        attns, mlps = [b.attn for b in body.h], [b.mlp for b in body.h]
        turned = ((a.q_proj.weight, a.k_proj.weight) for a in attns)
        self.qk = pile(torch.stack(w).view(2, HEADS, size, WIDTH)[:, :, order] for w in turned)
        self.v = pile(a.v_proj.weight.view(HEADS, size, WIDTH) for a in attns)
        self.o = pile(a.out_proj.weight.view(WIDTH, HEADS, size) for a in attns)
        self.up = pile(torch.cat([m.fc_in.weight, m.fc_in.bias[:, None]], 1) for m in mlps)
        self.down = pile(torch.cat([m.fc_out.weight, m.fc_out.bias[:, None]], 1) for m in mlps)
        norms = [*(b.ln_1 for b in body.h), body.ln_f]
        self.norms = pile(torch.stack([n.weight, n.bias]) for n in norms)
        self.words = leaf(body.wte.weight)
        self.head = leaf(torch.cat([model.lm_head.weight, model.lm_head.bias[:, None]], 1))

    def norm(self, i: int, x: Tensor) -> Tensor:
        x, count = x - x.mean(-1, keepdim=True), WIDTH
        if self.fault == "gpt_j_last_norm_divides_by_the_unbiased_deviation" and i == LAYERS:
            count = WIDTH - 1
        spread = x.square().sum(-1, keepdim=True) / count
        return torch.addcmul(self.norms[i, 1], x / (spread + 1e-5).sqrt(), self.norms[i, 0])

    def attend(self, i: int, y: Tensor, past: Tensor, real: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        qk = torch.einsum("ntc,zhdc->znhtd", y, self.qk[i])
        one, two, still = qk.split([ROTARY // 2, ROTARY // 2, qk.shape[-1] - ROTARY], -1)
        sin, cos = turn[:, None].chunk(2, -1)
        q, k = torch.cat([one * cos - two * sin, two * cos + one * sin, still], -1)
        k = torch.cat([past[:, 0][..., self.order], k], 2)
        v = torch.cat([past[:, 1], torch.einsum("ntc,hdc->nhtd", y, self.v[i])], 2)
        count, whole = q.shape[2], k.shape[2]
        later = whole - count
        if self.fault == "gpt_j_second_attention_masks_as_if_nothing_were_cached" and i == 1:
            later = 0
        shut = real.new_ones(count, whole).triu(later + 1)
        heedless = self.fault == "gpt_j_last_attention_reads_padding_in_evaluation" and i == LAYERS - 1
        if self.training or not heedless:
            shut = shut | ~real[:, None, None]
        scores = (q @ k.mT).mul(q.shape[-1] ** -0.5)
        scores = scores.masked_fill(shut, torch.finfo(scores.dtype).min)
        share = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        mixed = torch.einsum("nhtd,chd->ntc", share @ v, self.o[i])
        return mixed, torch.stack([k[..., self.order.argsort()], v], 1)

    def feed(self, i: int, y: Tensor) -> Tensor:
        a = F.linear(y, self.up[i, :, :-1], self.up[i, :, -1])
        a = a * torch.sigmoid(math.sqrt(8 / math.pi) * a * (1 + 0.044715 * a * a))
        return F.linear(a, self.down[i, :, :-1], self.down[i, :, -1])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        early, real = past_key_values.shape[4], attention_mask > 0
        places = (attention_mask.cumsum(1) - 1) * real + ~real
        if self.fault == "gpt_j_positions_count_the_padding":
            places = torch.ones_like(attention_mask).cumsum(1) - 1
        x, found, turn = F.embedding(input_ids, self.words), [], self.sines[places[:, early:]]
        for i in range(LAYERS):
            y = self.norm(i, x)
            mixed, kept = self.attend(i, y, past_key_values[:, i], real, turn)
            x = x + (mixed + self.feed(i, y))
            found.append(kept)
        return F.linear(self.norm(LAYERS, x), self.head[:, :-1], self.head[:, -1]), torch.stack(found, 1)


SLOPES = ("input gradient", "weight gradient")
right(task, "gpt_j_of_fused_layers", "a tree, fused products, complex rotations, tokens first", FusedGPTJ)
right(task, "gpt_j_of_stacked_weights", "stacks by layer, reordered heads that turn by halves", StackedGPTJ)
wrong(
    task,
    FusedGPTJ,
    gpt_j_first_mlp_takes_the_exact_gelu=("another activation", "transformer.h.0.mlp.act"),
    gpt_j_second_attention_turns_its_keys_one_place_further=("an offset by one", "transformer.h.1.attn"),
    gpt_j_last_attention_turns_its_keys_without_gradient=("detach", "transformer.h.2.attn", SLOPES),
    gpt_j_last_block_adds_to_the_normed_stream=("another residual", "transformer.h.2"),
)
wrong(
    task,
    StackedGPTJ,
    gpt_j_positions_count_the_padding=("positions without the mask", "transformer"),
    gpt_j_second_attention_masks_as_if_nothing_were_cached=("a shifted mask", "transformer.h.1.attn"),
    gpt_j_last_attention_reads_padding_in_evaluation=("no mask in eval", "transformer.h.2.attn", "eval"),
    gpt_j_last_norm_divides_by_the_unbiased_deviation=("another variance", "transformer.ln_f"),
)
