"""Two ports of a small SwinIR: a tree that picks windows by an index, channels last, and flat stacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_sixth_swin_ir as ref
from bench.held_back._fifth_vision import right, tapped
from bench.held_back._forty_sixth_swin_ir import DIM, HEADS, PADDED, RANGE, WINDOW, SwinIR
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_sixth_swin_ir", SwinIR, ref.scenes, ref.charbonnier)


class Same(nn.Module):
    """A 3x3 convolution of [N, H, W, C]."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.kernel, self.offset = leaf(conv.weight), leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        return spatial(x, self.kernel, self.offset)


class Looking(nn.Module):
    """A norm and attention within windows that are picked from all places by an index."""

    def __init__(self, block: nn.Module):
        super().__init__()
        old, shift, mask = block.attn, block.shift_size, block.attn_mask
        self.norm, self.turned, self.blind, self.frozen = block.norm1, False, False, False
        for name, w, b in zip("qkv", old.qkv.weight.chunk(3), old.qkv.bias.chunk(3), strict=True):
            setattr(self, name, nn.Linear(DIM, DIM).to(w))
            getattr(self, name).load_state_dict({"weight": w, "bias": b})
        self.out_weight, self.out_offset = leaf(old.proj.weight.T), leaf(old.proj.bias)
        side = 2 * WINDOW - 1
        self.grid = leaf(old.relative_position_bias_table.T.reshape(HEADS, side, side))
        places = torch.arange(PADDED[0] * PADDED[1]).view(PADDED).roll((-shift, -shift), (0, 1))
        places = places.unflatten(1, (-1, WINDOW)).unflatten(0, (-1, WINDOW)).transpose(1, 2)
        self.register_buffer("pick", places.reshape(-1, WINDOW**2))
        self.register_buffer("back", places.flatten().argsort())
        self.register_buffer("apart", None if mask is None else mask[:, None] < 0)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.norm(x).flatten(1, 2)[:, self.pick]
        q, k, v = (f(windows).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for f in (self.q, self.k, self.v))
        row, column = (torch.arange(WINDOW**2, device=x.device) // n % WINDOW for n in (WINDOW, 1))
        row, column = (z[:, None] - z + WINDOW - 1 for z in (row, column))
        near = self.grid[:, row, column]
        near, k = near.mT if self.turned else near, k.detach() if self.frozen else k
        if self.apart is not None and (self.training or not self.blind):
            near = near.masked_fill(self.apart, -torch.inf)
        mixed = F.scaled_dot_product_attention(q, k, v, near.expand(len(x), len(self.pick), -1, -1, -1))
        mixed = mixed.transpose(-2, -3).flatten(3) @ self.out_weight + self.out_offset
        return x + mixed.flatten(1, 2)[:, self.back].view_as(x)


class Around(nn.Module):
    """What is skipped, and the part of it that is added."""

    def __init__(self, *inner: nn.Module, part: float = 1.0):
        super().__init__()
        self.inner, self.part = nn.Sequential(*inner), part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part * self.inner(x)


class SwinIRByIndex(Port):
    """Groups nested in the long skip; every part has its own skip."""

    def take(self, model: SwinIR) -> None:
        groups = []
        for layer in model.layers:
            inner = []
            for block in layer.residual_group.blocks:
                mlp = block.mlp
                inner += Looking(block), Around(block.norm2, mlp.fc1, nn.GELU(), mlp.fc2)
            groups.append(Around(*inner, Same(layer.conv)))
        self.deep = Around(model.patch_embed.norm, *groups, model.norm, Same(model.conv_after_body))
        sides = (Around(Same(b.body[0]), nn.ReLU(), Same(b.body[2]), part=0.1) for b in model.edsr_body)
        self.side = nn.Sequential(Same(model.edsr_head), *sides)
        self.first, self.narrow = Same(model.conv_first), Same(model.conv_before_upsample[0])
        self.more, self.last = Same(model.upsample[0]), Same(model.conv_last)
        self.register_buffer("middle", model.mean.flatten().clone())
        groups[0].inner[0].frozen = self.fault == "swin_ir_first_block_keys_detached"
        groups[0].inner[2].blind = self.fault == "swin_ir_first_shifted_block_unmasked_in_eval"
        groups[1].inner[0].turned = self.fault == "swin_ir_third_block_bias_transposed"

    def forward(self, x: Tensor) -> Tensor:
        high, wide = x.shape[2:]
        mode = "replicate" if self.fault == "swin_ir_edges_padded_by_repeating" else "reflect"
        x = F.pad(x, (0, PADDED[1] - wide, 0, PADDED[0] - high), mode).movedim(1, 3)
        x = RANGE * (x - self.middle)
        y = self.more(F.leaky_relu(self.narrow(self.deep(self.first(x)))) + self.side(x))
        y = y.unflatten(3, (-1, 2, 2)).permute(0, 1, 4, 2, 5, 3).flatten(3, 4).flatten(1, 2)
        return (self.last(y) / RANGE + self.middle).movedim(3, 1)[:, :, : 2 * high, : 2 * wide]


KEYS = ("weight", "bias")


def affine(module: nn.Module) -> Tensor:
    """The weight, by inputs, with the offset as one more row."""
    return torch.cat([module.weight.flatten(1).T, module.bias[None]])


class StackedSwinIR(Port):
    """Stacks by block, with the offsets as a last row; softmax by hand over windows of rolled pictures."""

    def take(self, model: SwinIR) -> None:
        blocks = [block for layer in model.layers for block in layer.residual_group.blocks]
        self.qkv, self.proj = (pile(affine(getattr(b.attn, n)) for b in blocks) for n in ("qkv", "proj"))
        self.up, self.down = (pile(affine(getattr(b.mlp, n)) for b in blocks) for n in ("fc1", "fc2"))
        self.near = pile(b.attn.relative_position_bias_table for b in blocks)
        norms = [model.patch_embed.norm, *(n for b in blocks for n in (b.norm1, b.norm2)), model.norm]
        self.norms = pile(torch.stack([n.weight, n.bias]) for n in norms)
        bodies = [*(layer.conv for layer in model.layers), model.conv_after_body]
        sides = [conv for block in model.edsr_body for conv in (block.body[0], block.body[2])]
        stems = model.conv_first, model.edsr_head
        self.stem, self.stem_offset = (leaf(torch.cat([getattr(c, n) for c in stems])) for n in KEYS)
        self.body, self.side = (pile(c.weight for c in each) for each in (bodies, sides))
        self.body_offset, self.side_offset = (pile(c.bias for c in each) for each in (bodies, sides))
        ends = {"a": model.conv_before_upsample[0], "b": model.upsample[0], "c": model.conv_last}
        for name, conv in ends.items():
            setattr(self, name, leaf(conv.weight)), setattr(self, name + "_offset", leaf(conv.bias))
        self.register_buffer("index", blocks[0].attn.relative_position_index.clone())
        self.register_buffer("apart", blocks[1].attn_mask == 0)
        self.register_buffer("middle", model.mean.clone())

    def normal(self, i: int, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), *self.norms[i])

    def conv(self, name: str, i: int, x: Tensor) -> Tensor:
        kernel, offset = getattr(self, name), getattr(self, name + "_offset")
        return tapped(x, kernel[i]) + offset[i]

    def block(self, i: int, x: Tensor) -> Tensor:
        move, (high, wide) = WINDOW // 2 * (i % 2), x.shape[1:3]
        y = (self.normal(2 * i + 1, x) @ self.qkv[i, :-1] + self.qkv[i, -1]).roll((-move, -move), (1, 2))
        y = y.view(-1, high // WINDOW, WINDOW, wide // WINDOW, WINDOW, 3, HEADS, DIM // HEADS)
        q, k, v = y.permute(5, 0, 1, 3, 6, 2, 4, 7).flatten(5, 6).flatten(2, 3)
        power = torch.einsum("nwhid,nwhjd->nwhij", q, k) / (DIM // HEADS) ** 0.5
        power = (power + self.near[i, self.index].movedim(2, 0)).exp()
        power = power * self.apart[:, None] if move else power
        y = (power @ v / power.sum(-1, keepdim=True)).unflatten(3, (WINDOW, WINDOW))
        y = y.unflatten(1, (high // WINDOW, wide // WINDOW)).permute(0, 1, 4, 2, 5, 3, 6)
        y = y.reshape(-1, high, wide, DIM).roll((move, move), (1, 2))
        x = x + y @ self.proj[i, :-1] + self.proj[i, -1]
        y = self.normal(2 * i + 2, x) @ self.up[i, :-1] + self.up[i, -1]
        quick = self.fault == "swin_ir_second_block_gelu_by_sigmoid" and i == 1
        y = y * (1.702 * y).sigmoid() if quick else F.gelu(y)
        return x + y @ self.down[i, :-1] + self.down[i, -1]

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        x = (F.pad(x, (0, -size[1] % WINDOW, 0, -size[0] % WINDOW), "reflect") - self.middle) * RANGE
        first, side = F.conv2d(x, self.stem, self.stem_offset, padding=1).movedim(1, 3).tensor_split([DIM], 3)
        x = self.normal(0, first)
        for i in (0, 2):
            x = x + self.conv("body", i // 2, self.block(i + 1, self.block(i, x)))
        kept = first.detach() if self.fault == "swin_ir_long_skip_detached" else first
        x = (self.conv("body", 2, self.normal(-1, x)) + kept).movedim(3, 1)
        for i in (0, 2):
            part = 1 if self.fault == "swin_ir_second_edsr_block_not_scaled" and i == 2 else 0.1
            side = side + part * self.conv("side", i + 1, self.conv("side", i, side).relu())
        x = F.conv2d(x, self.a, self.a_offset, padding=1)
        x = F.conv2d(torch.max(x, 0.01 * x) + side.movedim(3, 1), self.b, self.b_offset, padding=1)
        if self.fault == "swin_ir_pixel_shuffle_takes_columns_first":
            x = x.unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1, 3)
        x = F.conv2d(F.pixel_shuffle(x, 2), self.c, self.c_offset, padding=1) / RANGE + self.middle
        return x[:, :, : 2 * size[0], : 2 * size[1]]


SLOPES = ("input gradient", "weight gradient")
FIRST, SHIFTED = "layers.0.residual_group.blocks.0", "layers.0.residual_group.blocks.1"
right(task, "swin_ir_by_index", "windows by an index, channels last, split weights", SwinIRByIndex)
right(task, "swin_ir_of_stacked_weights", "stacks by block, one class, softmax by hand", StackedSwinIR)
wrong(
    task,
    SwinIRByIndex,
    swin_ir_edges_padded_by_repeating=("another padding", ""),
    swin_ir_first_block_keys_detached=("detach", FIRST + ".attn", SLOPES),
    swin_ir_first_shifted_block_unmasked_in_eval=("no mask in eval", (SHIFTED, SHIFTED + ".attn"), "eval"),
    swin_ir_third_block_bias_transposed=("a transposed bias", "layers.1.residual_group.blocks.0.attn"),
)
wrong(
    task,
    StackedSwinIR,
    swin_ir_second_block_gelu_by_sigmoid=("another approximation", SHIFTED + ".mlp.act"),
    swin_ir_long_skip_detached=("detach", "", SLOPES),
    swin_ir_second_edsr_block_not_scaled=("a factor left out", "edsr_body.1"),
    swin_ir_pixel_shuffle_takes_columns_first=("another channel order", "upsample.1"),
)
