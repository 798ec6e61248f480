"""True rewrites of a ConvNeXt."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of, method_of
from bench.cases._heldout_parts import flat_name
from bench.cases._heldout_tasks import ConvNextBlock, convnext
from bench.cases._rewritten import SAME, copied, filled


@in_place_of("blocks.1", SAME, "axes in another order", convnext, "convnext_block_channels_first")
class _ChannelsFirst(nn.Module):
    """A block that never moves the channels last: 1x1 convs, and the norm over dimension 1 written out."""

    def __init__(self, block: ConvNextBlock):
        super().__init__()
        width, hidden, self.eps = block.up.in_features, block.up.out_features, block.norm.eps
        self.dwconv = block.depthwise
        self.weight = copied(block.norm.weight[:, None, None])
        self.bias = copied(block.norm.bias[:, None, None])
        up, down = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)
        self.pwconv1 = filled(up, weight=block.up.weight[..., None, None], bias=block.up.bias)
        self.pwconv2 = filled(down, weight=block.down.weight[..., None, None], bias=block.down.bias)
        self.layer_scale = copied(block.gamma[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x)
        y = y - y.mean(1, keepdim=True)
        y = y / (y.square().mean(1, keepdim=True) + self.eps).sqrt()
        y = self.pwconv2(F.gelu(self.pwconv1(self.weight * y + self.bias)))
        return x.addcmul(self.layer_scale, y)


@method_of(("blocks.0", "blocks.1"), SAME, "scale folded into the layer before", convnext)
def layer_scale_folded_into_the_weight(self, x: Tensor) -> Tensor:
    """The branch's scale multiplies the rows of the last linear layer's weight, anew in every call."""
    y = self.act(self.up(self.norm(self.depthwise(x).movedim(1, 3))))
    y = F.linear(y, self.gamma[:, None] * self.down.weight, self.gamma * self.down.bias)
    return x + y.movedim(3, 1)


@in_place_of("stem", SAME, "weight in another layout", convnext, "stem_as_a_product_of_patches")
class _Patches(nn.Module):
    """The stem as one product with patches of 2x2; the weight in the order row, column, channel."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.kernel = copied(conv.weight.permute(2, 3, 1, 0).flatten(0, 2))
        self.bias = copied(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3)
        return (patches @ self.kernel + self.bias).permute(0, 3, 1, 2)


@in_place_of("blocks", SAME, "weights of all blocks stacked", convnext, "blocks_scanned_over_stacked_weights")
class _Scanned(nn.Module):
    """The weights of equal blocks stacked, as for a scan over layers, and called through a skeleton."""

    def __init__(self, blocks: nn.Sequential):
        super().__init__()
        stacked, _ = torch.func.stack_module_state(list(blocks))
        self.names = list(stacked)
        self.stacked = nn.ParameterDict({flat_name(name): copied(values) for name, values in stacked.items()})
        self.skeleton = [copy.deepcopy(blocks[0]).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        for layer in zip(*(self.stacked[flat_name(name)].unbind() for name in self.names), strict=True):
            x = torch.func.functional_call(self.skeleton[0], dict(zip(self.names, layer, strict=True)), (x,))
        return x
