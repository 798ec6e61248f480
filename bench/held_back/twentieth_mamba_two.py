"""Two ports of a small Mamba-2: stages that carry a state along the chunks, and one masked attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twentieth_mamba_two import Mamba2ForCausalLM, Mamba2Mixer, counted, next_token

task = few("twentieth_mamba_two", Mamba2ForCausalLM, counted, next_token)


class Scale(nn.Module):
    """Every vector to a mean square of one, times its gains; a gate comes before that, or ``late``."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gains, self.eps, self.late = leaf(norm.weight), norm.variance_epsilon, False

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is not None and not self.late:
            x = x * gate
        x = x / (x.square().mean(-1, True) + self.eps).sqrt() * self.gains
        return x * gate if self.late else x


class Smoothed(nn.Module):
    """A part of the projection, mixed with the tokens just before: [N, T, D] -> [N, T, parts, size]."""

    def __init__(self, mixer: Mamba2Mixer, rows: range, size: int):
        super().__init__()
        rows = torch.tensor(rows)
        self.map, self.size = leaf(mixer.in_proj.weight[mixer.intermediate_size + rows].T), size
        self.taps, self.shift = leaf(mixer.conv1d.weight[rows, 0].T.flip(0)), leaf(mixer.conv1d.bias[rows])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x, total = x @ self.map, self.shift
        for lag, tap in enumerate(self.taps):
            total = total + tap * F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]]
        return (total * total.sigmoid() * real).unflatten(2, (-1, self.size))


class Memory(nn.Module):
    """Heads [group, head] that read what was written to their state; the state goes from chunk to chunk."""

    def __init__(self, mixer: Mamba2Mixer):
        super().__init__()
        shape = (mixer.n_groups, -1)
        self.pace = leaf(mixer.in_proj.weight[-mixer.num_heads :].T)
        self.pace_b, self.forget = leaf(mixer.dt_bias.view(shape)), leaf(mixer.A_log.view(shape))
        self.direct = leaf(mixer.D.view(shape))
        self.span, (self.least, self.most) = mixer.chunk_size, mixer.time_step_limit
        self.unbounded, self.cut, self.brief = False, False, False

    def chunk(self, state: Tensor, x: Tensor, write: Tensor, read: Tensor, fall: Tensor) -> tuple:
        """What the heads read within the chunk and from before; the state at its end."""
        level = fall.cumsum(1)
        gap = level[:, :, None] - level[:, None]
        past = torch.ones(*gap.shape[1:3], dtype=torch.bool, device=gap.device).tril()[..., None, None]
        near = torch.einsum("ntgs,nrgs->ntrg", read, write)[..., None]
        near = near * torch.where(past, gap, -torch.inf).exp()
        near = torch.einsum("ntrgk,nrgkp->ntgkp", near, x)
        far = torch.einsum("ntgs,ngkps->ntgkp", read, state) * level.exp()[..., None]
        end = level[:, -1]
        fresh = torch.einsum("nrgkp,nrgs->ngkps", x * (end[:, None] - level).exp()[..., None], write)
        return near + far, fresh if self.brief else fresh + state * end.exp()[..., None, None]

    def forward(self, x: Tensor, seen: Tensor, write: Tensor, read: Tensor) -> Tensor:
        seen = seen.unflatten(2, (write.shape[2], -1))
        pace = F.softplus((x @ self.pace).unflatten(2, self.pace_b.shape) + self.pace_b)
        if self.training or not self.unbounded:
            pace = pace.clamp(self.least, self.most)
        given = seen * pace[..., None], write, read, -pace * self.forget.exp()
        state, found = seen.new_zeros(*seen[:, 0].shape, write.shape[3]), []
        for pieces in zip(*(z.split(self.span, 1) for z in given), strict=True):
            y, state = self.chunk(state.detach() if self.cut else state, *pieces)
            found.append(y)
        return (torch.cat(found, 1) + self.direct[..., None] * seen).flatten(2)


