"""A small DINOv2 with registers: a student, a teacher that follows it, and the losses of both heads."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH, HEADS, DEPTH, REGISTERS, PATCH, GRID = 18, 3, 3, 2, 4, (5, 7)
HIDDEN, BOTTLENECK, CLASSES, WORDS = 14, 10, 22, 26
SAMPLES, LOCALS, SMALL = 6, 3, (2, 3)
STUDENT_TEMP, TEACHER_TEMP, MOMENTUM = 0.2, 0.15, 0.9
NAMES = "backbone", "dino_head", "ibot_head"


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class SwiGLUFFNFused(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        hidden = (int(4 * dim * 2 / 3) + 7) // 8 * 8
        self.w12, self.w3 = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(x1) * x2)


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, 1e-6), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, 1e-6), SwiGLUFFNFused(dim)
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma1 * self.attn(self.norm1(x))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class DinoVisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Conv2d(3, WIDTH, PATCH, PATCH)))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, GRID[0] * GRID[1] + 1, WIDTH))
        self.register_tokens = nn.Parameter(torch.zeros(1, REGISTERS, WIDTH))
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, 1e-6)

    def interpolate_pos_encoding(self, high: int, wide: int) -> Tensor:
        base, size = GRID, (high // PATCH, wide // PATCH)
        if size == base:
            return self.pos_embed
        patch = self.pos_embed[:, 1:].reshape(1, *base, -1).permute(0, 3, 1, 2)
        patch = F.interpolate(patch, size=size, mode="bicubic")
        return torch.cat([self.pos_embed[:, :1], patch.flatten(2).transpose(1, 2)], dim=1)

    def prepare_tokens_with_masks(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        (high, wide), x = x.shape[2:], self.patch_embed(x).flatten(2).transpose(1, 2)
        if masks is not None:
            x = torch.where(masks.unsqueeze(-1), self.mask_token.unsqueeze(0), x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.interpolate_pos_encoding(high, wide)
        return torch.cat([x[:, :1], self.register_tokens.expand(len(x), -1, -1), x[:, 1:]], dim=1)

    def forward(self, x: Tensor, masks: Tensor | None = None) -> dict[str, Tensor]:
        x = self.prepare_tokens_with_masks(x, masks)
        for blk in self.blocks:
            x = blk(x)
        x = self.norm(x)
        return {"x_norm_clstoken": x[:, 0], "x_norm_patchtokens": x[:, 1 + REGISTERS :]}


class DINOHead(nn.Module):
    def __init__(self, out_dim: int):
        super().__init__()
        layers = [nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(HIDDEN, BOTTLENECK))
        self.last_layer = weight_norm(nn.Linear(BOTTLENECK, out_dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2, eps=1e-12))


class CentredLoss(nn.Module):
    @torch.no_grad()
    def sinkhorn_knopp_teacher(self, teacher_output: Tensor, n_iterations: int = 3) -> Tensor:
        q = torch.exp(teacher_output / TEACHER_TEMP).t()
        k, b = q.shape
        q = q / q.sum()
        for _ in range(n_iterations):
            q = q / q.sum(dim=1, keepdim=True) / k
            q = q / q.sum(dim=0, keepdim=True) / b
        return (q * b).t()


class DINOLoss(CentredLoss):
    def forward(self, student_list: tuple[Tensor, ...], teacher_list: tuple[Tensor, ...]) -> Tensor:
        logs = [F.log_softmax(s / STUDENT_TEMP, dim=-1) for s in student_list]
        return -sum((t * lsm).sum(dim=-1).mean() for lsm in logs for t in teacher_list)


class iBOTPatchLoss(CentredLoss):  # noqa: N801
    def forward(self, student: Tensor, teacher: Tensor, masks: Tensor) -> Tensor:
        loss = (teacher * F.log_softmax(student / STUDENT_TEMP, dim=-1)).sum(dim=-1)
        count = masks.sum(-1).clamp(min=1).unsqueeze(-1).expand_as(masks)[masks]
        return -(loss / count).sum() / len(masks)


class KoLeoLoss(nn.Module):
    def forward(self, x: Tensor, eps: float = 1e-8) -> Tensor:
        x = F.normalize(x, eps=eps, p=2, dim=-1)
        with torch.no_grad():
            nearest = (x @ x.t()).fill_diagonal_(-1).argmax(dim=1)
        return -torch.log(F.pairwise_distance(x, x[nearest], eps=eps) + eps).mean()


def frozen(module: nn.Module) -> nn.Module:
    """The module with buffers in place of its weights."""
    for part in module.modules():
        for name, value in [*part.named_parameters(recurse=False)]:
            del part._parameters[name]
            part.register_buffer(name, value.detach().clone())
    return module


class SSLMetaArch(nn.Module):
    def __init__(self):
        super().__init__()
        nets = [(DinoVisionTransformer(), DINOHead(CLASSES), DINOHead(WORDS)) for _ in range(2)]
        self.student, self.teacher = (nn.ModuleDict(zip(NAMES, net, strict=True)) for net in nets)
        self.dino_loss, self.ibot_patch_loss, self.koleo_loss = DINOLoss(), iBOTPatchLoss(), KoLeoLoss()
        for name, p in self.student.named_parameters():
            level = 0.8 * any(word in name for word in ("norm1.w", "norm2.w", "norm.w", "gamma", "original0"))
            nn.init.normal_(p, level, 0.15 if level or "bias" in name else 0.3)
        for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            p.data = q.data + 0.05 * torch.randn_like(q)
        frozen(self.teacher)

    @torch.no_grad()
    def get_teacher_output(self, x: Tensor, masks: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        seen = self.teacher.backbone(x)
        cls = torch.cat(seen["x_norm_clstoken"].chunk(2)[::-1])
        cls = self.dino_loss.sinkhorn_knopp_teacher(self.teacher.dino_head(cls))
        patches = self.teacher.ibot_head(seen["x_norm_patchtokens"][masks])
        return cls.chunk(2), self.ibot_patch_loss.sinkhorn_knopp_teacher(patches)

    def forward(self, global_crops: Tensor, local_crops: Tensor, masks: Tensor) -> dict[str, Tensor]:
        whole, small, masks = (x.transpose(0, 1).flatten(0, 1) for x in (global_crops, local_crops, masks))
        teacher_cls, teacher_patches = self.get_teacher_output(whole, masks)
        seen = self.student.backbone(whole, masks)
        cls, patches = seen["x_norm_clstoken"], seen["x_norm_patchtokens"][masks]
        local = self.student.dino_head(self.student.backbone(small)["x_norm_clstoken"])
        whole_out, terms = self.student.dino_head(cls), 2 + 2 * LOCALS
        losses = {
            "dino_local_crops_loss": self.dino_loss(local.chunk(LOCALS), teacher_cls) / terms,
            "dino_global_crops_loss": 2 * self.dino_loss((whole_out,), (torch.cat(teacher_cls),)) / terms,
            "koleo_loss": sum(self.koleo_loss(p) if len(p) > 1 else 0 * p.sum() for p in cls.chunk(2)),
            "ibot_loss": self.ibot_patch_loss(self.student.ibot_head(patches), teacher_patches, masks),
        }
        if self.training:
            for mine, theirs in zip(self.teacher.buffers(), self.student.parameters(), strict=True):
                mine.mul_(MOMENTUM).add_(theirs.detach(), alpha=1 - MOMENTUM)
        return losses | {"cls": cls.unflatten(0, (2, -1)).transpose(0, 1)}


def crops() -> tuple[dict[str, Tensor], Tensor]:
    """Crops of pictures of waves, a mask of patches for every global crop, and the weights of the losses."""

    def waves(count: int, grid: tuple[int, int]) -> Tensor:
        y, x = (torch.arange(PATCH * size) / 4.0 for size in grid)
        way, speed = torch.rand(2, SAMPLES, count, 3, 1, 1) * 3
        return torch.sin(way * y[:, None] + speed * x) + 0.3 * torch.randn(SAMPLES, count, 3, len(y), len(x))

    masks = torch.rand(SAMPLES, 2, GRID[0] * GRID[1]) < 0.3
    masks[:, 0, 3] = masks[::2, 1, 7] = True
    inputs = {"global_crops": waves(2, GRID), "local_crops": waves(LOCALS, SMALL), "masks": masks}
    return inputs, torch.tensor([1.0, 1.0, 0.1, 1.0]).expand(SAMPLES, 4)


def summed(outputs: dict[str, Tensor], weights: Tensor) -> Tensor:
    """The weighted sum of the four losses, by eight."""
    return (torch.stack(list(outputs.values())[:4]) * weights[0]).sum() / 8
