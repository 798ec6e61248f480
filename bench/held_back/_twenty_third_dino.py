"""A small DINO: a student of all crops learns what a frozen teacher says of the big ones."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

CHANNELS, PATCH, BIG, SMALL = 3, 4, 16, (12, 8)
WIDTH, HEADS, DEPTH, HIDDEN, BOTTLENECK, PROTOTYPES = 16, 2, 3, 24, 12, 20
PICTURES, CROPS = 3, 4


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_patches, self.patch_size = (BIG // PATCH) ** 2, PATCH
        self.proj = nn.Conv2d(CHANNELS, WIDTH, kernel_size=PATCH, stride=PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        count, length, dim = x.shape
        qkv = self.qkv(x).reshape(count, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(count, length, dim))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Pictures [N, C, H, W] -> the states of their class tokens, [N, D]."""

    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.3)
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, WIDTH) * 0.3)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def interpolate_pos_encoding(self, x: Tensor, w: int, h: int) -> Tensor:
        npatch, n = x.shape[1] - 1, self.pos_embed.shape[1] - 1
        if npatch == n and w == h:
            return self.pos_embed
        class_pos_embed, patch_pos_embed = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        side, dim, size = int(math.sqrt(n)), x.shape[-1], self.patch_embed.patch_size
        w0, h0 = w // size + 0.1, h // size + 0.1
        patch_pos_embed = patch_pos_embed.reshape(1, side, side, dim).permute(0, 3, 1, 2)
        scale = (w0 / side, h0 / side)
        patch_pos_embed = F.interpolate(patch_pos_embed, scale_factor=scale, mode="bicubic")
        patch_pos_embed = patch_pos_embed.permute(0, 2, 3, 1).reshape(1, -1, dim)
        return torch.cat([class_pos_embed, patch_pos_embed], dim=1)

    def prepare_tokens(self, x: Tensor) -> Tensor:
        w, h = x.shape[2:]
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.interpolate_pos_encoding(x, w, h)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prepare_tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class DINOHead(nn.Module):
    def __init__(self, in_dim: int, out_dim: int, hidden_dim: int, bottleneck_dim: int):
        super().__init__()
        layers = [nn.Linear(in_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, hidden_dim), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden_dim, bottleneck_dim))
        self.last_layer = weight_norm(nn.Linear(bottleneck_dim, out_dim, bias=False))
        gain = self.last_layer.parametrizations.weight.original0.requires_grad_(False)
        nn.init.uniform_(gain, 0.7, 1.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class MultiCropWrapper(nn.Module):
    """Crops of the same size go through the backbone together, and all through the head at once."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = VisionTransformer(), DINOHead(WIDTH, PROTOTYPES, HIDDEN, BOTTLENECK)

    def forward(self, x: list[Tensor]) -> Tensor:
        sizes = torch.tensor([crop.shape[-1] for crop in x])
        counts, start, output = torch.unique_consecutive(sizes, return_counts=True)[1], 0, []
        for count in counts.tolist():
            output.append(self.backbone(torch.cat(x[start : start + count])))
            start += count
        return self.head(torch.cat(output))


class DINOLoss(nn.Module):
    """Cross entropy of each crop of the student with the other big crops of the centered, sharp teacher."""

    def __init__(self, out_dim: int, ncrops: int):
        super().__init__()
        self.ncrops, self.student_temp, self.teacher_temp, self.center_momentum = ncrops, 0.2, 0.1, 0.9
        self.register_buffer("center", torch.randn(1, out_dim) * 0.1)

    def forward(self, student_output: Tensor, teacher_output: Tensor) -> Tensor:
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output - self.center) / self.teacher_temp, dim=-1)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out.detach().chunk(2)):
            for v in range(self.ncrops):
                if v != iq:
                    total_loss = total_loss - (q * F.log_softmax(student_out[v], dim=-1)).sum(dim=-1).mean()
                    n_loss_terms += 1
        if self.training:
            self.update_center(teacher_output)
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output: Tensor) -> None:
        batch_center = teacher_output.mean(dim=0, keepdim=True)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


class DINO(nn.Module):
    """Big crops [2, N, C, H, W] and small ones -> the loss, and what student and teacher say of each."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = MultiCropWrapper(), MultiCropWrapper()
        self.dino_loss = DINOLoss(PROTOTYPES, CROPS)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and not hasattr(module, "parametrizations"):
                nn.init.xavier_uniform_(module.weight, gain=1.6)
                nn.init.normal_(module.bias, std=0.1)
            elif isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, std=0.1)
        self.teacher.requires_grad_(False)

    def forward(self, global_crops: Tensor, local_crops: Tensor) -> dict[str, Tensor]:
        crops = [*global_crops.unbind(0), *local_crops.unbind(0)]
        with torch.no_grad():
            teacher_output = self.teacher(crops[:2])
        student_output = self.student(crops)
        loss = self.dino_loss(student_output, teacher_output)
        return {"loss": loss, "student": student_output, "teacher": teacher_output}


def crops() -> tuple[dict[str, Tensor], Tensor]:
    """Waves of one direction in each picture, cut at random places and coloured anew in each crop."""
    side = BIG + 6
    turn, pitch = 3 * torch.rand(PICTURES, 1, 1, 1), 0.4 + torch.rand(PICTURES, 1, 1, 1)
    across, down = torch.arange(side).to(turn), torch.arange(side).to(turn)[:, None]
    picture = torch.sin(pitch * (turn.cos() * across + turn.sin() * down) + turn)

    def crop(high: int, wide: int) -> Tensor:
        top, left = (int(torch.randint(side - size + 1, ())) for size in (high, wide))
        part = picture[:, :, top : top + high, left : left + wide]
        colour = 0.5 + torch.rand(PICTURES, CHANNELS, 1, 1)
        return colour * part + 0.2 * torch.randn(PICTURES, CHANNELS, high, wide)

    big, small = ([crop(*size) for _ in range(2)] for size in ((BIG, BIG), SMALL))
    return {"global_crops": torch.stack(big), "local_crops": torch.stack(small)}, turn.flatten()


def agreement(outputs: dict[str, Tensor], _: Tensor) -> Tensor:
    return 0.1 * outputs["loss"]
