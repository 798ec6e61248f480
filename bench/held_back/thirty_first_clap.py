"""Two ports of a small CLAP: a tree with the channels last, and one class of stacked weights."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_first_clap import PAD, PATCH, RATIO, SIZE, WINDOW, ClapModel, contrast, sounds

task = few("thirty_first_clap", ClapModel, sounds, contrast)


def rows(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.flatten(1).T, layer.bias[None]])


def times(x: Tensor, w: Tensor) -> Tensor:
    return x @ w[:-1] + w[-1]


def even(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *w, eps)


def mix(x: Tensor, w: list[Tensor], heads: int, bias: Tensor) -> Tensor:
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in times(x, w[0]).chunk(3, -1))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5 + bias
    return times(torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v).flatten(-2), w[1])


def packed(layer: nn.Module) -> list[Tensor]:
    """The products transposed, each with its bias as the last row, then the norms, then the rest."""
    dense = [rows(x) for x in layer.modules() if isinstance(x, nn.Linear)]
    norms = [y for x in layer.modules() if isinstance(x, nn.LayerNorm) for y in (x.weight, x.bias)]
    rest = layer.attention.self.parameters(recurse=False)
    return [torch.cat(dense[:3], 1), *dense[3:], torch.stack(norms), *rest]


def stacks(*groups: nn.ModuleList) -> nn.ParameterList:
    return nn.ParameterList(pile(x) for g in groups for x in zip(*map(packed, g), strict=True))


def text_layers(y: Tensor, real: Tensor, stack: nn.ParameterList, ways: tuple[str, str]) -> Tensor:
    bias = torch.where(real, 0.0, -math.inf).to(y)[:, None, None]
    for *w, way in zip(*stack, ways, strict=True):
        y = even(y + mix(y, w, 2, bias), w[4][:2], 1e-12)
        y = even(y + times(F.gelu(times(y, w[2]), approximate=way), w[3]), w[4][2:], 1e-12)
    return y[:, 0]


class Block(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        w, self.heads, self.seam = packed(layer), layer.attention.self.heads, True
        self.before, self.after = deepcopy(layer.layernorm_before), deepcopy(layer.layernorm_after)
        self.into, self.out = leaf(w[0]), deepcopy(layer.attention.output.dense)
        self.near, self.shift = leaf(w[5].T.unflatten(1, (2 * WINDOW - 1, -1))), layer.shift_size
        self.wide = deepcopy(nn.Sequential(layer.intermediate.dense, nn.GELU(), layer.output.dense))

    def mask(self, side: int) -> Tensor:
        apart = torch.arange(WINDOW)[:, None] - torch.arange(WINDOW) + WINDOW - 1
        near = self.near[:, apart[:, None, :, None], apart[:, None]].flatten(3).flatten(1, 2)
        edge = torch.arange(side).unflatten(0, (-1, WINDOW)) >= side - self.shift * self.seam
        kind = (2 * edge[:, None, :, None] + edge[None, :, None]).flatten(2)
        return near - 100.0 * (kind[..., None] != kind[..., None, :])[:, :, None]

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).roll((-self.shift, -self.shift), (1, 2))
        y = y.unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW)).transpose(2, 3).flatten(3, 4)
        q, k, v = times(y, self.into).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        y = F.scaled_dot_product_attention(q, k, v, self.mask(x.shape[1])).transpose(-2, -3).flatten(-2)
        y = self.out(y).unflatten(3, (WINDOW, WINDOW)).transpose(2, 3)
        x = x + y.flatten(3, 4).flatten(1, 2).roll((self.shift, self.shift), (1, 2))
        return x + self.wide(self.after(x))


class Halving(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.norm, self.mix, self.by_rows = deepcopy(layer.norm), deepcopy(layer.reduction), False

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5)
        return self.mix(self.norm((x.transpose(3, 4) if self.by_rows else x).flatten(3)))


class ClapOfTrees(Port):
    """Grids with the channels last, fused queries, keys and values, positions among the masks."""

    def take(self, model: ClapModel) -> None:
        ear, words = model.audio_model, model.text_model
        start, (first, second) = ear.patch_embed.norm, ear.layers
        self.mels, self.patch = Rows(ear.batch_norm), leaf(rows(ear.patch_embed.proj))
        self.grid = nn.Sequential(deepcopy(start), *map(Block, first.blocks), Halving(first.downsample))
        self.grid.extend([*map(Block, second.blocks), deepcopy(ear.norm)])
        self.grid[2].seam = self.fault != "clap_first_shifted_block_attends_across_the_seam"
        self.grid[3].by_rows = self.fault == "clap_merging_takes_its_corners_row_by_row"
        self.word, self.place = (leaf(x.weight) for x in list(words.embeddings)[:2])
        self.read, self.pool = deepcopy(words.embeddings.LayerNorm), deepcopy(words.pooler)
        self.heads = deepcopy(nn.ModuleList([model.audio_projection, model.text_projection]))
        self.text, self.heat = stacks(words.encoder.layer), pile((model.logit_scale_a, model.logit_scale_t))

    def unit(self, x: Tensor) -> Tensor:
        size = x.square().sum(-1, keepdim=True).sqrt()
        return x / (size.detach() if self.fault == "clap_embeddings_divided_by_a_constant_norm" else size)

    def forward(self, input_features: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        aligned = self.fault != "clap_spectrogram_stretched_without_aligned_corners"
        x, size = self.mels(input_features), (SIZE * RATIO, input_features.shape[-1])
        x = F.interpolate(x, size, mode="bicubic", align_corners=aligned)[:, 0]
        x = x.unflatten(1, (RATIO, -1)).transpose(2, 3).flatten(1, 2)
        x = x.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).transpose(2, 3).flatten(3)
        x = self.grid(times(x, self.patch))
        audio = self.unit(self.heads[0](x.mean((1, 2))))
        states = x.unflatten(1, (RATIO, -1)).permute(0, 4, 2, 1, 3).flatten(3)
        real = input_ids != PAD
        places = torch.where(real, real.cumsum(1) + PAD, PAD)
        y = self.read(F.embedding(input_ids, self.word, PAD) + F.embedding(places, self.place, PAD))
        text = self.unit(self.heads[1](self.pool(text_layers(y, real, self.text, ("none", "none")))))
        near = audio @ text.T * self.heat.exp()[:, None, None]
        return {"by_audio": near[0], "by_text": near[1].mT, "text": text, "audio": audio, "states": states}


class StackedClap(Port):
    """Stacks of weights by stage; windows are an order of the tokens, the stretch is a matrix."""

    def take(self, model: ClapModel) -> None:
        ear, words = model.audio_model, model.text_model
        self.w = stacks(*(x.blocks for x in ear.layers), words.encoder.layer)
        cut, emb, patch = ear.layers[0].downsample, words.embeddings, ear.patch_embed
        self.mels = Rows(ear.batch_norm)
        self.mels.rate = 0.9 if self.fault == "clap_mel_norm_momentum_is_the_part_kept" else 0.1
        both = (patch.norm, cut.norm, ear.norm, emb.LayerNorm)
        self.n = nn.ParameterList(pile((x.weight, x.bias)) for x in both)
        ends = [x for h in (model.audio_projection, model.text_projection) for x in (h.linear1, h.linear2)]
        self.p = nn.ParameterList(leaf(rows(x)) for x in (patch.proj, words.pooler.dense, *ends))
        self.cut, self.word, self.place = (leaf(x.weight.T) for x in (cut.reduction, *list(emb)[:2]))
        self.heat_a, self.heat_t = leaf(model.logit_scale_a), leaf(model.logit_scale_t)

    def see(self, x: Tensor, stage: int, j: int) -> Tensor:
        w, side = [self.w[6 * stage + k][j] for k in range(6)], math.isqrt(x.shape[1])
        order = torch.arange(side**2).view(side, side).roll((-j, -j), (0, 1))
        order = F.unfold(order[None, None].double(), WINDOW, stride=WINDOW)[0].T.long()
        a, b = torch.arange(WINDOW**2) // WINDOW, torch.arange(WINDOW**2) % WINDOW
        apart = ((a[:, None] - a) + WINDOW - 1) * (2 * WINDOW - 1) + (b[:, None] - b) + WINDOW - 1
        if self.fault == "clap_third_block_bias_from_key_to_query" and (stage, j) == (1, 0):
            apart = apart.T
        wrapped = 2 * (order // side < j) + (order % side < j)
        bias = w[5][apart].movedim(2, 0) - 100.0 * (wrapped[:, :, None] != wrapped[:, None])[:, None]
        y, back = mix(even(x, w[4][:2])[:, order], w, stage + 2, bias), order.flatten().argsort()
        x = x + y.flatten(1, 2)[:, back]
        return x + times(F.gelu(times(even(x, w[4][2:]), w[2])), w[3])

    def forward(self, input_features: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.mels(input_features)[:, 0]
        eye, size = torch.eye(x.shape[1]).to(x)[None, None], (SIZE * RATIO, x.shape[1])
        x = F.interpolate(eye, size, mode="bicubic", align_corners=True)[0, 0] @ x
        x = torch.cat(x.chunk(RATIO, 1), 2).transpose(1, 2)[:, None]
        x = even(times(F.unfold(x, PATCH, stride=PATCH).transpose(1, 2), self.p[0]), self.n[0])
        x = self.see(self.see(x, 0, 0), 0, 1).unflatten(1, (SIZE // PATCH, -1))
        x = torch.cat([x[:, i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))], 3).flatten(1, 2)
        x = even(self.see(self.see(even(x, self.n[1]) @ self.cut, 1, 0), 1, 1), self.n[2])
        real = input_ids != PAD
        y = F.embedding(input_ids, self.word.T, PAD)
        y = even(y + F.embedding(real.cumsum(1) * real + PAD, self.place.T, PAD), self.n[3], 1e-12)
        tanh = self.fault == "clap_first_text_layer_gelu_by_tanh"
        y = text_layers(y, real, self.w[12:], ("tanh" if tanh else "none", "none"))
        states = x.mT.unflatten(2, (RATIO, -1, SIZE // PATCH // 2)).transpose(2, 3).flatten(3)
        x, y = x.mean(1), times(y, self.p[1]).tanh()
        x, y = (F.normalize(times(times(z, self.p[i]).relu(), self.p[i + 1])) for z, i in ((x, 2), (y, 4)))
        warm = self.heat_a if self.fault == "clap_text_logits_take_the_audio_scale" else self.heat_t
        logits = {"by_audio": x @ y.T * self.heat_a.exp(), "by_text": y @ x.T * warm.exp()}
        return logits | {"text": y, "audio": x, "states": states}


SLOPES, BLOCK = ("input gradient", "weight gradient"), "audio_model.layers.0.blocks.1"
THIRD, GELU = "audio_model.layers.1.blocks.0", "text_model.encoder.layer.0.intermediate.intermediate_act_fn"
right(task, "clap_of_trees_with_channels_last", "a tree, channels last, fused weights", ClapOfTrees)
right(task, "clap_of_stacked_weights", "packed stacks, windows by index, a matrix", StackedClap)
wrong(
    task,
    ClapOfTrees,
    clap_spectrogram_stretched_without_aligned_corners=("another interpolation", "audio_model"),
    clap_first_shifted_block_attends_across_the_seam=("no mask", (BLOCK, f"{BLOCK}.attention.self")),
    clap_merging_takes_its_corners_row_by_row=("another channel order", "audio_model.layers.0.downsample"),
    clap_embeddings_divided_by_a_constant_norm=("detach", "", SLOPES),
)
wrong(
    task,
    StackedClap,
    clap_mel_norm_momentum_is_the_part_kept=("a momentum", "audio_model.batch_norm", "buffer"),
    clap_third_block_bias_from_key_to_query=("a transposed index", f"{THIRD}.attention.self"),
    clap_first_text_layer_gelu_by_tanh=("an approximation", GELU),
    clap_text_logits_take_the_audio_scale=("a wrong scale", ""),
)
