"""Two ports of RecurrentGemma: branches with time first, and stacked weights with scans as matrices."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourteenth_recurrent_gemma import RecurrentGemmaForCausalLM, next_token, packed
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fourteenth_recurrent_gemma", RecurrentGemmaForCausalLM, packed, next_token)


def root(x: Tensor, factor: float = 4.0) -> Tensor:
    """A square root whose slope is that of ``factor`` times x, bounded."""
    here = x.detach()
    return here.sqrt() + (x - here) * (factor * here).clamp(min=1e-6).rsqrt()


def dense(*layers: nn.Linear) -> nn.Linear:
    weight = leaf(torch.cat([layer.weight for layer in layers]))
    new = nn.Linear(*weight.T.shape, bias=layers[0].bias is not None)
    new.weight = weight
    new.bias = new.bias if new.bias is None else leaf(torch.cat([layer.bias for layer in layers]))
    return new


class Recurrence(nn.Module):
    def __init__(self, conv: nn.Conv1d, lru: nn.Module):
        super().__init__()
        self.kernel, self.shift = leaf(conv.weight), leaf(conv.bias)
        self.gates = leaf(torch.cat([lru.input_gate_weight, lru.recurrent_gate_weight], 2))
        self.offsets = leaf(torch.cat([lru.input_gate_bias, lru.recurrent_gate_bias], 1))
        self.speed, self.factor, self.plain = leaf(lru.recurrent_param), 4.0, True

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x, begins = F.pad(x.permute(1, 2, 0), (self.kernel.shape[2] - 1, 0)), position[:, :, None] == 0
        x = F.conv1d(x, self.kernel, self.shift, groups=len(self.kernel)).permute(2, 0, 1)
        gates = torch.einsum("tnhi,hio->tnho", x.unflatten(2, (len(self.gates), -1)), self.gates)
        allow, move = (gate.flatten(2) for gate in (gates + self.offsets).sigmoid().chunk(2, -1))
        decay = move * F.softplus(self.speed) * -8
        x = x * allow * root(1 - (decay + decay).exp(), self.factor).masked_fill(begins & self.plain, 1.0)
        keep, states = decay.exp().masked_fill(begins, 0.0), [x[0]]
        for now, kept in zip(x[1:], keep[1:], strict=True):
            states.append(torch.addcmul(now, kept, states[-1]))
        return torch.stack(states)


class Branch(nn.Module):
    def __init__(self, norm: nn.Module, block: nn.Module):
        super().__init__()
        self.gain, self.eps, self.early = leaf(norm.weight), norm.eps, True
        self.take(block)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        y = F.rms_norm(x, self.gain.shape, 1 + self.gain, self.eps)
        return (x if self.early else y) + self.leave(self.inner(y, position))


class Gated(Branch):
    def take(self, block: nn.Module) -> None:
        gate, rest, leave = (part for part in block.children() if isinstance(part, nn.Linear))
        self.enter, self.leave = dense(gate, rest), dense(leave)
        self.core = Recurrence(block.conv_1d, block.rg_lru) if hasattr(block, "rg_lru") else None

    def inner(self, x: Tensor, position: Tensor) -> Tensor:
        gate, x = self.enter(x).chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * (x if self.core is None else self.core(x, position))


class Local(Branch):
    def take(self, block: nn.Module) -> None:
        self.enter, self.leave = dense(block.q_proj, block.k_proj, block.v_proj), dense(block.o_proj)
        self.size, self.span = block.head_dim, 5
        self.register_buffer("speeds", block.rotary_emb.inv_freq.clone())

    def inner(self, x: Tensor, position: Tensor) -> Tensor:
        pieces, count = self.enter(x).unflatten(-1, (-1, self.size)), len(self.speeds)
        angles, value = position[:, :, None, None] * self.speeds, pieces[:, :, -1]
        a, b, rest = pieces[:, :, :-1].split([count, count, self.size - 2 * count], -1)
        cos, sin = angles.cos(), angles.sin()
        heads = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
        scores = torch.einsum("tnhd,snd->nhts", heads[:, :, :-1], heads[:, :, -1]) / self.size**0.5
        seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril().triu(1 - self.span)
        share = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("nhts,snd->tnhd", share, value).flatten(2)


class GriffinBranches(Port):
    """A row of eight branches on [T, N, C]."""

    def take(self, model: RecurrentGemmaForCausalLM) -> None:
        core, self.rows = model.model, nn.ModuleList()
        for layer in core.layers:
            branch = Gated if hasattr(layer.temporal_block, "rg_lru") else Local
            self.rows.append(branch(layer.temporal_pre_norm, layer.temporal_block))
            self.rows.append(Gated(layer.channel_pre_norm, layer.mlp_block))
        self.table, self.gain = leaf(core.embed_tokens.weight), leaf(core.final_norm.weight)
        self.rows[0].core.plain = self.fault != "griffin_document_start_is_normalized_too"
        self.rows[2].early = self.fault != "griffin_second_recurrence_is_added_to_its_normed_input"
        self.rows[2].core.factor = 1.0 if self.fault == "griffin_second_root_has_twice_the_slope" else 4.0
        if self.fault == "griffin_rotary_speeds_spread_over_the_whole_head":
            self.rows[4].speeds = 1e4 ** -(torch.arange(0, 4, 2) / self.rows[4].size)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = F.embedding(tokens.T, self.table) * self.table.shape[1] ** 0.5
        for branch in self.rows:
            x = branch(x, position.T)
        x = F.rms_norm(x, self.gain.shape, 1 + self.gain, 1e-6)
        return 6 * (F.linear(x, self.table) / 6).tanh().transpose(0, 1)


class GriffinStacks(Port):
    """Weights of alike blocks in stacks; a scan is a product with the decays between all pairs of tokens."""

    def take(self, model: RecurrentGemmaForCausalLM) -> None:
        core, local = model.model, model.model.layers[2].temporal_block
        blocks, mlps = [core.layers[i].temporal_block for i in (0, 1, 3)], [x.mlp_block for x in core.layers]
        norms = [norm for x in core.layers for norm in (x.temporal_pre_norm, x.channel_pre_norm)]
        stacks = {name: [getattr(x, "linear_" + name) for x in blocks] for name in ("y", "x", "out")}
        stacks |= {name: [getattr(x, name + "_proj") for x in mlps] for name in ("gate", "up", "down")}
        self.maps = nn.ParameterDict({name: pile(x.weight.T for x in stacks[name]) for name in stacks})
        self.adds = nn.ParameterDict({name: pile(x.bias for x in stacks[name]) for name in stacks})
        self.gains = pile(x.weight for x in (*norms, core.final_norm))
        self.table, self.close_b = leaf(model.lm_head.weight.T), leaf(local.o_proj.bias)
        self.taps = pile(torch.cat([x.conv_1d.weight[:, 0], x.conv_1d.bias[:, None]], 1) for x in blocks)
        cells = [x.rg_lru for x in blocks]
        self.speeds = pile(x.recurrent_param for x in cells)
        self.gates = pile(torch.stack([x.input_gate_weight, x.recurrent_gate_weight]) for x in cells)
        self.gates_b = pile(torch.stack([x.input_gate_bias, x.recurrent_gate_bias]) for x in cells)
        eyes = torch.cat([local.q_proj.weight, local.k_proj.weight, local.v_proj.weight])
        self.eyes, self.close = (leaf(x.unflatten(0, (-1, 8))) for x in (eyes, local.o_proj.weight.T))
        self.register_buffer("turns", local.rotary_emb.inv_freq.clone())

    def product(self, name: str, i: int, x: Tensor) -> Tensor:
        return x @ self.maps[name][i] + self.adds[name][i]

    def normed(self, i: int, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.gains[i])

    def scanned(self, i: int, x: Tensor, begins: Tensor) -> Tensor:
        gates = torch.einsum("nthi,ghio->gntho", x.unflatten(2, (-1, 10)), self.gates[i])
        allow, move = (gates + self.gates_b[i][:, None, None]).sigmoid().flatten(3)
        turned = self.fault == "griffin_last_decay_parameter_has_the_sign_of_the_paper" and i == 2
        decay = -8 * move * F.softplus(-self.speeds[i] if turned else self.speeds[i])
        x = x * allow * root(-torch.expm1(2 * decay)).masked_fill(begins[:, :, None], 1.0)
        path, document = decay.cumsum(1), begins.cumsum(1)
        apart = ~(document[:, :, None] == document[:, None]).tril()[..., None]
        power = (path[:, :, None] - path[:, None]).masked_fill(apart, float("-inf")).exp()
        return torch.einsum("ntsc,nsc->ntc", power, x)

    def attended(self, x: Tensor, position: Tensor) -> Tensor:
        span = 6 if self.fault == "griffin_window_reaches_one_token_too_far" else 5
        x = torch.einsum("ntc,hdc->nthd", x, self.eyes)
        angles = position[:, :, None, None] * self.turns
        z = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angles), angles)
        z = torch.cat([z.real, z.imag, x[..., 4:]], -1)
        keys, values = F.pad(torch.stack([z[:, :, -2], x[:, :, -1]]), (0, 0, span - 1, 0)).unfold(2, span, 1)
        scores = torch.einsum("nthd,ntdw->nthw", z[:, :, :-2], keys) * self.eyes.shape[1] ** -0.5
        void = torch.ones_like(scores[0, :, 0], dtype=torch.bool).flip(1).triu(1).flip(1)[:, None]
        share = scores.masked_fill(void, float("-inf")).softmax(-1)
        return torch.einsum("nthw,ntdw,hdc->ntc", share, values, self.close) + self.close_b

    def recurred(self, i: int, x: Tensor, position: Tensor) -> Tensor:
        windows = F.pad(self.product("x", i, x), (0, 0, 3, 0)).unfold(1, 4, 1)
        if self.fault == "griffin_second_conv_stops_at_the_document_start" and i == 1:
            windows = windows * (position[:, :, None, None] >= torch.arange(3, -1, -1, device=x.device))
        y = torch.einsum("ntck,ck->ntc", windows, self.taps[i, :, :4]) + self.taps[i, :, 4]
        y = self.scanned(i, y, position == 0)
        return self.product("out", i, y * F.gelu(self.product("y", i, x), approximate="tanh"))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = self.table.T[tokens] * len(self.table) ** 0.5
        for i, own in enumerate((0, 1, None, 2)):
            y = self.normed(2 * i, x)
            x = x + (self.attended(y, position) if own is None else self.recurred(own, y, position))
            y = self.normed(2 * i + 1, x)
            gate = F.gelu(self.product("gate", i, y), approximate="tanh")
            x = x + self.product("down", i, gate * self.product("up", i, y))
        logits = self.normed(8, x) @ self.table
        bare = self.fault == "griffin_logits_without_their_cap_in_evaluation" and not self.training
        return logits if bare else torch.tanh(logits / 6) * 6


right(task, "griffin_of_branches_with_time_first", "fused products, a row of branches", GriffinBranches)
right(task, "griffin_of_stacks_and_decay_matrices", "stacked weights, scans as products", GriffinStacks)
first, second, third, fourth = (f"model.layers.{i}.temporal_block" for i in range(4))
wrong(
    task,
    GriffinBranches,
    griffin_document_start_is_normalized_too=("a special case left out", first + ".rg_lru"),
    griffin_second_recurrence_is_added_to_its_normed_input=("another residual", "model.layers.1"),
    griffin_second_root_has_twice_the_slope=("a wrong slope", second + ".rg_lru", GRADIENTS),
    griffin_rotary_speeds_spread_over_the_whole_head=("other frequencies", (third + ".rotary_emb", third)),
)
wrong(
    task,
    GriffinStacks,
    griffin_second_conv_stops_at_the_document_start=("a border too many", (second + ".conv_1d", second)),
    griffin_window_reaches_one_token_too_far=("off by one", (third, "model")),
    griffin_last_decay_parameter_has_the_sign_of_the_paper=("a sign", fourth + ".rg_lru"),
    griffin_logits_without_their_cap_in_evaluation=("another mode of evaluation", ("", "lm_head"), "eval"),
)
