"""Right pairs out of timm and torchvision, whole (thin) networks of both."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import BatchNormAct2d
from timm.models.convnext import ConvNeXt
from timm.models.mlp_mixer import MlpMixer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, fx, nn
from torchvision.models.resnet import BasicBlock
from torchvision.ops import FrozenBatchNorm2d, SqueezeExcitation, sigmoid_focal_loss

from bench.real_bugs import right_pair
from bench.real_bugs._losing import Focal, focal
from bench.surgery import replace
from bench.tasks import _classes, _task

of_timm = partial(
    right_pair, "https://github.com/huggingface/pytorch-image-models", f"timm {version('timm')}"
)
of_torchvision = partial(
    right_pair, "https://github.com/pytorch/vision", f"torchvision {version('torchvision')}"
)


def _images(size: int, count: int = 8):
    return lambda: (torch.randn(count, 3, size, size), _classes(count, 5))


def _resnet(make) -> nn.Module:
    """The first half of a ResNet of one block a stage."""
    model = make([1, 1, 1, 1])
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 5)
    return model


tv_resnet = _task("tv_resnet", lambda: _resnet(partial(torchvision.models.ResNet, BasicBlock)), _images(24))
VIT = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
timm_vit = _task("timm_vit", lambda: VisionTransformer(**VIT), _images(12))
NEXT = {"depths": (1, 1, 1, 1), "dims": (6, 8, 10, 12), "num_classes": 5}
convnext = _task("timm_convnext", lambda: ConvNeXt(**NEXT), _images(32))
mixer = _task(
    "timm_mixer",
    lambda: MlpMixer(img_size=12, patch_size=4, embed_dim=16, num_blocks=2, num_classes=5),
    _images(12),
)
mobile = _task(
    "timm_mobile", lambda: timm.create_model("mobilenetv3_small_050", num_classes=5), _images(32, 6)
)
tv_vit = _task(
    "tv_vit",
    lambda: torchvision.models.VisionTransformer(12, 4, 2, 3, 24, 48, num_classes=5),
    _images(12),
)


@of_timm(tv_resnet)
def resnet_of_timm(model: nn.Module) -> nn.Module:
    """Both have the same names; timm's blocks hold more steps between them."""
    twin = _resnet(partial(timm.models.resnet.ResNet, timm.models.resnet.BasicBlock))
    twin.load_state_dict(model.state_dict())
    return twin


@of_timm(timm_vit)
def vit_attention_written_out(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


@of_timm(timm_vit)
def vit_checkpointed(model: nn.Module) -> nn.Module:
    model.set_grad_checkpointing()
    return model


@of_timm(convnext)
def convnext_by_convolutions(model: nn.Module) -> nn.Module:
    """conv_mlp: the MLP's linear layers as 1x1 convolutions, norms over channels first."""
    twin = ConvNeXt(**NEXT, conv_mlp=True)
    weights, shapes = model.state_dict(), {n: t.shape for n, t in twin.state_dict().items()}
    twin.load_state_dict({name: tensor.reshape(shapes[name]) for name, tensor in weights.items()})
    return twin


@of_timm(mixer)
def mixer_mlp_by_products(model: nn.Module) -> nn.Module:
    class Products(nn.Module):
        def __init__(self, mlp: nn.Module):
            super().__init__()
            self.fc1, self.fc2 = mlp.fc1, mlp.fc2

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x @ self.fc1.weight.T + self.fc1.bias) @ self.fc2.weight.T + self.fc2.bias

    for block in model.blocks:
        block.mlp_tokens, block.mlp_channels = Products(block.mlp_tokens), Products(block.mlp_channels)
    return model


class NormThenAct(nn.Module):
    """timm's batch norm with its activation, as two modules of torch."""

    def __init__(self, both: nn.Module):
        super().__init__()
        self.norm = nn.BatchNorm2d(both.num_features, both.eps, both.momentum)
        self.norm.load_state_dict(both.state_dict())
        self.act = type(both.act)() if not isinstance(both.act, nn.Identity) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


@of_timm(mobile)
def mobilenet_norms_apart(model: nn.Module) -> nn.Module:
    for name, part in list(model.named_modules()):
        if isinstance(part, BatchNormAct2d):
            model = replace(model, name, NormThenAct(part))
    return model


@of_torchvision(tv_resnet)
def resnet_traced(model: nn.Module) -> nn.Module:
    return fx.symbolic_trace(model)


@of_torchvision(tv_resnet)
def resnet_channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


class ByHand(nn.Module):
    """nn.MultiheadAttention of itself, batch first."""

    def __init__(self, attention: nn.MultiheadAttention):
        super().__init__()
        self.heads, self.out_proj = attention.num_heads, attention.out_proj
        self.in_proj_weight, self.in_proj_bias = attention.in_proj_weight, attention.in_proj_bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        qkv = F.linear(q, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).flatten(2)), None


@of_torchvision(tv_vit)
def vit_attention_by_hand(model: nn.Module) -> nn.Module:
    for layer in model.encoder.layers:
        layer.self_attention = ByHand(layer.self_attention)
    return model


class Squeezed(nn.Module):
    """[N, 3, 10, 10] -> [N, 5]: a conv, a frozen norm, squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.squeeze = nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8), SqueezeExcitation(8, 4)
        self.fc = nn.Linear(8, 5)
        self.norm.running_mean.normal_(), self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.squeeze(self.norm(self.conv(x)).tanh()).mean((2, 3)))


squeezed = _task("squeezed", Squeezed, _images(10))


@of_torchvision(squeezed)
def squeeze_by_linears(model: nn.Module) -> nn.Module:
    class Linears(nn.Module):
        def __init__(self, own: SqueezeExcitation):
            super().__init__()
            self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
            for linear, conv in ((self.down, own.fc1), (self.up, own.fc2)):
                linear.weight = nn.Parameter(conv.weight.detach().flatten(1).clone())
                linear.bias = nn.Parameter(conv.bias.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]

    model.squeeze = Linears(model.squeeze)
    return model


@of_torchvision(squeezed)
def frozen_norm_by_torch(model: nn.Module) -> nn.Module:
    """torch's batch norm that never leaves eval mode and never learns."""

    class Fixed(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    norm = Fixed(8).requires_grad_(False)
    norm.load_state_dict(model.norm.state_dict(), strict=False)
    model.norm = norm.train(False)
    return model


@of_torchvision(focal)
def focal_loss_of_torchvision(model: nn.Module) -> nn.Module:
    class OfTorchvision(Focal):
        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            return sigmoid_focal_loss(logits, labels, alpha=0.25, gamma=2, reduction="mean")

    model.criterion = OfTorchvision()
    return model
