"""Two ports of a small SigLIP: a tree of blocks with kernels by head, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fourth_siglip import EPS, GRID, PATCH, SiglipModel, captioned, sigmoid_loss

task = few("twenty_fourth_siglip", SiglipModel, captioned, sigmoid_loss)
ROOT, BEND = math.sqrt(2 / math.pi), 0.044715


def sheet(*layers: nn.Module) -> Tensor:
    """A row for each output of the layers: its weights, then its bias."""
    return torch.cat([torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in layers])


def layers_of(tower: nn.Module, pooling: bool = False) -> list[tuple]:
    """Norm, sheet of an attention, norm and MLP of each layer; the pooling head makes one more."""
    found = []
    for x in tower.encoder.layers:
        a = x.self_attn
        found.append((x.layer_norm1, sheet(a.q_proj, a.k_proj, a.v_proj, a.out_proj), x.layer_norm2, x.mlp))
    if pooling:
        head, a = tower.head, tower.head.attention
        rows = torch.cat([torch.cat([a.in_proj_weight, a.in_proj_bias[:, None]], 1), sheet(a.out_proj)])
        found.append((tower.post_layernorm, rows, head.layernorm, head.mlp))
    return found


class Norm(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.scale, self.shift = leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        return torch.addcmul(self.shift, (x - middle) * self.scale, torch.rsqrt(spread + EPS))


class Heads(nn.Module):
    """Attention with kernels [in, head, width] and [head, width, out]; ``hidden`` is not seen."""

    def __init__(self, rows: Tensor, heads: int):
        super().__init__()
        *three, out = rows[:, :-1].chunk(4)
        *biases, shift = rows[:, -1].chunk(4)
        self.kernels = nn.ParameterList(leaf(x.T.unflatten(1, (heads, -1))) for x in three)
        self.biases = nn.ParameterList(leaf(x.unflatten(0, (heads, -1))) for x in biases)
        self.out, self.shift, self.blind = leaf(out.T.unflatten(0, (heads, -1))), leaf(shift), False

    def forward(self, asked: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
        each = zip((asked, x, x), self.kernels, self.biases, strict=True)
        q, k, v = (torch.einsum("nti,ihd->nthd", y, kernel) + bias for y, kernel, bias in each)
        match = torch.einsum("nthd,nshd->nths", q / math.sqrt(q.shape[3]), k)
        if hidden is not None and not self.blind:
            match = match.masked_fill(hidden[:, None, None], -math.inf)
        share = (match - match.logsumexp(-1, keepdim=True)).exp()
        return torch.einsum("nths,nshd,hdo->nto", share, v, self.out) + self.shift


class Block(nn.Module):
    """A layer of a tower, or the pooling head and the norm before it, which asks with its query."""

    def __init__(self, first: nn.LayerNorm, rows: Tensor, second: nn.LayerNorm, mlp: nn.Module, heads: int):
        super().__init__()
        self.first, self.heads, self.second = Norm(first), Heads(rows, heads), Norm(second)
        self.up, self.down, self.added = leaf(mlp.fc1.weight.T), leaf(mlp.fc2.weight.T), False
        self.up_shift, self.down_shift = leaf(mlp.fc1.bias), leaf(mlp.fc2.bias)

    def forward(self, x: Tensor, hidden: Tensor | None = None, query: Tensor | None = None) -> Tensor:
        y = self.first(x)
        asked, kept = (y, x) if query is None else (query, query if self.added else 0)
        x = kept + self.heads(asked, y, hidden)
        y = self.second(x) @ self.up + self.up_shift
        return x + (y * torch.sigmoid(2 * ROOT * y * (1 + BEND * y.square()))) @ self.down + self.down_shift


class SiglipOfBlocks(Port):
    """Kernels by head, channels last; the pooling head is a block as those of the towers are."""

    def take(self, model: SiglipModel) -> None:
        seen, read, fault = model.vision_model, model.text_model, self.fault
        conv, table = seen.embeddings.children()
        self.map, self.tile = leaf(table.weight.T.unflatten(1, (GRID, -1))), leaf(conv.weight.movedim(1, 3))
        self.see = nn.ModuleList(Block(*x, heads=4) for x in layers_of(seen, pooling=True))
        self.query, (self.words, self.spots) = leaf(seen.head.probe), map(leaf, read.embeddings.parameters())
        self.read = nn.ModuleList(Block(*x, heads=2) for x in layers_of(read))
        self.last, (self.tell, self.named) = Norm(read.final_layer_norm), map(leaf, read.head.parameters())
        self.base, self.heat, self.lift = map(leaf, (conv.bias, model.logit_scale, model.logit_bias))
        self.corners = fault == "siglip_positions_resized_with_aligned_corners"
        self.read[1].heads.blind = fault == "siglip_second_text_attention_sees_the_padding"
        self.see[3].added = fault == "siglip_pooling_head_adds_its_probe"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        x = pixel_values.movedim(1, 3).unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).transpose(2, 3)
        places = F.interpolate(self.map[None], x.shape[1:3], mode="bicubic", align_corners=self.corners)
        x = (F.linear(x.flatten(3), self.tile.flatten(1), self.base) + places.movedim(1, 3)).flatten(1, 2)
        for block in self.see[:-1]:
            x = block(x)
        image = self.see[-1](x, query=self.query.expand(len(x), -1, -1)).squeeze(1)
        y, at = self.words[input_ids] + self.spots, input_ids.new_full((len(x),), input_ids.shape[1] - 1)
        for block in self.read:
            y = block(y, attention_mask == 0)
        if self.fault == "siglip_text_pooled_at_its_largest_token_as_in_clip":
            at = input_ids.argmax(1)
        text = F.linear(self.last(y.take_along_dim(at[:, None, None], 1).squeeze(1)), self.tell, self.named)
        text, image = (z * z.square().sum(1, True).rsqrt() for z in (text, image))
        y = torch.einsum("id,td->it", image * self.heat.exp(), text) + self.lift
        return {"logits_per_image": y, "logits_per_text": y.T, "text_embeds": text, "image_embeds": image}


def stacks(layers: list[tuple]) -> nn.ParameterList:
    first, heads, second, mlps = zip(*layers, strict=True)
    norms = [torch.stack([*a.parameters(), *b.parameters()]) for a, b in zip(first, second, strict=True)]
    wide, narrow = [sheet(x.fc1) for x in mlps], [sheet(x.fc2) for x in mlps]
    return nn.ParameterList(map(pile, (norms, heads, wide, narrow)))


def times(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:, :-1].T + rows[:, -1]


def normal(x: Tensor, weights: Tensor, eps: float = EPS, fixed_mean: bool = False) -> Tensor:
    x = x - (x.detach() if fixed_mean else x).mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[0] + weights[1]


class StackedSiglip(Port):
    """Time first; the pooling head is the last row of the stacks, and the last text layer asks once."""

    def take(self, model: SiglipModel) -> None:
        seen, read = model.vision_model, model.text_model
        self.see, self.read = stacks(layers_of(seen, pooling=True)), stacks(layers_of(read))
        self.last, self.tell = pile(read.final_layer_norm.parameters()), leaf(sheet(read.head))
        conv, table = seen.embeddings.children()
        self.tile, self.map, self.query = leaf(sheet(conv)), leaf(table.weight), leaf(seen.head.probe)
        self.words, self.spots = map(leaf, read.embeddings.parameters())
        self.pair = leaf(torch.cat([model.logit_scale, model.logit_bias]))

    def layer(self, w: nn.ParameterList, i: int, x: Tensor, shown: Tensor | None = None) -> Tensor:
        (norms, rows, wide, narrow), width = (each[i] for each in w), x.shape[-1]
        seen, fault, heads = w is self.see, self.fault, 4 if w is self.see else 2
        eps = 1e-5 if fault == "siglip_first_text_norm_takes_the_default_eps" and not seen and i == 0 else EPS
        still = fault == "siglip_post_norm_takes_its_mean_for_a_constant" and seen and i == 3
        y, end = normal(x, norms[:2], eps, still), i == len(w[0]) - 1
        asked = self.query.expand(1, x.shape[1], -1) if seen and end else y[-1:] if end else y
        x = 0 if seen and end else x[-len(asked) :]
        three = times(asked, rows[:width]), *times(y, rows[width : 3 * width]).chunk(2, -1)
        q, k, v = (z.unflatten(2, (heads, -1)).flatten(1, 2).transpose(0, 1) for z in three)
        found = F.scaled_dot_product_attention(q, k, v, shown).transpose(0, 1)
        x = x + times(found.unflatten(1, (-1, heads)).flatten(2), rows[3 * width :])
        y = times(normal(x, norms[2:]), wide)
        curve = torch.tanh(ROOT * (y + BEND * y**3))
        if fault == "siglip_third_gelu_exact_in_evaluation" and seen and i == 2 and not self.training:
            curve = torch.erf(y / math.sqrt(2))
        return x + times(y * (0.5 + 0.5 * curve), narrow)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        x = F.unfold(pixel_values, PATCH, stride=PATCH).permute(2, 0, 1)
        if self.fault == "siglip_patches_have_the_channel_last":
            x = x.unflatten(2, (-1, PATCH**2)).transpose(2, 3).flatten(2)
        size, each = [n // PATCH for n in pixel_values.shape[2:]], torch.eye(GRID**2).to(x)
        resized = F.interpolate(each.unflatten(1, (1, GRID, GRID)), size, mode="bicubic").flatten(1)
        x = times(x, self.tile) + (resized.T @ self.map)[:, None]
        for i in range(4):
            x = self.layer(self.see, i, x)
        y, shown = self.words[input_ids.T] + self.spots[:, None], attention_mask == 1
        for i in range(2):
            y = self.layer(self.read, i, y, shown.repeat_interleave(2, 0)[:, None])
        text = times(normal(y[0], self.last), self.tell)
        text, image = F.normalize(text, dim=1), F.normalize(x[0], dim=1)
        y = F.linear(text, image) * self.pair[0].exp() + self.pair[1]
        return {"logits_per_image": y.T, "logits_per_text": y, "text_embeds": text, "image_embeds": image}


LAYER, SLOPES = "vision_model.encoder.layers.2", ("input gradient", "weight gradient")
right(task, "siglip_of_blocks_with_kernels_by_head", "a tree, another border, channels last", SiglipOfBlocks)
right(task, "siglip_of_stacked_weights", "packed stacks, time first, one query last", StackedSiglip)
wrong(
    task,
    SiglipOfBlocks,
    siglip_positions_resized_with_aligned_corners=("another resize", "vision_model.embeddings"),
    siglip_second_text_attention_sees_the_padding=("no mask", "text_model.encoder.layers.1.self_attn"),
    siglip_pooling_head_adds_its_probe=("a residual too many", "vision_model.head"),
    siglip_text_pooled_at_its_largest_token_as_in_clip=("another token pooled", "text_model"),
)
wrong(
    task,
    StackedSiglip,
    siglip_patches_have_the_channel_last=("another axis order", "vision_model.embeddings.patch_embedding"),
    siglip_first_text_norm_takes_the_default_eps=("another eps", "text_model.encoder.layers.0.layer_norm1"),
    siglip_post_norm_takes_its_mean_for_a_constant=("detach", "vision_model.post_layernorm", SLOPES),
    siglip_third_gelu_exact_in_evaluation=("another gelu", f"{LAYER}.mlp.activation_fn", "eval"),
)