class Stage(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        mixer, self.before, self.after = block.mixer, Scale(block.norm), Scale(block.mixer.norm)
        inner, size = mixer.intermediate_size, mixer.ssm_state_size
        middle, end = inner + mixer.n_groups * size, mixer.conv_dim
        self.gate, self.back = leaf(mixer.in_proj.weight[:inner].T), leaf(mixer.out_proj.weight.T)
        self.seen = Smoothed(mixer, range(inner), mixer.head_dim)
        self.write = Smoothed(mixer, range(inner, middle), size)
        self.read, self.memory = Smoothed(mixer, range(middle, end), size), Memory(mixer)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        y = self.before(x) * real
        found = self.memory(y, self.seen(y, real), self.write(y, real), self.read(y, real))
        return x + self.after(found, F.silu(y @ self.gate)) @ self.back


class CarriedStates(Port):
    """The projection cut in five, the convolution in three; one state carried along."""

    def take(self, model: Mamba2ForCausalLM) -> None:
        body = model.backbone
        self.table, self.words = leaf(body.embeddings.weight), leaf(model.lm_head.weight.T)
        self.stages, self.last = nn.ModuleList(map(Stage, body.layers)), Scale(body.norm_f)
        first, second, third = self.stages
        first.memory.cut = self.fault == "mamba_two_first_block_detaches_its_state_between_chunks"
        second.after.late = self.fault == "mamba_two_second_block_gates_behind_its_norm"
        second.memory.unbounded = self.fault == "mamba_two_second_block_limits_its_steps_in_training_only"
        third.memory.brief = self.fault == "mamba_two_last_block_passes_states_to_the_next_chunk_only"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x, real = self.table[input_ids], attention_mask.to(self.table)[..., None]
        for stage in self.stages:
            x = stage(x, real)
        x = self.last(x)
        return {"logits": x @ self.words, "last_hidden_state": x}


class OneAttention(Port):
    """Time is the last axis; a layer is a slice of each stack, and one attention over the whole text."""

    def take(self, model: Mamba2ForCausalLM) -> None:
        body, mixers = model.backbone, [layer.mixer for layer in model.backbone.layers]
        self.w, self.limits = nn.ParameterDict(), mixers[0].time_step_limit
        self.w["table"], self.w["head"] = leaf(body.embeddings.weight), leaf(model.lm_head.weight)
        self.w["scales"] = pile([*(layer.norm.weight for layer in body.layers), body.norm_f.weight])
        self.w["gated"] = pile(x.norm.weight for x in mixers)
        self.w["maps"] = pile(x.in_proj.weight for x in mixers)
        self.w["backs"] = leaf(torch.cat([x.out_proj.weight for x in mixers], 1))
        self.w["taps"] = pile(torch.cat([x.conv1d.weight[:, 0], x.conv1d.bias[:, None]], 1) for x in mixers)
        self.w["heads"] = pile(torch.stack([x.A_log, x.dt_bias, x.D]) for x in mixers)
        self.groups, self.states = mixers[0].n_groups, mixers[0].n_groups * mixers[0].ssm_state_size

    def scaled(self, x: Tensor, gains: Tensor) -> Tensor:
        return x * gains[:, None] * (x.pow(2).sum(1, keepdim=True) / len(gains) + 1e-5).rsqrt()

    def mixed(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        forget, pace_b, direct = self.w["heads"][i].unsqueeze(-1)
        heads, inner, taps = len(forget), self.w["gated"].shape[1], self.w["taps"][i]
        gate, y, pace = (self.w["maps"][i] @ x).split([inner, len(taps), heads], 1)
        y = F.pad(y, (taps.shape[1] - 2, 0)).unfold(2, taps.shape[1] - 1, 1)
        y = F.silu(torch.einsum("nctk,ck->nct", y, taps[:, :-1]) + taps[:, -1:]) * real
        value, key, query = y.split([inner, self.states, self.states], 1)
        value = value.unflatten(1, (heads, -1))
        key, query = (z.unflatten(1, (self.groups, -1)) for z in (key, query))
        pace = torch.logaddexp(pace + pace_b, torch.zeros_like(pace)).clamp(*self.limits)
        level, order = (forget.exp() * pace).cumsum(2), torch.arange(heads, device=x.device)
        owner = order // (heads // self.groups)
        if self.fault == "mamba_two_last_block_deals_its_groups_to_the_heads_in_turn" and i == 2:
            owner = order % self.groups
        gap = level[:, :, None] - level[..., None]
        ahead = torch.ones(gap.shape[2:], dtype=torch.bool, device=gap.device).triu(1)
        share = (query.mT @ key)[:, owner] * gap.masked_fill(ahead, -torch.inf).exp() * pace[:, :, None]
        share = share + torch.diag_embed(direct.expand(-1, share.shape[-1]))
        y = (value @ share.mT).flatten(1, 2) * gate * gate.sigmoid()
        return self.w["backs"][:, i * inner : (i + 1) * inner] @ self.scaled(y, self.w["gated"][i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        by_count = self.fault == "mamba_two_embedding_gradient_divided_by_the_count_of_a_token"
        x = F.embedding(input_ids, self.w["table"], scale_grad_by_freq=by_count).mT
        real = attention_mask[:, None].to(x)
        if self.fault == "mamba_two_embeddings_of_the_padding_blanked":
            x = x * real
        for i in range(len(self.w["maps"])):
            x = x + self.mixed(i, self.scaled(x, self.w["scales"][i]) * real, real)
        if self.fault == "mamba_two_final_norm_takes_the_mean_away":
            x = x - x.mean(1, keepdim=True)
        x = self.scaled(x, self.w["scales"][-1])
        return {"logits": (self.w["head"] @ x).mT, "last_hidden_state": x.mT}


mixer = [f"backbone.layers.{i}.mixer" for i in range(3)]
gradients, table = ("input gradient", "weight gradient"), "backbone.embeddings"
right(task, "mamba_two_of_carried_states", "a projection cut in parts, a state in a loop", CarriedStates)
right(task, "mamba_two_of_one_attention", "stacked weights, time last, no chunks", OneAttention)
wrong(
    task,
    CarriedStates,
    mamba_two_first_block_detaches_its_state_between_chunks=("a state cut off", mixer[0], gradients),
    mamba_two_second_block_gates_behind_its_norm=("a gate behind a norm", mixer[1] + ".norm"),
    mamba_two_second_block_limits_its_steps_in_training_only=("limits in training only", mixer[1], "eval"),
    mamba_two_last_block_passes_states_to_the_next_chunk_only=("states forgotten", mixer[2]),
)
wrong(
    task,
    OneAttention,
    mamba_two_embedding_gradient_divided_by_the_count_of_a_token=("by frequency", table, "weight gradient"),
    mamba_two_embeddings_of_the_padding_blanked=("a mask too early", ("backbone", table)),
    mamba_two_last_block_deals_its_groups_to_the_heads_in_turn=("groups in another order", mixer[2]),
    mamba_two_final_norm_takes_the_mean_away=("a norm that centers", "backbone.norm_f"),
)
