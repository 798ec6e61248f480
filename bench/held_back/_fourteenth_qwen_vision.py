"""A small Qwen2-VL: packed patches of images and clips, merged by fours, among the tokens of a text."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, END, VISION_START, VISION_END, IMAGE, LENGTH = 24, 0, 1, 2, 3, 24
PATCH, MERGE, VISION_WIDTH, VISION_HEADS = (3, 2, 2, 2), 2, 16, 2
WIDTH, HEADS, KEY_HEADS, INNER, SECTIONS = 40, 4, 2, 44, (1, 2, 2)
GRIDS = ((1, 4, 6), (2, 2, 4), (1, 6, 2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int, theta: float):
        super().__init__()
        self.register_buffer("inv_freq", theta ** -(torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, places: Tensor) -> Tensor:
        return places[..., None] * self.inv_freq


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class VisionAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(VISION_WIDTH, 3 * VISION_WIDTH), nn.Linear(VISION_WIDTH, VISION_WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(len(x), 3, VISION_HEADS, -1).permute(1, 2, 0, 3)
        turn = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        scores = turned(q, *turn) @ turned(k, *turn).transpose(1, 2) / q.shape[-1] ** 0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device)
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            hidden[start:end, start:end] = False
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.proj((shares @ v).transpose(0, 1).flatten(1))


class VisionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(VISION_WIDTH, eps=1e-6) for _ in range(2))
        up, down = nn.Linear(VISION_WIDTH, 2 * VISION_WIDTH), nn.Linear(2 * VISION_WIDTH, VISION_WIDTH)
        self.attn, self.mlp = VisionAttention(), nn.Sequential(OrderedDict(fc1=up, act=QuickGELU(), fc2=down))

    def forward(self, x: Tensor, cu_seqlens: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cu_seqlens, angles)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    def __init__(self, joined: int = VISION_WIDTH * MERGE**2):
        super().__init__()
        self.ln_q = nn.LayerNorm(VISION_WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(joined, joined), nn.GELU(), nn.Linear(joined, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(len(x) // MERGE**2, -1))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        proj = nn.Conv3d(PATCH[0], VISION_WIDTH, PATCH[1:], stride=PATCH[1:], bias=False)
        steps = OrderedDict(view=nn.Unflatten(1, PATCH), proj=proj, flat=nn.Flatten())
        self.patch_embed, self.rotary_pos_emb = nn.Sequential(steps), RotaryEmbedding(4, 1e4)
        self.blocks, self.merger = nn.ModuleList(VisionBlock() for _ in range(2)), PatchMerger()

    def rot_pos_emb(self, grid_thw: Tensor) -> Tensor:
        places = []
        for t, h, w in grid_thw.tolist():
            square = torch.cartesian_prod(torch.arange(h), torch.arange(w)).view(h // 2, 2, w // 2, 2, 2)
            places.append(square.transpose(1, 2).reshape(-1, 2).repeat(t, 1))
        return self.rotary_pos_emb(torch.arange(int(grid_thw.max())))[torch.cat(places)].flatten(1)

    def forward(self, x: Tensor, grid_thw: Tensor) -> Tensor:
        x, angles = self.patch_embed(x), self.rot_pos_emb(grid_thw)
        lengths = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
        for block in self.blocks:
            x = block(x, F.pad(lengths.cumsum(0), (1, 0)), angles)
        return self.merger(x)


class Qwen2VLAttention(nn.Module):
    def __init__(self, narrow: int = WIDTH // HEADS * KEY_HEADS):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, narrow)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, narrow), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in layers)
        pieces = (turn.split(SECTIONS * 2, -1) for turn in turns)
        turn = [torch.cat([p[i % 3] for i, p in enumerate(each)], -1)[:, None] for each in pieces]
        k, v = (y.repeat_interleave(HEADS // KEY_HEADS, 1) for y in (turned(k, *turn), v))
        scores = turned(q, *turn) @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.o_proj((shares @ v).transpose(1, 2).flatten(2))


class Qwen2MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(INNER, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Qwen2VLDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Qwen2VLAttention(), Qwen2MLP()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(WIDTH, 1e-6) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2VLModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH, 1e-6)
        self.layers = nn.ModuleList(Qwen2VLDecoderLayer() for _ in range(2))
        self.rotary_emb = RotaryEmbedding(WIDTH // HEADS, 100.0)

    def forward(self, x: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        mask = (attention_mask.bool()[:, None, None] | own) & torch.ones_like(own).tril()
        angles = self.rotary_emb(position_ids).repeat(1, 1, 1, 2)
        for layer in self.layers:
            x = layer(x, mask, (angles.cos(), angles.sin()))
        return self.norm(x)


def varied(module: nn.Module) -> None:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    elif isinstance(module, nn.Linear | nn.Conv3d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    if getattr(module, "bias", None) is not None:
        nn.init.normal_(module.bias, std=0.2)


class Qwen2VL(nn.Module):
    """Patches, their grids, token ids and mask [N, T] -> logits; each image's features replace its tokens."""

    def __init__(self):
        super().__init__()
        self.visual, self.model = VisionTransformer(), Qwen2VLModel()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(varied)

    def get_rope_index(self, input_ids: Tensor, grid_thw: Tensor, attention_mask: Tensor) -> Tensor:
        """Time, row and column of each token; what follows begins after the largest of them."""
        places, grids = torch.ones_like(input_ids).repeat(3, 1, 1), iter(grid_thw.tolist())
        for row, kept in enumerate(attention_mask.bool()):
            ids, pieces, done, start = input_ids[row, kept].tolist(), [], 0, 0
            while done < len(ids):
                t, h, w = next(grids) if ids[done] == IMAGE else (1, MERGE, MERGE)
                axes = torch.arange(t), torch.arange(h // MERGE), torch.arange(w // MERGE)
                pieces.append(torch.cartesian_prod(*axes).T + start)
                done, start = done + pieces[-1].shape[1], int(pieces[-1].max()) + 1
            places[:, row, kept] = torch.cat(pieces, 1).to(places)
        return places

    def forward(self, patches: Tensor, grid_thw: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, features = self.model.embed_tokens(input_ids), self.visual(patches, grid_thw)
        x = x.masked_scatter((input_ids == IMAGE)[..., None], features)
        places = self.get_rope_index(input_ids, grid_thw, attention_mask)
        return self.lm_head(self.model(x, attention_mask, places))


def conversations() -> tuple[tuple[Tensor, ...], Tensor]:
    """A row about one image, padded on the left, and one about two; a question ends before its answer."""
    grids = torch.tensor(GRIDS)[torch.randperm(3)]
    sizes = (grids.prod(1) // MERGE**2).tolist()
    ids, kept = torch.full((2, LENGTH), END), torch.zeros(2, LENGTH, dtype=torch.long)
    for row, images in enumerate((sizes[:1], sizes[1:])):
        tokens = torch.randint(4, VOCABULARY, (2,)).tolist()
        for size in images:
            tokens += [VISION_START, *[IMAGE] * size, VISION_END, int(torch.randint(4, VOCABULARY, ()))]
        tokens.append(END)
        while len(tokens) < LENGTH - 4 + 4 * row:
            tokens.append((7 * tokens[-1] + tokens[0]) % 20 + 4)
        ids[row, -len(tokens) :], kept[row, -len(tokens) :] = torch.tensor(tokens), 1
    labels = ids.masked_fill((kept == 0) | (ids == IMAGE), -100)
    return (torch.randn(int(grids.prod(1).sum()), 24), grids, ids, kept), labels


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
