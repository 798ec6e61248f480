"""A small masked autoencoder (ViT-MAE): most patches are taken away and told again from the rest."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, SIZE, PATCH, PICTURES = 3, 16, 4, 4
WIDTH, HEADS, LAYERS, INNER = 20, 2, 3, 40
DECODER, DECODER_LAYERS, CELL, MASK_RATIO, EPS = (16, 4, 32), 2, PATCH**2 * CHANNELS, 0.625, 1e-12


def get_2d_sincos_pos_embed(dim: int, side: int) -> Tensor:
    """[1, 1 + side * side, dim]: nothing for the class token; the column first, then the row."""
    row, column = torch.cartesian_prod(torch.arange(side), torch.arange(side)).T
    rates = 10000 ** -(torch.arange(dim // 4) / (dim / 4))
    parts = [wave(torch.outer(axis, rates)) for axis in (column, row) for wave in (torch.sin, torch.cos)]
    return F.pad(torch.cat(parts, 1), (0, 0, 1, 0))[None]


class ViTMAEPatchEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection, self.num_patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH), (SIZE // PATCH) ** 2

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.projection(pixel_values).flatten(2).transpose(1, 2)


class ViTMAEEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(0.5 * torch.randn(1, 1, WIDTH))
        self.patch_embeddings = ViTMAEPatchEmbeddings()
        self.position_embeddings = nn.Parameter(get_2d_sincos_pos_embed(WIDTH, SIZE // PATCH), False)

    def random_masking(self, sequence: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        len_keep = int(sequence.shape[1] * (1 - MASK_RATIO))
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep].unsqueeze(-1).repeat(1, 1, sequence.shape[2])
        mask = (ids_restore >= len_keep).to(sequence)
        return torch.gather(sequence, dim=1, index=ids_keep), mask, ids_restore

    def forward(self, pixel_values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embeddings = self.patch_embeddings(pixel_values) + self.position_embeddings[:, 1:, :]
        embeddings, mask, ids_restore = self.random_masking(embeddings, noise)
        cls_tokens = (self.cls_token + self.position_embeddings[:, :1, :]).expand(len(embeddings), -1, -1)
        return torch.cat((cls_tokens, embeddings), dim=1), mask, ids_restore


class ViTMAESelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden_states: Tensor) -> Tensor:
        parts, heads = (self.query, self.key, self.value), (self.num_attention_heads, -1)
        query, key, value = (part(hidden_states).unflatten(2, heads).transpose(1, 2) for part in parts)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.attention_head_size**-0.5
        return torch.matmul(scores.softmax(dim=-1), value).transpose(1, 2).flatten(2)


class ViTMAESelfOutput(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense(hidden_states)


class ViTMAEAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention, self.output = ViTMAESelfAttention(width, heads), ViTMAESelfOutput(width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output(self.attention(hidden_states))


class ViTMAEIntermediate(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(width, inner), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class ViTMAEOutput(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.dense = nn.Linear(inner, width)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.dense(hidden_states) + input_tensor


class ViTMAELayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.attention, self.intermediate = ViTMAEAttention(width, heads), ViTMAEIntermediate(width, inner)
        self.output = ViTMAEOutput(width, inner)
        self.layernorm_before, self.layernorm_after = (nn.LayerNorm(width, eps=EPS) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.attention(self.layernorm_before(hidden_states)) + hidden_states
        return self.output(self.intermediate(self.layernorm_after(hidden_states)), hidden_states)


class ViTMAEEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(ViTMAELayer(WIDTH, HEADS, INNER) for _ in range(LAYERS))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states)
        return hidden_states


class ViTMAEModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = ViTMAEEmbeddings(), ViTMAEEncoder()
        self.layernorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, pixel_values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedding_output, mask, ids_restore = self.embeddings(pixel_values, noise)
        return self.layernorm(self.encoder(embedding_output)), mask, ids_restore


class ViTMAEDecoder(nn.Module):
    def __init__(self, num_patches: int):
        super().__init__()
        width = DECODER[0]
        self.decoder_embed = nn.Linear(WIDTH, width)
        self.mask_token = nn.Parameter(0.5 * torch.randn(1, 1, width))
        self.decoder_pos_embed = nn.Parameter(get_2d_sincos_pos_embed(width, int(num_patches**0.5)), False)
        self.decoder_layers = nn.ModuleList(ViTMAELayer(*DECODER) for _ in range(DECODER_LAYERS))
        self.decoder_norm, self.decoder_pred = nn.LayerNorm(width, eps=EPS), nn.Linear(width, CELL)

    def forward(self, hidden_states: Tensor, ids_restore: Tensor) -> Tensor:
        x = self.decoder_embed(hidden_states)
        mask_tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.cat([x[:, 1:, :], mask_tokens], dim=1)
        x_ = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        hidden_states = torch.cat([x[:, :1, :], x_], dim=1) + self.decoder_pos_embed
        for layer_module in self.decoder_layers:
            hidden_states = layer_module(hidden_states)
        return self.decoder_pred(self.decoder_norm(hidden_states))[:, 1:, :]


class ViTMAEForPreTraining(nn.Module):
    """Pictures [N, C, H, W] and a noise for each patch -> the loss, the pixels told and what was masked."""

    def __init__(self):
        super().__init__()
        self.vit = ViTMAEModel()
        self.decoder = ViTMAEDecoder(self.vit.embeddings.patch_embeddings.num_patches)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, std=0.2)

    def forward_loss(self, pixel_values: Tensor, pred: Tensor, mask: Tensor) -> Tensor:
        cells = pixel_values.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        target = torch.einsum("nchpwq->nhwpqc", cells).flatten(3).flatten(1, 2)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        return (((pred - target) ** 2).mean(dim=-1) * mask).sum() / mask.sum()

    def forward(self, pixel_values: Tensor, noise: Tensor) -> dict[str, Tensor]:
        latent, mask, ids_restore = self.vit(pixel_values, noise)
        logits = self.decoder(latent, ids_restore)
        loss = self.forward_loss(pixel_values, logits, mask)
        return {"loss": loss, "logits": logits, "mask": mask, "ids_restore": ids_restore}


def waves() -> tuple[dict[str, Tensor], Tensor]:
    """Coloured waves, each of one direction, with a little grain; their clean pixels as the target."""
    turn, phase = torch.pi * torch.rand(PICTURES, 1, 1, 1), 6 * torch.rand(PICTURES, CHANNELS, 1, 1)
    across, down = torch.arange(SIZE).to(turn), torch.arange(SIZE).to(turn)[:, None]
    clean = torch.sin(0.9 * (turn.cos() * across + turn.sin() * down) + phase)
    order = torch.rand(PICTURES, (SIZE // PATCH) ** 2).argsort(1)
    noise = (order + 0.5 * torch.rand(order.shape)) / order.shape[1]
    return {"pixel_values": clean + 0.1 * torch.randn_like(clean), "noise": noise}, clean


def told_loss(outputs: dict[str, Tensor], _: Tensor) -> Tensor:
    return outputs["loss"]
