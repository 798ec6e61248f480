"""Two ports of a small Flux: a tree of streams with complex turns, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._nineteenth_flux import HEADS, WIDTH, Flux, matched_flow, noisy, timestep_embedding
from bench.held_back._sixth_ports import few

task = few("nineteenth_flux", Flux, noisy, matched_flow)
HALF = 3 * WIDTH
USES = [
    *("time_in_in_layer", "vector_in_in_layer", "guidance_in_in_layer", "out_layer", "img_in"),
    *("txt_in", "mod_lin", "qkv", "proj", "mlp_0", "mlp_2", "modulation_lin", "linear1"),
    *("linear2", "adaLN_modulation_1", "final_layer_linear"),
]


def spread(words: int, rows: int, columns: int, like: Tensor, running: bool = False) -> Tensor:
    grid = torch.cartesian_prod(*(torch.arange(n).to(like) for n in (1, rows, columns)))
    told = torch.arange(words).to(like)[:, None] * torch.tensor([0, 0, running]).to(like)
    rates = [100.0 ** -(torch.arange(0, dim, 2).to(like) / dim) for dim in (2, 4, 4)]
    return torch.cat(list(map(torch.outer, torch.cat([told, grid]).T, rates)), 1)


class Dense(nn.Module):
    def __init__(self, layer: nn.Linear, start=0, stop=None, at: int = 0):
        super().__init__()
        self.kernel, self.shift = leaf(layer.weight[start:stop, at:].T), leaf(layer.bias[start:stop])

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel) + self.shift


class Steered(nn.Module):
    """A norm by a part of a modulation, with the gate of what follows where there is one."""

    def __init__(self, layer: nn.Linear, start: int = 0, stop: int | None = None):
        super().__init__()
        self.steer, self.cut = nn.Sequential(nn.SiLU(), Dense(layer, start, stop)), False

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        steer = self.steer(given.detach() if self.cut else given)
        shift, scale, *gate = steer.unsqueeze(1).split(WIDTH, 2)
        return torch.addcmul(shift, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + scale), *gate


class Stream(nn.Module):
    def __init__(self, mod: nn.Linear, first: nn.Linear, norm: nn.Module, other: nn.Module):
        super().__init__()
        self.before, self.gains = Steered(mod, 0, HALF), pile([norm.query_norm.scale, other.key_norm.scale])
        self.parts = nn.ModuleList(Dense(first, i * WIDTH, i * WIDTH + WIDTH) for i in range(3))

    def ask(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        y, gate = self.before(x, given)
        q, k, v = (part(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.parts)
        q, k = (z / (z.pow(2).mean(-1, True) + 1e-6).sqrt() for z in (q, k))
        return q * self.gains[0], k * self.gains[1], v, y, gate


class Fellow(Stream):
    def __init__(self, block: nn.Module, name: str, crossed: bool = False):
        mod, attn, mlp = (getattr(block, f"{name}_{part}") for part in ("mod", "attn", "mlp"))
        super().__init__(mod.lin, attn.qkv, attn.norm, (block.img_attn if crossed else attn).norm)
        self.out, self.between = Dense(attn.proj), Steered(mod.lin, HALF)
        self.mlp = nn.Sequential(Dense(mlp[0]), nn.GELU("tanh"), Dense(mlp[2]))

    def answer(self, x: Tensor, mixed: Tensor, given: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        x = torch.addcmul(x, gate, self.out(mixed))
        y, gate = self.between(x, given)
        return torch.addcmul(x, gate, self.mlp(y))


class Alone(Stream):
    def __init__(self, block: nn.Module, half: bool):
        super().__init__(block.modulation.lin, block.linear1, block.norm, block.norm)
        self.out, self.half = leaf(block.linear2.weight[:, :WIDTH].T), half
        self.mlp = nn.Sequential(Dense(block.linear1, HALF), nn.GELU("tanh"), Dense(block.linear2, at=WIDTH))

    def answer(self, x: Tensor, mixed: Tensor, given: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        mixed, inner = mixed @ self.out, self.mlp(y)
        return x + gate * mixed + inner if self.half else x + gate * (mixed + inner)


class StreamsAndTurns(Port):
    """Blocks of two streams and of one; patches by a convolution, and back by folding."""

    def take(self, model: Flux) -> None:
        self.patches, self.shift = leaf(model.img_in.weight.unflatten(1, (-1, 2, 2))), leaf(model.img_in.bias)
        steers = (model.time_in, model.guidance_in, model.vector_in)
        steers = (nn.Sequential(Dense(x.in_layer), nn.SiLU(), Dense(x.out_layer)) for x in steers)
        self.clock, self.force, self.pooled = steers
        crossed = False, self.fault == "flux_last_text_keys_normed_by_the_image_scale"
        self.told = nn.ModuleList(map(Fellow, model.double_blocks, ("txt", "txt"), crossed))
        self.seen = nn.ModuleList(Fellow(block, "img") for block in model.double_blocks)
        half = False, self.fault == "flux_last_single_block_leaves_its_mlp_ungated"
        self.alone = nn.ModuleList(map(Alone, model.single_blocks, half))
        self.alone[0].before.cut = self.fault == "flux_first_single_block_detaches_its_conditioning"
        self.last, self.words = Steered(model.final_layer.adaLN_modulation[1]), Dense(model.txt_in)
        self.head = Dense(model.final_layer.linear)

    def forward(self, x: Tensor, context: Tensor, timesteps: Tensor, y: Tensor, guidance: Tensor) -> dict:
        ticks, cells = 1000 * timesteps, F.conv2d(x, self.patches, self.shift, 2)
        if self.fault == "flux_times_rounded_to_whole_thousandths_in_evaluation" and not self.training:
            ticks = ticks.round()
        given = self.clock(timestep_embedding(ticks, 16, factor=1)) + self.pooled(y)
        given = given + self.force(timestep_embedding(guidance, 16))
        turns = torch.polar(x.new_ones(()), spread(context.shape[1], *cells.shape[2:], x))
        streams = [self.words(context), cells.flatten(2).mT]
        for block in zip(self.told, self.seen, strict=True):
            streams = self.passed(block, streams, given, turns)
        z = [torch.cat(streams, 1)]
        for block in self.alone:
            z = self.passed([block], z, given, turns)
        z = self.head(self.last(z[0], given)[0][:, context.shape[1] :])
        return {"velocity": F.fold(z.mT, x.shape[2:], 2, stride=2), "img": streams[1], "txt": streams[0]}

    def passed(self, block: list, streams: list[Tensor], given: Tensor, turns: Tensor) -> list[Tensor]:
        asked = [stream.ask(x, given) for stream, x in zip(block, streams, strict=True)]
        q, k, v = (torch.cat([each[i] for each in asked], 2) for i in range(3))
        pairs = (torch.view_as_complex(x.unflatten(3, (-1, 2)).contiguous()) for x in (q, k))
        q, k = (torch.view_as_real(pair * turns).flatten(3) for pair in pairs)
        mixed = torch.cat(F.scaled_dot_product_attention(q, k, v).unbind(1), 2)
        parts = zip(block, streams, mixed.split([x.shape[1] for x in streams], 1), asked, strict=True)
        return [stream.answer(x, part, given, *each[3:]) for stream, x, part, each in parts]


class StackedFlux(Port):
    """Weights of one use in one stack, pictures before words in it; patches by shuffling pixels."""

    def take(self, model: Flux) -> None:
        named = {name.replace(".", "_"): layer for name, layer in model.named_modules()}
        stacks = {use: [layer for name, layer in named.items() if name.endswith(use)] for use in USES}
        self.w = nn.ParameterDict({use: pile(x.weight.T for x in layers) for use, layers in stacks.items()})
        self.b = nn.ParameterDict({use: pile(x.bias for x in layers) for use, layers in stacks.items()})
        self.gains = pile(torch.stack([*x.parameters()]) for x in named.values() if hasattr(x, "key_norm"))

    def by(self, use: str, x: Tensor, i: int = 0, shift: Tensor | None = None, scale: Tensor = 0) -> Tensor:
        if shift is not None:
            x = (x - x.mean(2, True)) * (x.var(2, False, True) + 1e-6).rsqrt() * (1 + scale) + shift
        return x @ self.w[use][i] + self.b[use][i]

    def mixed(self, qkv: Tensor, gains: Tensor, angles: Tensor, axes: tuple = (4,)) -> Tensor:
        qkv, cos, sin = qkv.unflatten(2, (3, HEADS, -1)), angles.cos(), angles.sin()
        qk = qkv[:, :, :2] * (qkv[:, :, :2].square().mean(axes, True) + 1e-6).rsqrt() * gains[..., None, :]
        even, odd = qk[..., ::2], qk[..., 1::2]
        q, k = torch.cat([even * cos - odd * sin, even * sin + odd * cos], 4).unbind(2)
        shares = torch.einsum("nlhd,nmhd->nhlm", q / q.shape[3] ** 0.5, k).softmax(3)
        return torch.einsum("nhlm,nmhd->nlhd", shares, qkv[:, :, 2]).flatten(2)

    def paired(self, i: int, streams: list[Tensor], vec: Tensor, angles: Tensor) -> list[Tensor]:
        steers = [self.by("mod_lin", vec, 2 * i + j).chunk(6, 2) for j in (0, 1)]
        qkv = [self.by("qkv", x, 2 * i + j, *steers[j][:2]) for j, x in enumerate(streams)]
        gains = torch.cat([self.gains[2 * i + j].expand(streams[j].shape[1], -1, -1) for j in (1, 0)])
        parts = self.mixed(torch.cat(qkv[::-1], 1), gains, angles).tensor_split([streams[1].shape[1]], 1)
        for j, (_, _, gate, shift, scale, last) in enumerate(steers):
            x = y = streams[j] + gate * self.by("proj", parts[1 - j], 2 * i + j)
            if self.fault == "flux_first_text_mlp_reads_what_came_before_its_attention" and (i, j) == (0, 1):
                y = streams[j]
            y = F.gelu(self.by("mlp_0", y, 2 * i + j, shift, scale), approximate="tanh")
            streams[j] = x + last * self.by("mlp_2", y, 2 * i + j)
        return streams

    def single(self, i: int, z: Tensor, vec: Tensor, angles: Tensor) -> Tensor:
        wide = self.fault == "flux_first_single_norm_over_all_heads_at_once" and i == 0
        shift, scale, gate = self.by("modulation_lin", vec, i).chunk(3, 2)
        qkv, y = self.by("linear1", z, i, shift, scale).tensor_split([HALF], 2)
        mixed = self.mixed(qkv, self.gains[4 + i], angles, (3, 4) if wide else (4,))
        return z + gate * self.by("linear2", torch.cat([mixed, F.gelu(y, approximate="tanh")], 2), i)

    def forward(self, x: Tensor, context: Tensor, timesteps: Tensor, y: Tensor, guidance: Tensor) -> dict:
        times, force = (timestep_embedding(part, 16) for part in (timesteps, guidance))
        given = [F.silu(self.by(use, part)) for use, part in zip(USES, (times, y, force), strict=False)]
        vec = F.silu(sum(self.by("out_layer", part, i) for i, part in enumerate(given)))[:, None]
        cells, told = F.pixel_unshuffle(x, 2), context.shape[1]
        angles = spread(told, *cells.shape[2:], x, self.fault == "flux_words_stand_in_columns")[:, None, None]
        streams = [self.by("img_in", cells.flatten(2).mT), self.by("txt_in", context)]
        streams = self.paired(1, self.paired(0, streams, vec, angles), vec, angles)
        z = self.single(1, self.single(0, torch.cat(streams[::-1], 1), vec, angles), vec, angles)[:, told:]
        shift, scale = self.by("adaLN_modulation_1", vec).chunk(2, 2)
        scale = scale - 1 if self.fault == "flux_final_layer_scales_without_the_one" else scale
        z = self.by("final_layer_linear", z, 0, shift, scale).mT.unflatten(2, cells.shape[2:])
        return {"velocity": F.pixel_shuffle(z, 2), "img": streams[0], "txt": streams[1]}


KEYS, NORM, SINGLE = "double_blocks.1.txt_attn.norm", "single_blocks.0.norm", "single_blocks.0"
BOTH, SLOPES = (NORM + ".query_norm", NORM + ".key_norm"), ("input gradient", "weight gradient")
right(task, "flux_of_streams_and_complex_turns", "split weights in a tree of streams", StreamsAndTurns)
right(task, "flux_of_stacked_weights", "stacks of weights, products over all heads", StackedFlux)
wrong(
    task,
    StreamsAndTurns,
    flux_last_single_block_leaves_its_mlp_ungated=("a gate on one branch only", "single_blocks.1"),
    flux_last_text_keys_normed_by_the_image_scale=("other stream's weight", (KEYS + ".key_norm", KEYS)),
    flux_first_single_block_detaches_its_conditioning=("detach", (SINGLE, SINGLE + ".modulation"), SLOPES),
    flux_times_rounded_to_whole_thousandths_in_evaluation=("rounded in eval", ("", "time_in"), "eval"),
)
wrong(
    task,
    StackedFlux,
    flux_first_text_mlp_reads_what_came_before_its_attention=("an older value read", "double_blocks.0"),
    flux_first_single_norm_over_all_heads_at_once=("statistics too wide", (NORM, *BOTH)),
    flux_words_stand_in_columns=("other positions", ("", "pe_embedder")),
    flux_final_layer_scales_without_the_one=("a scale without its one", "final_layer"),
)
