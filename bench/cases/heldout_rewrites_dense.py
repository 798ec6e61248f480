"""True rewrites of a U-Net, of a generator and of a Siamese network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_images import Encoder, Generator, UNet, generator, siamese, unet
from bench.cases._rewritten import SAME, copied, filled, rewritten
from bench.surgery import recast


@in_place_of("", SAME, "sum instead of concatenation", unet, "skip_connection_without_concatenation")
class _SumUNet(nn.Module):
    """What is joined is never concatenated: one conv reads what comes from below, one the skip."""

    def __init__(self, model: UNet):
        super().__init__()
        self.encoder = nn.ModuleList([model.down1, model.down2, model.middle])
        below, skip = nn.Conv2d(10, 8, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.from_below = filled(below, weight=model.join.weight[:, :10], bias=model.join.bias)
        self.from_skip = filled(skip, weight=model.join.weight[:, 10:])
        self.classify = model.head

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.encoder[0](x))
        low = F.relu(self.encoder[1](F.avg_pool2d(skip, 2)), inplace=True)
        low = F.relu(self.encoder[2](low), inplace=True)
        high = F.interpolate(low, size=x.shape[2:], mode="bilinear")
        return self.classify(F.relu(self.from_below(high).add_(self.from_skip(skip))))


def _interpolation(size: int) -> Tensor:
    """[2 size, size]: the rows by which an axis is doubled; weights of 3/4 and 1/4, and 1 at the ends."""
    eye = torch.eye(size)[None]
    return F.interpolate(eye, scale_factor=2, mode="linear")[0].T.contiguous()


class _MatrixUpsample(nn.Module):
    """Bilinear interpolation as a product with a fixed matrix from either side."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("rows", _interpolation(size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows @ x @ self.rows.T


@case(SAME, "bilinear upsampling as a product", on=unet)
def upsampling_by_two_matrices(model: nn.Module) -> nn.Module:
    """The interpolation's weights are a buffer that is not saved with the network."""
    return rewritten(model, "upsample", lambda _: _MatrixUpsample(6))


class _TransposedUpsample(nn.Module):
    """A depthwise transposed conv with the triangle as its kernel, on an image whose border is repeated."""

    def __init__(self):
        super().__init__()
        triangle = torch.tensor([0.25, 0.75, 0.75, 0.25])
        self.register_buffer("kernel", triangle[:, None] * triangle)

    def forward(self, x: Tensor) -> Tensor:
        x, channels = F.pad(x, (1, 1, 1, 1), mode="replicate"), x.shape[1]
        kernel = self.kernel.expand(channels, 1, 4, 4)
        return F.conv_transpose2d(x, kernel, stride=2, padding=3, groups=channels)


@case(SAME, "bilinear upsampling as a transposed conv", on=unet)
def upsampling_by_a_fixed_transposed_conv(model: nn.Module) -> nn.Module:
    """The interpolation as a conv, as networks for segmentation had it at first."""
    return rewritten(model, "upsample", lambda _: _TransposedUpsample())


@case(SAME, "maximum with zero", on=unet)
def shared_relu_by_four_functions(model: nn.Module) -> nn.Module:
    """The one activation module of four places is gone; each place has its own way to cut at zero."""

    class Apart(UNet):
        def forward(self, x: Tensor) -> Tensor:
            skip = self.down1(x).relu()
            low = F.threshold(self.down2(F.avg_pool2d(skip, 2)), 0.0, 0.0)
            low = F.leaky_relu(self.middle(low), 0.0)
            joined = self.join(torch.cat((self.upsample(low), skip), dim=1))
            return self.head(joined.where(joined > 0, joined.new_zeros(())))

    del model.act
    return recast(model, "", Apart)


@in_place_of("start", SAME, "transposed conv on one pixel as linear", generator, "latent_spread_by_a_matrix")
class _DenseStart(nn.Module):
    """A transposed conv on a single pixel as one matrix, of which every row makes an image."""

    def __init__(self, conv: nn.ConvTranspose2d):
        super().__init__()
        self.weight = copied(conv.weight.flatten(1))
        self.shape = conv.weight.shape[1:]

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.weight).unflatten(1, self.shape)


@in_place_of(
    ("up1", "up2"), SAME, "weight in another layout", generator, "transposed_convs_with_tensorflow_weights"
)
class _HeightWidthOutIn(nn.Module):
    """Both upsampling convs store their weights row, column, output, input, as TensorFlow does."""

    def __init__(self, conv: nn.ConvTranspose2d):
        super().__init__()
        self.kernel, self.bias = copied(conv.weight.permute(2, 3, 1, 0)), conv.bias

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel.permute(3, 2, 0, 1)
        return F.conv_transpose2d(x, kernel, self.bias, stride=2, padding=1)


@case(SAME, "BatchNorm in another dimension", on=generator)
def generator_on_pixels_as_rows(model: nn.Module) -> nn.Module:
    """The first norm sees [pixels, channels], its modules are renamed, the last tanh is in place."""

    class Rows(Generator):
        def forward(self, z: Tensor) -> Tensor:
            x = F.conv_transpose2d(z[..., None, None], self.start.weight).permute(0, 2, 3, 1)
            rows = torch.relu_(self.norm(x.flatten(0, 2)))
            x = rows.view(x.shape).permute(0, 3, 1, 2).contiguous()
            return self.up2(torch.relu(self.bn2(self.up1(x)))).tanh_()

    old, norm = model.bn1, nn.BatchNorm1d(12)
    norm.load_state_dict(old.state_dict())
    del model.bn1
    model.norm = norm
    return recast(model, "", Rows)


@method_of("", SAME, "shared encoder called once", siamese)
def both_images_in_one_batch(self, left: Tensor, right: Tensor) -> Tensor:
    """The encoder sees left and right images in one batch; the distance is written out."""
    one, other = self.encoder(torch.cat([left, right])).chunk(2)
    return (one - other + 1e-6).square().sum(1).sqrt()


@case(SAME, "normalisation by a reciprocal root", on=siamese)
def unit_vectors_by_rsqrt(model: nn.Module) -> nn.Module:
    """Vectors are scaled by the reciprocal root of their sum of squares, PReLU is a sum of two cuts."""

    def prelu(x: Tensor, slope: Tensor) -> Tensor:
        return F.relu(x) - slope[:, None, None] * F.relu(-x)

    class ByRoot(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            x = prelu(self.conv1(x), self.act1.weight)
            x = self.fc(prelu(self.conv2(x), self.act2.weight).flatten(1))
            return x * torch.einsum("ni,ni->n", x, x).clamp_min(1e-24).rsqrt().unsqueeze(1)

    return recast(model, "encoder", ByRoot)
