"""Two ports of a Gemma-2: sandwiches with fused weights by key head, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twelfth_gemma import Gemma2ForCausalLM, next_token, sentences

task = few("twelfth_gemma", Gemma2ForCausalLM, sentences, next_token)


class Gain(nn.Module):
    """The root mean square norm; its weight is what is added to one."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.delta, self.eps = leaf(norm.weight), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.delta, self.eps)


class Mixer(nn.Module):
    """Attention, batched over the key heads; each has its queries, its key and its value in one weight."""

    def __init__(self, attention: nn.Module, window: int | None, blind: bool):
        super().__init__()
        self.size, self.fan, self.window = attention.head_dim, attention.num_key_value_groups, window
        self.scale, self.cap, self.blind = attention.scaling, attention.attn_logit_softcapping, blind
        queries = attention.q_proj.weight.unflatten(0, (-1, self.fan, self.size))
        others = (p.weight.unflatten(0, (-1, 1, self.size)) for p in (attention.k_proj, attention.v_proj))
        self.packed = leaf(torch.cat([queries, *others], 1).flatten(0, 2))
        self.out = leaf(attention.o_proj.weight.T)

    def floor(self, real: Tensor, dtype: torch.dtype) -> Tensor:
        """The lowest number where a query may not look, [N, 1, 1, T, T]."""
        seen = real[:, None].expand(-1, real.shape[1], -1).tril()
        if self.window is not None and (self.training or not self.blind):
            seen = seen.triu(1 - self.window)
        return (~seen[:, None, None]).to(dtype) * torch.finfo(dtype).min

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], real: Tensor) -> Tensor:
        y = F.linear(x, self.packed).unflatten(2, (-1, self.fan + 2, self.size)).permute(0, 2, 3, 1, 4)
        (a, b), (c, s), v = y[:, :, :-1].chunk(2, -1), turn, y[:, :, -1:]
        q, k = torch.cat([a * c - b * s, b * c + a * s], -1).split([self.fan, 1], 2)
        scores = (q.flatten(2, 3) * self.scale @ k[:, :, 0].mT).unflatten(2, (self.fan, -1))
        shares = ((scores / self.cap).tanh() * self.cap + self.floor(real, x.dtype)).softmax(-1)
        return (shares @ v).flatten(1, 2).transpose(1, 2).flatten(2) @ self.out


