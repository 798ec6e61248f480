"""Two ports of a small Zamba2: a tree of parts with the time first, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_first_zamba as zamba
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_first_zamba", zamba.Zamba2ForCausalLM, zamba.sentences, zamba.next_token)
EPS, HYBRID, WIDTH, INNER, KERNEL = zamba.EPS, zamba.HYBRID, zamba.WIDTH, zamba.INNER, zamba.KERNEL
GROUPS, HEADS, STATE, LIMITS = zamba.GROUPS, zamba.HEADS, zamba.STATE, zamba.LIMITS
QUERIES, KEYS, HEAD = zamba.QUERIES, zamba.KEYS, zamba.HEAD
PER, SIZE, BOTH = HEADS // GROUPS, INNER // HEADS, 2 * GROUPS * STATE


def unit(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def of_mixer(layer: nn.Module) -> list[Tensor]:
    decoder = getattr(layer, "mamba_decoder", layer)
    before, x = decoder.input_layernorm.weight, decoder.mamba
    taps = torch.cat([x.conv1d.weight[:, 0].T, x.conv1d.bias[None]])
    heads = torch.stack([x.dt_bias, x.A_log, x.D])
    return [before, x.in_proj.weight.T, taps, heads, x.norm.weight, x.out_proj.weight.T]


def of_block(block: nn.Module) -> list[Tensor]:
    x, y, norms = block.self_attn, block.feed_forward, (block.input_layernorm, block.pre_ff_layernorm)
    joint = torch.cat([x.q_proj.weight, x.k_proj.weight, x.v_proj.weight]).T
    norms = torch.cat([norm.weight for norm in norms])
    return [norms, joint, x.o_proj.weight.T, y.gate_up_proj.weight.T, y.down_proj.weight.T]


def filtered(x: Tensor, taps: Tensor) -> Tensor:
    """A causal convolution of [T, N, C], channel by channel, as a sum of shifted products; then SiLU."""
    padded = F.pad(x, (0, 0, 0, 0, KERNEL - 1, 0))
    return F.silu(taps[-1] + sum(padded[i : i + len(x)] * tap for i, tap in enumerate(taps[:-1])))


class Selective(nn.Module):
    """[T, N, D] -> its states, weighed by the gate and projected, all steps at once."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        before, inward, taps, heads, scale, out = of_mixer(layer)
        self.before, self.taps, self.scale, self.out = map(leaf, (before, taps, scale, out))
        self.gate, self.stream, self.pace = map(leaf, inward.split([INNER, INNER + BOTH, HEADS], 1))
        self.offset, self.rate, self.skip = map(leaf, heads)
        self.in_turn = self.silent = self.free = False

    def heads(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (GROUPS, STATE))
        return x.repeat(1, 1, PER, 1) if self.in_turn else x.repeat_interleave(PER, 2)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = unit(x) * self.before * real
        gate = F.silu(x @ self.gate)
        v, b, c = filtered(x @ self.stream, self.taps).split([INNER, BOTH // 2, BOTH // 2], 2)
        v, b, c = v.unflatten(-1, (HEADS, SIZE)), self.heads(b), self.heads(c)
        pace = F.softplus(x @ self.pace + self.offset)
        pace = pace if self.free and not self.training else pace.clamp(*LIMITS)
        past = torch.cumsum(pace * self.rate.exp(), 0)
        later = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)[..., None, None]
        decay = (past - past[:, None]).masked_fill(later, -math.inf).exp()
        y = torch.einsum("tnhk,snhk,tsnh,snh,snhp->tnhp", c, b, decay, pace, v) + v * self.skip[:, None]
        y = y.flatten(2) * (gate.detach() if self.silent else gate)
        return (unit(y.unflatten(-1, (GROUPS, -1))).flatten(2) * self.scale) @ self.out


class Lens(nn.Module):
    """What all uses share: attention of the stream and the first embeddings, each with its own weights."""

    def __init__(self, block: nn.Module, whole: bool):
        super().__init__()
        norms, joint, *others = of_block(block)
        *scales, self.middle = map(leaf, norms.split(WIDTH))
        self.scales, (self.stream, self.origin) = nn.ParameterList(scales), map(leaf, joint.split(WIDTH))
        self.out, self.wide, self.narrow = map(leaf, others)
        self.factor = math.sqrt((1 if whole else 2) / HEAD)

    def forward(self, x: Tensor, first: Tensor, seen: Tensor, down, up, back) -> Tensor:
        size = ((x.square().mean(-1) + first.square().mean(-1)) / 2 + EPS).rsqrt()[..., None]
        joint = (x * size * self.scales[0]) @ self.stream + (first * size * self.scales[1]) @ self.origin
        q, k, v = joint.unflatten(-1, (-1, HEAD)).split([QUERIES, KEYS, KEYS], 2)
        scores = torch.einsum("tngjd,sngd->ngjts", q.unflatten(2, (KEYS, -1)), k) * self.factor
        weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
        y = torch.einsum("ngjts,sngd->tngjd", weights, v).flatten(2) @ self.out
        gate, value = (unit(y) * self.middle @ (self.wide + (up @ down).T)).chunk(2, -1)
        return (F.gelu(gate) * value) @ self.narrow @ back.T


class TimeFirstZamba(Port):
    """[T, N, D] throughout; scans as products with a matrix of decays."""

    def take(self, model: nn.Module) -> None:
        layers, fault = model.model.layers, self.fault
        self.words, self.last = leaf(model.lm_head.weight), leaf(model.model.final_layernorm.weight)
        block = layers[HYBRID[0]].shared_transformer
        adapters = block.feed_forward.gate_up_proj_adapter_list
        self.lens = Lens(block, fault == "zamba_attention_scaled_by_its_whole_head")
        self.mixers = nn.ModuleList(map(Selective, layers))
        own = ((*adapters[j], layers[i].linear) for j, i in enumerate(HYBRID))
        self.uses = nn.ModuleList(nn.ParameterList(leaf(f.weight) for f in each) for each in own)
        self.mixers[0].in_turn = fault == "zamba_first_layer_heads_take_their_groups_in_turn"
        self.mixers[3].free = fault == "zamba_fourth_time_steps_free_in_evaluation"
        self.mixers[4].silent = fault == "zamba_last_norm_takes_its_gate_for_a_constant"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = first = self.words[input_ids.T]
        real, order = attention_mask.T[..., None], torch.arange(len(x), device=x.device)
        seen = (attention_mask[:, None] > 0) & (order[:, None] > order) | (order[:, None] == order)
        for i, mixer in enumerate(self.mixers):
            more = self.lens(x, first, seen, *self.uses[HYBRID.index(i)]) if i in HYBRID else 0
            x = x + mixer(x + more, real)
        return (unit(x) @ (self.words * self.last).T).transpose(0, 1)


class StackedZamba(Port):
    """Stacks of the mixers' weights, and a state that is carried step by step."""

    def take(self, model: nn.Module) -> None:
        layers, block = model.model.layers, model.model.layers[HYBRID[0]].shared_transformer
        each = zip(*map(of_mixer, layers), strict=True)
        self.entry, self.inward, self.taps, self.heads, self.scale, self.outward = map(pile, each)
        self.norms, self.qkv, self.o, self.wide, self.narrow = map(leaf, of_block(block))
        adapters = block.feed_forward.gate_up_proj_adapter_list
        self.back = pile(layers[i].linear.weight.T for i in HYBRID)
        self.low, self.high = (pile(x[i].weight.T for x in adapters) for i in (0, 1))
        self.last, self.words = leaf(model.model.final_layernorm.weight), leaf(model.lm_head.weight)

    def mix(self, i: int, x: Tensor, mask: Tensor) -> Tensor:
        (offset, rate, skip), length = self.heads[i], x.shape[1]
        if self.fault == "zamba_first_layer_decay_rates_held_constant" and i == 0:
            rate = rate.detach()
        x = torch.where(mask[..., None] > 0, unit(x) * self.entry[i], 0) @ self.inward[i]
        gate, mixed, pace = x.split([INNER, INNER + BOTH, HEADS], 2)
        windows = F.pad(mixed, (0, 0, KERNEL - 1, 0)).unfold(1, KERNEL, 1)
        mixed = F.silu((windows * self.taps[i, :-1].T).sum(-1) + self.taps[i, -1])
        v, b, c = (y.unflatten(2, (GROUPS, -1)) for y in mixed.split([INNER, BOTH // 2, BOTH // 2], 2))
        v = v.unflatten(3, (PER, SIZE))
        pace = F.softplus(pace + offset).clamp(*LIMITS)
        keep, pace = (x.unflatten(2, (GROUPS, PER, 1)) for x in (torch.exp(-rate.exp() * pace), pace))
        state, fed, found = 0, pace * v, []
        for t in range(length):
            state = keep[:, t, ..., None] * state + torch.einsum("ngjp,ngs->ngjps", fed[:, t], b[:, t])
            found.append(torch.einsum("ngjps,ngs->ngjp", state, c[:, t]))
        y = torch.stack(found, 1) + skip.view(GROUPS, PER, 1) * v
        y = y.flatten(3) * F.silu(gate).unflatten(2, (GROUPS, -1))
        if self.fault == "zamba_third_layer_gated_norm_over_all_groups" and i == 2:
            y = y.flatten(2)
        return (unit(y).reshape(gate.shape) * self.scale[i]) @ self.outward[i]

    def share(self, j: int, x: Tensor, seen: Tensor) -> Tensor:
        heads = (unit(x) * self.norms[: 2 * WIDTH] @ self.qkv).unflatten(2, (-1, HEAD)).transpose(1, 2)
        q, k, v = heads.split([QUERIES, KEYS, KEYS], 1)
        y = F.scaled_dot_product_attention(q, k, v, seen[:, None], scale=(2 / HEAD) ** 0.5, enable_gqa=True)
        y = unit(y.transpose(1, 2).flatten(2) @ self.o) * self.norms[2 * WIDTH :]
        gate, value = (y @ self.wide + y @ self.low[j] @ self.high[j]).chunk(2, 2)
        smooth = "tanh" if self.fault == "zamba_shared_gelu_by_tanh" else "none"
        return (F.gelu(gate, approximate=smooth) * value) @ (self.narrow @ self.back[j])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = first = F.embedding(input_ids, self.words)
        square = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = (attention_mask[:, None] > 0) & square.tril() | square.tril() & square.triu()
        for i in range(len(self.entry)):
            joined = x + self.share(HYBRID.index(i), torch.cat([x, first], 2), seen) if i in HYBRID else x
            if self.fault == "zamba_second_hybrid_keeps_the_shared_output_in_the_residual" and i == 3:
                x = joined
            x = x + self.mix(i, joined, attention_mask)
        return F.linear(unit(x) * self.last, self.words)


right(task, "zamba_with_the_time_first", "a tree of other parts", TimeFirstZamba)
right(task, "zamba_in_stacks", "flat code", StackedZamba)
ATTENTION, MLP = (f"model.layers.1.shared_transformer.{x}" for x in ("self_attn", "feed_forward"))
BOTH_GRADIENTS = ("input gradient", "weight gradient")
wrong(
    task,
    TimeFirstZamba,
    zamba_first_layer_heads_take_their_groups_in_turn=("another order of heads", "model.layers.0.mamba"),
    zamba_fourth_time_steps_free_in_evaluation=("mode", "model.layers.3.mamba_decoder.mamba", "eval"),
    zamba_last_norm_takes_its_gate_for_a_constant=("detach", "model.layers.4.mamba.norm", BOTH_GRADIENTS),
    zamba_attention_scaled_by_its_whole_head=("another scale", ATTENTION),
)
wrong(
    task,
    StackedZamba,
    zamba_first_layer_decay_rates_held_constant=("detach", "model.layers.0.mamba", "weight gradient"),
    zamba_third_layer_gated_norm_over_all_groups=("another norm", "model.layers.2.mamba.norm"),
    zamba_shared_gelu_by_tanh=("another formula", (f"{MLP}.act_fn", MLP)),
    zamba_second_hybrid_keeps_the_shared_output_in_the_residual=("residual", "model.layers.3.mamba_decoder"),
)
