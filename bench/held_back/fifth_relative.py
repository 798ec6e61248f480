"""Ports of a network of convolutions and of attention with relative positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_patches import Attention, CoAtNet, Inverted, Relative, coatnet
from bench.held_back._fifth_vision import SAME, Stats, right, tapped
from bench.held_back._fourth_ports import Port, leaf, wrong


class Mapped(Port):
    """Attention over [N, H, W, C]; the biases are windows of each head's table."""

    def take(self, attention: Relative) -> None:
        qkv = attention.qkv
        self.projections = leaf(qkv.weight.unflatten(0, (3, 3, 6)))
        self.offsets = leaf(qkv.bias.view(3, 3, 6))
        self.tables = nn.ParameterList(leaf(table.view(7, 7)) for table in attention.table.T)
        self.out = attention.out

    def biases(self) -> Tensor:
        """[heads, H, W, H, W], queries before keys."""
        tables = torch.stack([*self.tables])
        if self.fault == "table_of_the_last_head_transposed":
            tables = torch.cat([tables[:2], tables[2:].mT])
        return tables.unfold(1, 4, 1).unfold(2, 4, 1).flip(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("nyxc,phdc->pnhyxd", x, self.projections) + self.offsets[:, None, :, None, None]
        )
        scores = torch.einsum("nhyxd,nhijd->nhyxij", q, k)
        if self.fault == "biases_scaled_with_the_scores":
            weights = (scores + self.biases()) * 6**-0.5
        else:
            weights = torch.add(self.biases(), scores, alpha=6**-0.5)
        weights = weights.flatten(4).softmax(4).unflatten(4, (4, 4))
        return self.out(torch.einsum("nhyxij,nhijd->nyxhd", weights, v).flatten(3))


class Wide(Port):
    """A convolution block of [N, H, W, C]."""

    def take(self, block: Inverted) -> None:
        self.stride = block.depthwise.stride[0]
        self.norms = nn.ModuleList(map(Stats, (block.norm, block.norm1, block.norm2)))
        self.w = nn.ParameterDict()
        self.w["window"] = leaf(block.depthwise.weight[:, 0].permute(1, 2, 0))
        for name, conv in block.named_children():
            if isinstance(conv, nn.Conv2d) and conv.groups == 1:
                self.w[name] = leaf(conv.weight[..., 0, 0])
                if conv.bias is not None:
                    self.w[name + "_bias"] = leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norms[1](self.norms[0](x) @ self.w["expand"].T))
        padded = F.pad(y, (0, 0, 1, 1, 1, 1)).unfold(1, 3, self.stride).unfold(2, 3, self.stride)
        y = F.gelu(self.norms[2](torch.einsum("nyxcij,ijc->nyxc", padded, self.w["window"])))
        if "shortcut" in self.w:
            x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).amax((2, 4))
            x = F.linear(x, self.w["shortcut"], self.w["shortcut_bias"])
        return x + F.linear(y, self.w["project"], self.w["project_bias"])


class Maps(Port):
    """The network of convolutions and attention that keeps its maps two-dimensional."""

    def take(self, model: CoAtNet) -> None:
        self.entry, self.entry_norm = leaf(model.stem[0].weight), Stats(model.stem[1])
        self.wide = nn.Sequential(*map(Wide, model.convs))
        self.mixers, self.rest = nn.ModuleList(), nn.ModuleList()
        at = 0 if self.fault == "biases_scaled_with_the_scores" else 1
        for index, block in enumerate(model.blocks):
            mixer = Mapped(block.attention, self.fault if index == at else "")
            self.mixers.append(nn.Sequential(block.norm1, mixer))
            self.rest.append(nn.Sequential(block.norm2, *block.mlp))
        self.ends = nn.Sequential(model.norm, model.head)

    def forward(self, image: Tensor) -> Tensor:
        x = F.gelu(self.entry_norm(tapped(image.permute(0, 2, 3, 1), self.entry, 2)))
        x = self.wide(x)
        for mixer, rest in zip(self.mixers, self.rest, strict=True):
            x = x + mixer(x)
            x = x + rest(x)
        return self.ends(x.mean((1, 2)))


right(coatnet, "relative_biases_as_windows_of_a_table", "port to two-dimensional maps", Maps)
wrong(
    coatnet,
    Maps,
    biases_scaled_with_the_scores=("order of two steps", "blocks.0.attention"),
    table_of_the_last_head_transposed=("axes swapped", "blocks.1.attention"),
)


@method_of("blocks.0.attention", SAME, "keys taken in parts", coatnet)
def keys_taken_in_three_parts(self: Relative, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
    bias, top, total, mixed = self.table[self.index].movedim(2, 0), None, 0, 0
    for part in torch.arange(16).split(6):
        scores = Attention.scores(self, q, k[:, :, part]) + bias[..., part]
        high = scores.detach().amax(3, keepdim=True)
        high = high if top is None else torch.maximum(top, high)
        fade = 1 if top is None else (top - high).exp()
        weights = (scores - high).exp()
        total = total * fade + weights.sum(3, keepdim=True)
        mixed, top = mixed * fade + weights @ v[:, :, part], high
    return self.out((mixed / total).transpose(1, 2).flatten(2))