class Feed(nn.Module):
    """The gated unit, gate and value in one product; its bend is written out."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.rise = leaf(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.fall, self.root, self.cube = leaf(mlp.down_proj.weight), math.sqrt(2 / math.pi), 0.044715

    def forward(self, x: Tensor) -> Tensor:
        gate, value = F.linear(x, self.rise).chunk(2, -1)
        bent = 0.5 * gate * (1 + torch.tanh(self.root * gate * (1 + self.cube * gate * gate)))
        return F.linear(bent * value, self.fall)


class Sandwich(nn.Module):
    """Something between two norms, added to what came in."""

    def __init__(self, before: nn.Module, inner: nn.Module, after: nn.Module):
        super().__init__()
        self.before, self.inner, self.after = Gain(before), inner, Gain(after)

    def forward(self, x: Tensor, *others: object) -> Tensor:
        return x + self.after(self.inner(self.before(x), *others))


class GemmaSandwiches(Port):
    """A list of sandwiches, attention and gated unit in turn, between the two uses of the rows."""

    def take(self, model: Gemma2ForCausalLM) -> None:
        config, body = model.config, model.model
        self.rows, self.cap = leaf(body.embed_tokens.weight), config.final_logit_softcapping
        self.scale = math.sqrt(config.hidden_size)
        self.register_buffer("rates", body.rotary_emb.inv_freq.clone())
        self.pairs = nn.ModuleList()
        for i, layer in enumerate(body.layers):
            window = config.sliding_window if layer.attention_type == "sliding_attention" else None
            blind = self.fault == "third_gemma_block_forgets_its_window_in_evaluation" and i == 2
            after, before = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
            if self.fault == "second_gemma_block_takes_its_norms_by_llama_names" and i == 1:
                after, before = before, after
            mix = Sandwich(layer.input_layernorm, Mixer(layer.self_attn, window, blind), after)
            feed = Sandwich(before, Feed(layer.mlp), layer.post_feedforward_layernorm)
            self.pairs.append(nn.ModuleDict({"mix": mix, "feed": feed}))
        self.last = Gain(body.norm)
        if self.fault == "gemma_embedding_scale_rounded_to_bfloat16":
            self.scale = torch.tensor(self.scale, dtype=torch.bfloat16).item()
        if self.fault == "last_gemma_gelu_with_a_mistyped_constant":
            self.pairs[3]["feed"].inner.cube = 0.047715

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, real = self.rows[input_ids] * self.scale, attention_mask.bool()
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).to(x), self.rates.to(x))
        turn = angles.cos(), angles.sin()
        for pair in self.pairs:
            x = pair["feed"](pair["mix"](x, turn, real))
        return self.cap * torch.tanh(F.linear(self.last(x), self.rows) / self.cap)


class GemmaStacks(Port):
    """Weights stacked over the layers; products by einsum, positions as matrices that turn pairs."""

    def take(self, model: Gemma2ForCausalLM) -> None:
        self.config, layers = model.config, model.model.layers
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        near, half = (-1, self.config.head_dim), self.config.head_dim // 2
        attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        self.table = leaf(model.lm_head.weight.T)
        self.queries, self.keys, self.values = (
            pile(getattr(a, name).weight.unflatten(0, near).mT for a in attentions)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        self.outs = pile(a.o_proj.weight.T.unflatten(0, near) for a in attentions)
        self.gated = pile(torch.stack([m.gate_proj.weight.T, m.up_proj.weight.T]) for m in mlps)
        self.down = pile(m.down_proj.weight.T for m in mlps)
        ends = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms = [getattr(layer, end + "_layernorm").weight for layer in layers for end in ends]
        self.gains = pile([*norms, model.model.norm.weight])
        self.owners = [[head // (heads // groups) for head in range(heads)] for _ in layers]
        if self.fault == "second_gemma_attention_deals_its_key_heads_in_turn":
            self.owners[1] = [head % groups for head in range(heads)]
        steps = half - 1 if self.fault == "gemma_rotary_frequencies_spread_to_the_very_end" else half
        self.register_buffer("speeds", model.model.rotary_emb.inv_freq ** (half / steps))

    def normed(self, i: int, x: Tensor) -> Tensor:
        size = torch.linalg.vecdot(x, x)[..., None] / x.shape[-1]
        return x * (self.gains[i] + 1) * (size + self.config.rms_norm_eps).rsqrt()

    def turns(self, length: int) -> Tensor:
        """A matrix for each position and pair, [T, d / 2, 2, 2]."""
        angles = torch.arange(length, device=self.speeds.device).to(self.table)[:, None] * self.speeds
        c, s = angles.cos(), angles.sin()
        return torch.stack([c, s, -s, c], -1).unflatten(-1, (2, 2)).to(self.table)

    def turned(self, x: Tensor, turns: Tensor) -> Tensor:
        return torch.einsum("nhtip,tpij->nhtjp", x.unflatten(-1, (2, -1)), turns).flatten(-2)

    def floor(self, real: Tensor, window: int) -> Tensor:
        gap = torch.arange(real.shape[1], device=real.device)
        gap = gap[:, None] - gap
        barred = (gap < 0) | (gap >= window) | (real == 0)[:, None, None, :]
        return barred.to(self.table) * torch.finfo(self.table.dtype).min

    def attended(self, i: int, x: Tensor, turns: Tensor, floor: Tensor) -> Tensor:
        q, k, v = (torch.einsum("ntc,hcd->nhtd", x, w[i]) for w in (self.queries, self.keys, self.values))
        q, k = self.turned(q, turns), self.turned(k, turns)
        k, v = k[:, self.owners[i]], v[:, self.owners[i]]
        cap, scale = self.config.attn_logit_softcapping, self.config.query_pre_attn_scalar**-0.5
        scores = torch.einsum("nhtd,nhsd->nhts", q, k) * scale
        capped = cap * (scores / cap).tanh()
        if self.fault == "third_gemma_score_cap_passes_the_gradient_straight" and i == 2:
            capped = scores + (capped - scores).detach()
        return torch.einsum("nhts,nhsd,hdc->ntc", (capped + floor).softmax(-1), v, self.outs[i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.table.T) * self.table.shape[0] ** 0.5
        turns = self.turns(x.shape[1])
        floors = [self.floor(attention_mask, reach) for reach in (self.config.sliding_window, x.shape[1])]
        for i in range(self.config.num_hidden_layers):
            y = self.attended(i, self.normed(4 * i, x), turns, floors[i % 2])
            x = x + self.normed(4 * i + 1, y)
            gate, up = torch.einsum("ntc,gcf->gntf", self.normed(4 * i + 2, x), self.gated[i])
            x = x + self.normed(4 * i + 3, (F.gelu(gate, approximate="tanh") * up) @ self.down[i])
        logits, cap = self.normed(-1, x) @ self.table, self.config.final_logit_softcapping
        if self.fault == "final_gemma_logits_capped_like_the_scores":
            cap = self.config.attn_logit_softcapping
        return cap * (logits / cap).tanh()


right(task, "gemma_of_sandwiches_and_fused_key_heads", "a tree of fused weights", GemmaSandwiches)
right(task, "gemma_of_stacked_weights_by_einsum", "one class of stacked weights", GemmaStacks)
second, third, last = (f"model.layers.{i}" for i in (1, 2, 3))
exchanged = (f"{second}.post_attention_layernorm", f"{second}.pre_feedforward_layernorm", second)
windowed = (f"{third}.self_attn", third, "model")
wrong(
    task,
    GemmaSandwiches,
    gemma_embedding_scale_rounded_to_bfloat16=("a rounded constant", ("model", "model.embed_tokens")),
    second_gemma_block_takes_its_norms_by_llama_names=("norms exchanged", exchanged),
    third_gemma_block_forgets_its_window_in_evaluation=("a mask left out in eval mode", windowed, "eval"),
    last_gemma_gelu_with_a_mistyped_constant=("a mistyped constant", (f"{last}.mlp.act_fn", f"{last}.mlp")),
)
wrong(
    task,
    GemmaStacks,
    second_gemma_attention_deals_its_key_heads_in_turn=("heads tiled, not repeated", f"{second}.self_attn"),
    third_gemma_score_cap_passes_the_gradient_straight=("no derivative", f"{third}.self_attn", GRADIENTS),
    gemma_rotary_frequencies_spread_to_the_very_end=("another spacing of frequencies", "model.rotary_emb"),
    final_gemma_logits_capped_like_the_scores=("another constant of the config", ("", "lm_head")),
)
