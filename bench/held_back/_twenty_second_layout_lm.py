"""A tiny LayoutLMv3: words with their boxes, patches of the page behind them, attention biased by place."""

import math
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, PAD, END, FIRST_WORD, WORDS, KINDS, LABELS, PAGES, LENGTH = -100, 1, 2, 4, 16, 3, 4, 4, 12
WIDTH, HEADS, LAYERS, INNER, SIDE, PART, PATCH, GRID = 24, 2, 3, 32, 64, 4, 3, (3, 4)
BINS, FAR, FAR_2D, ROOT = 16, 24, 50, math.sqrt(WIDTH // HEADS)
LayerNorm = partial(nn.LayerNorm, WIDTH, eps=1e-5)


def chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class LayoutLMv3TextEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(FIRST_WORD + WORDS, WIDTH, padding_idx=PAD)
        self.token_type_embeddings, self.LayerNorm = nn.Embedding(2, WIDTH), LayerNorm()
        self.position_embeddings = nn.Embedding(LENGTH + 4, WIDTH, padding_idx=PAD)
        self.x_position_embeddings, self.y_position_embeddings = (nn.Embedding(SIDE, PART) for _ in "xy")
        self.h_position_embeddings, self.w_position_embeddings = (nn.Embedding(SIDE, PART) for _ in "hw")

    def calculate_spatial_position_embeddings(self, bbox: Tensor) -> Tensor:
        left, right = (self.x_position_embeddings(bbox[:, :, i]) for i in (0, 2))
        upper, lower = (self.y_position_embeddings(bbox[:, :, i]) for i in (1, 3))
        height = self.h_position_embeddings(torch.clip(bbox[:, :, 3] - bbox[:, :, 1], 0, SIDE - 1))
        width = self.w_position_embeddings(torch.clip(bbox[:, :, 2] - bbox[:, :, 0], 0, SIDE - 1))
        return torch.cat([left, upper, right, lower, height, width], dim=-1)

    def forward(self, input_ids: Tensor, bbox: Tensor, token_type_ids: Tensor) -> Tensor:
        mask = input_ids.ne(PAD).long()
        position_ids = torch.cumsum(mask, dim=1) * mask + PAD
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings + self.calculate_spatial_position_embeddings(bbox))


def cogview_attention(attention_scores: Tensor, alpha: float = 32) -> Tensor:
    scaled = attention_scores / alpha
    return ((scaled - scaled.amax(dim=-1, keepdim=True)) * alpha).softmax(dim=-1)


