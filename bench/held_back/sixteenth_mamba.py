"""Two ports of Mamba: a tree whose stream is added where it is normed, and stacks with a scan by products."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixteenth_mamba import END, MambaForCausalLM, next_token_loss, prompts
from bench.held_back._sixth_ports import few

task = few("sixteenth_mamba", MambaForCausalLM, prompts, next_token_loss)


class AddNorm(nn.Module):
    """Add what the mixer before gave to the stream; the new stream, and the same at unit power."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.eps, self.carry_normed = leaf(norm.weight), norm.variance_epsilon, False

    def forward(self, change: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stream = change if stream is None else stream + change
        power = stream.pow(2).sum(-1, keepdim=True) / stream.shape[-1]
        normed = stream / (power + self.eps).sqrt() * self.gain
        return normed, normed if self.carry_normed else stream


class Inlet(nn.Module):
    """[T, N, H] -> the values [T, N, C] that see the last tokens, and the gates of them."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        value, gate = mixer.in_proj.weight.chunk(2)
        self.to_value, self.to_gate = leaf(value.T), leaf(gate.T)
        self.taps, self.shift = leaf(mixer.conv1d.weight.permute(2, 1, 0)), leaf(mixer.conv1d.bias)

    def forward(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        size, length = len(self.taps), len(x)
        value = F.pad((x @ self.to_value) * present, (0, 0, 0, 0, size - 1, 0))
        value = sum(value[k : k + length] * self.taps[k] for k in range(size)) + self.shift
        return F.silu(value) * present, F.silu(x @ self.to_gate)


class Selector(nn.Module):
    """[T, N, C] -> how far each channel steps, and what is written to and read of the state."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        squeeze, write, read = mixer.x_proj.weight.split(mixer.sizes)
        self.squeeze, self.write, self.read = leaf(squeeze.T), leaf(write.T), leaf(read.T)
        self.spread, self.delta_bias = leaf(mixer.dt_proj.weight), leaf(mixer.dt_proj.bias)
        self.bias_in_product = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        delta = F.linear(x @ self.squeeze, self.spread, self.delta_bias if self.bias_in_product else None)
        return F.softplus(delta + self.delta_bias), x @ self.write, x @ self.read


class Memory(nn.Module):
    """A state [N, S, C] that goes along with the values, in runs of ``chunk`` tokens."""

    def __init__(self, mixer: nn.Module, chunk: int = 8):
        super().__init__()
        self.log_rate, self.direct, self.chunk = leaf(mixer.A_log.T), leaf(mixer.D), chunk
        self.select, self.cut = Selector(mixer), False

    def run(self, state: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        rate, outputs = self.log_rate.exp().neg(), []
        for x, delta, write, read in zip(*parts, strict=True):
            entry = write[:, :, None] * (delta * x)[:, None]
            state = torch.addcmul(entry, (delta[:, None] * rate).exp(), state)
            outputs.append((read[:, :, None] * state).sum(1))
        return state, outputs

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = x.new_zeros(x.shape[1], *self.log_rate.shape), []
        for parts in zip(*(part.split(self.chunk) for part in (x, *self.select(x))), strict=True):
            state, some = self.run(state.detach() if self.cut else state, parts)
            outputs += some
        return torch.addcmul(torch.stack(outputs), x, self.direct)


class Stage(nn.Module):
    """Norm of the stream, inlet, memory and the way back."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.enter, self.inlet, self.memory = AddNorm(block.norm), Inlet(block.mixer), Memory(block.mixer)
        self.back = leaf(block.mixer.out_proj.weight.T)

    def forward(self, change: Tensor, stream: Tensor | None, present: Tensor) -> tuple[Tensor, Tensor]:
        x, stream = self.enter(change, stream)
        value, gate = self.inlet(x, present)
        return (self.memory(value) * gate) @ self.back, stream


class StagedMamba(Port):
    """Time first; each stage gives its change and the stream that it is to be added to."""

    def take(self, model: MambaForCausalLM) -> None:
        body = model.backbone
        blank = END if self.fault == "mamba_padding_token_embedding_has_no_gradient" else None
        table = body.embeddings.weight.detach().clone()
        self.words = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=blank)
        self.stages, self.leave = nn.ModuleList(Stage(x) for x in body.layers), AddNorm(body.norm_f)
        first, middle, last = self.stages
        first.memory.cut = self.fault == "mamba_first_scan_state_detached_between_chunks"
        middle.memory.select.bias_in_product = self.fault == "mamba_middle_time_step_bias_added_twice"
        last.enter.carry_normed = self.fault == "mamba_last_residual_stream_taken_behind_the_norm"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, stream = self.words(input_ids.T), None
        present = attention_mask.T[:, :, None].to(x)
        for stage in self.stages:
            x, stream = stage(x, stream, present)
        return F.linear(self.leave(x, stream)[0].transpose(0, 1), self.words.weight)


class StackedMamba(Port):
    """Weights of all layers in stacks; while it trains, the scan is a product with all pairs of tokens."""

    def take(self, model: MambaForCausalLM) -> None:
        body, mixers = model.backbone, [layer.mixer for layer in model.backbone.layers]
        self.rank, self.states, _ = mixers[0].sizes
        self.eps, self.table = body.norm_f.variance_epsilon, leaf(body.embeddings.weight)
        self.gains = pile([*(layer.norm.weight for layer in body.layers), body.norm_f.weight])
        self.into = pile(x.in_proj.weight.unflatten(0, (2, -1)) for x in mixers)
        self.taps = pile(torch.cat([x.conv1d.weight[:, 0], x.conv1d.bias[:, None]], 1) for x in mixers)
        self.params = pile(x.x_proj.weight.T for x in mixers)
        self.rise = pile(torch.cat([x.dt_proj.weight.T, x.dt_proj.bias[None]]) for x in mixers)
        self.state = pile(torch.cat([x.A_log, x.D[:, None]], 1) for x in mixers)
        self.out = pile(x.out_proj.weight for x in mixers)

    def norm(self, i: int, x: Tensor) -> Tensor:
        if self.fault == "mamba_final_norm_is_a_layer_norm" and i == len(self.into):
            x = x - x.mean(-1, keepdim=True)
        power = torch.einsum("nth,nth->nt", x, x) / x.shape[-1]
        return self.gains[i] * x * (power + self.eps)[..., None] ** -0.5

    def conv(self, i: int, x: Tensor) -> Tensor:
        """A product of [N, T, C] with a band of the lags that each channel knows."""
        size, time = self.taps.shape[2] - 1, torch.arange(x.shape[1], device=x.device)
        lag = time[:, None] - time
        flipped = self.fault == "mamba_middle_conv_taps_read_backwards" and i == 1
        tap = (lag if flipped else size - 1 - lag).clamp(0, size - 1)
        band = self.taps[i][:, tap] * ((lag >= 0) & (lag < size))
        return torch.einsum("cts,nsc->ntc", band, x) + self.taps[i, :, size]

    def pairs(self, path: Tensor, fed: Tensor, read: Tensor) -> Tensor:
        """All tokens at once: what each put into the state, decayed to each later one."""
        along = path.cumsum(1)
        late = torch.ones(path.shape[1], path.shape[1], dtype=torch.bool, device=path.device).triu(1)
        gaps = (along[:, :, None] - along[:, None]).masked_fill(late[:, :, None, None], -torch.inf)
        return torch.einsum("ntscp,nscp,ntp->ntc", gaps.exp(), fed, read)

    def steps(self, i: int, path: Tensor, fed: Tensor, read: Tensor) -> Tensor:
        """One token after the other, with little memory."""
        states = [torch.zeros_like(fed[:, 0])]
        for t in range(fed.shape[1]):
            states.append(path[:, t].exp() * states[-1] + fed[:, t])
        early = self.fault == "mamba_middle_evaluation_scan_reads_the_state_of_before" and i == 1
        return torch.einsum("tncp,ntp->ntc", torch.stack(states[:-1] if early else states[1:]), read)

    def mixed(self, i: int, x: Tensor, mask: Tensor) -> Tensor:
        x, z = torch.einsum("nth,kch->kntc", x, self.into[i])
        x = self.conv(i, x * mask)
        x = x * x.sigmoid() * mask
        low, given, read = (x @ self.params[i]).tensor_split((self.rank, self.rank + self.states), -1)
        raw = low @ self.rise[i, :-1] + self.rise[i, -1]
        delta = torch.logaddexp(raw, torch.zeros_like(raw))[..., None]
        rates, skip = -self.state[i, :, :-1].exp(), self.state[i, :, -1]
        path = delta * rates
        exact = self.fault == "mamba_last_scan_input_by_an_exact_hold" and i == 2
        fed = (path.expm1() / rates if exact else delta) * given[:, :, None] * x[..., None]
        y = self.pairs(path, fed, read) if self.training else self.steps(i, path, fed, read)
        return torch.einsum("ntc,hc->nth", (y + skip * x) * z * z.sigmoid(), self.out[i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, mask = self.table[input_ids], attention_mask[..., None].to(self.table)
        for i in range(len(self.into)):
            x = x + self.mixed(i, self.norm(i, x), mask)
        return torch.einsum("nth,vh->ntv", self.norm(len(self.into), x), self.table)


right(task, "mamba_of_stages_with_the_time_first", "a tree with other borders", StagedMamba)
right(task, "mamba_of_stacks_with_a_scan_by_pairs", "flat, a scan by products of pairs", StackedMamba)
mixers = [f"backbone.layers.{i}.mixer" for i in range(3)]
wrong(
    task,
    StagedMamba,
    mamba_middle_time_step_bias_added_twice=("a bias added twice", (f"{mixers[1]}.dt_proj", mixers[1])),
    mamba_last_residual_stream_taken_behind_the_norm=("another residual", "backbone.layers.2"),
    mamba_first_scan_state_detached_between_chunks=("a detach too many", mixers[0], GRADIENTS),
    mamba_padding_token_embedding_has_no_gradient=("a row fixed", "backbone.embeddings", "weight gradient"),
)
wrong(
    task,
    StackedMamba,
    mamba_final_norm_is_a_layer_norm=("another norm", "backbone.norm_f"),
    mamba_middle_conv_taps_read_backwards=("a kernel flipped", f"{mixers[1]}.conv1d"),
    mamba_last_scan_input_by_an_exact_hold=("another discretisation", mixers[2]),
    mamba_middle_evaluation_scan_reads_the_state_of_before=("an old state", mixers[1], "eval"),
)