class LayoutLMv3SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, attention_mask: Tensor, rel_pos: Tensor, rel_2d_pos: Tensor) -> Tensor:
        parts = (layer(x).unflatten(2, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.permute(0, 2, 1, 3) for part in parts)
        scores = torch.matmul(query / ROOT, key.transpose(-1, -2))
        scores = scores + (rel_pos + rel_2d_pos) / ROOT + attention_mask
        return torch.matmul(cogview_attention(scores), value).permute(0, 2, 1, 3).flatten(2)


class LayoutLMv3Output(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, WIDTH), LayerNorm()

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class LayoutLMv3Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = LayoutLMv3SelfAttention(), LayoutLMv3Output(WIDTH)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.output(self.self(x, *rest), x)


class LayoutLMv3Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.output = LayoutLMv3Attention(), LayoutLMv3Output(INNER)
        self.intermediate = chain(dense=nn.Linear(WIDTH, INNER), intermediate_act_fn=nn.GELU())

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        x = self.attention(x, *rest)
        return self.output(self.intermediate(x), x)


class LayoutLMv3Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(LayoutLMv3Layer() for _ in range(LAYERS))
        bias = partial(nn.Linear, BINS, HEADS, bias=False)
        self.rel_pos_bias, self.rel_pos_x_bias, self.rel_pos_y_bias = bias(), bias(), bias()

    def relative_position_bucket(self, distance: Tensor, max_distance: int, like: Tensor) -> Tensor:
        half, exact, n = BINS // 2, BINS // 4, distance.abs()
        large = torch.log(n.clamp(min=1).to(like) / exact) / math.log(max_distance / exact)
        large = (exact + (large * (half - exact)).long()).clamp(max=half - 1)
        return (distance > 0).long() * half + torch.where(n < exact, n, large)

    def cal_pos_emb(self, places: Tensor, table: nn.Linear, max_distance: int) -> Tensor:
        distance = places.unsqueeze(-2) - places.unsqueeze(-1)
        bucket = self.relative_position_bucket(distance, max_distance, table.weight)
        return table.weight.t()[bucket].permute(0, 3, 1, 2)

    def forward(self, x: Tensor, bbox: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        rel_pos = self.cal_pos_emb(position_ids, self.rel_pos_bias, FAR)
        rel_2d_pos = self.cal_pos_emb(bbox[:, :, 0], self.rel_pos_x_bias, FAR_2D)
        rel_2d_pos = rel_2d_pos + self.cal_pos_emb(bbox[:, :, 3], self.rel_pos_y_bias, FAR_2D)
        for layer in self.layer:
            x = layer(x, attention_mask, rel_pos, rel_2d_pos)
        return x


class LayoutLMv3Model(nn.Module):
    """Words, boxes and a picture -> states of the words, of the picture's own mark and of its patches."""

    def __init__(self):
        super().__init__()
        self.embeddings = LayoutLMv3TextEmbeddings()
        self.patch_embed = chain(proj=nn.Conv2d(3, WIDTH, PATCH, PATCH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.6)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + math.prod(GRID), WIDTH) * 0.6)
        self.LayerNorm, self.norm, self.encoder = LayerNorm(), LayerNorm(eps=1e-6), LayoutLMv3Encoder()

    def visual_bbox(self, like: Tensor) -> Tensor:
        y, x = (torch.arange(n + 1).to(like) * (SIDE - 1) // n for n in GRID)
        boxes = [torch.cartesian_prod(y[part], x[part]).flip(1) for part in (slice(-1), slice(1, None))]
        return torch.cat([like.new_tensor([[1, 1, SIDE - 2, SIDE - 2]]), torch.cat(boxes, 1)])

    def forward_image(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embed(pixel_values).flatten(2).transpose(1, 2)
        marked = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1)
        return self.norm(marked + self.pos_embed)

    def forward(self, pixel_values: Tensor, attention_mask: Tensor, bbox: Tensor, **text: Tensor) -> Tensor:
        x, visual = self.embeddings(bbox=bbox, **text), self.forward_image(pixel_values)
        bbox = torch.cat([bbox, self.visual_bbox(bbox).expand(len(bbox), -1, -1)], 1)
        places = [torch.arange(part.shape[1], device=x.device).expand(len(x), -1) for part in (x, visual)]
        mask = F.pad(attention_mask, (0, visual.shape[1]), value=1)[:, None, None].to(x)
        x = self.LayerNorm(torch.cat([x, visual], 1))
        return self.encoder(x, bbox, (1 - mask) * torch.finfo(x.dtype).min, torch.cat(places, 1))


class LayoutLMv3ForDocuments(nn.Module):
    """A page -> scores of each word's label, of the page's kind, and all states."""

    def __init__(self):
        super().__init__()
        self.layoutlmv3, self.classifier = LayoutLMv3Model(), nn.Linear(WIDTH, LABELS)
        dense, out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, KINDS)
        self.page_classifier = chain(dense=dense, tanh=nn.Tanh(), out_proj=out_proj)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.6)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=0.25 if module.weight.shape[-1] != BINS else 1.5)
            if isinstance(getattr(module, "bias", None), Tensor):
                nn.init.normal_(module.bias, std=0.2)

    def forward(self, input_ids: Tensor, **rest: Tensor) -> dict[str, Tensor]:
        x = self.layoutlmv3(input_ids=input_ids, **rest)
        words, page = x[:, : input_ids.shape[1]], self.page_classifier(x[:, 0])
        return {"logits": self.classifier(words), "page_logits": page, "last_hidden_state": x}


def page_of_words() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Words in three columns that count up by the page's kind, which their ink on the picture shows too;
    a word's label follows from its column and the kind, but for tall words."""
    kind, start = torch.randint(KINDS, (PAGES, 1)), torch.randint(WORDS, (PAGES, 1))
    place = torch.arange(LENGTH).expand(PAGES, -1)
    size, column, row = torch.randint(8, LENGTH + 1, (PAGES, 1)), place % 3, place // 3
    words, last, gone = (place > 0) & (place < size - 1), place == size - 1, place >= size
    corner = torch.stack([20 * column, 14 * row], 2) + torch.randint(1, 7, (PAGES, LENGTH, 2))
    extent = torch.stack([torch.randint(5, 14, place.shape), torch.randint(4, 11, place.shape)], 2)
    bbox = torch.cat([corner, corner + extent], 2) * words[:, :, None]
    ids = torch.where(words, FIRST_WORD + (start + (1 + kind) * place) % WORDS, END * last + PAD * gone)
    labels = torch.where(extent[..., 1] > 7, LABELS - 1, (column + kind) % KINDS)
    picture = 0.4 * torch.randn(PAGES, 3, GRID[0] * PATCH, GRID[1] * PATCH)
    spots = corner[..., 1] * GRID[0] * PATCH // SIDE, corner[..., 0] * GRID[1] * PATCH // SIDE
    picture.index_put_((torch.arange(PAGES)[:, None], kind, *spots), 1.5 * words, accumulate=True)
    given = {"input_ids": ids, "bbox": bbox, "attention_mask": (~gone).long()}
    given |= {"token_type_ids": (row > 0).long() * words, "pixel_values": picture}
    return given, (labels.masked_fill(~words, IGNORED), kind[:, 0])


def misread(outputs: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    labels = F.cross_entropy(outputs["logits"].mT, target[0], ignore_index=IGNORED)
    return 0.5 * labels + 0.5 * F.cross_entropy(outputs["page_logits"], target[1])
