"""A small OWL-ViT: boxes and classes for the patches of a picture, the classes asked for by texts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH, ROWS, COLUMNS = 4, 3, 5
VISION, TEXT, SHARED = (24, 3, 40, 3), (20, 2, 36, 2), 18  # width, heads, inner width, layers
WORDS, LENGTH, QUERIES, OBJECTS, PICTURES = 31, 7, 4, 2, 3
EMPTY = -20.0  # the logit of a query that is not there; small, so that it hides no other


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class OwlViTVisionEmbeddings(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.patch_embedding = nn.Conv2d(3, width, PATCH, PATCH, bias=False)
        self.position_embedding = nn.Embedding(ROWS * COLUMNS + 1, width)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(patches), 1, -1)
        return torch.cat([first, patches], 1) + self.position_embedding.weight


class OwlViTTextEmbeddings(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.token_embedding = nn.Embedding(WORDS, width)
        self.position_embedding = nn.Embedding(LENGTH, width)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.token_embedding(input_ids) + self.position_embedding.weight[: input_ids.shape[1]]


class OwlViTAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        each = self.q_proj(x) * self.scale, self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for y in each)
        weights = q @ k.transpose(2, 3) + (0 if mask is None else mask)
        return self.out_proj((weights.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OwlViTMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = nn.Linear(width, inner), QuickGELU(), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class OwlViTEncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.self_attn, self.mlp = OwlViTAttention(width, heads), OwlViTMLP(width, inner)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class OwlViTEncoder(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(OwlViTEncoderLayer(width, heads, inner) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


class OwlViTTextTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = OwlViTTextEmbeddings(TEXT[0]), OwlViTEncoder(*TEXT)
        self.final_layer_norm = nn.LayerNorm(TEXT[0])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        seen = x.new_ones(x.shape[1], x.shape[1]).tril() * attention_mask[:, None, None]
        x = self.final_layer_norm(self.encoder(x, (1 - seen) * -1e30))
        return x[torch.arange(len(x), device=x.device), input_ids.argmax(-1)]


class OwlViTVisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = OwlViTVisionEmbeddings(VISION[0]), OwlViTEncoder(*VISION)
        self.pre_layernorm, self.post_layernorm = nn.LayerNorm(VISION[0]), nn.LayerNorm(VISION[0])

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.encoder(self.pre_layernorm(self.embeddings(pixel_values)))


class OwlViTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.text_model, self.vision_model = OwlViTTextTransformer(), OwlViTVisionTransformer()
        self.text_projection = nn.Linear(TEXT[0], SHARED, bias=False)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        text_embeds = self.text_projection(self.text_model(input_ids, mask))
        return text_embeds / text_embeds.norm(dim=-1, keepdim=True), self.vision_model(pixel_values)


class OwlViTBoxPredictionHead(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dense0, self.dense1, self.dense2 = (nn.Linear(width, n) for n in (width, width, 4))
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dense2(self.gelu(self.dense1(self.gelu(self.dense0(x)))))


class OwlViTClassPredictionHead(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dense0, self.elu = nn.Linear(width, SHARED), nn.ELU()
        self.logit_shift, self.logit_scale = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, image_embeds: Tensor, query_embeds: Tensor, query_mask: Tensor) -> Tensor:
        both = self.dense0(image_embeds), query_embeds
        logits = torch.einsum("bpd,bqd->bpq", *(x / (x.norm(dim=-1, keepdim=True) + 1e-6) for x in both))
        logits = (logits + self.logit_shift(image_embeds)) * (self.elu(self.logit_scale(image_embeds)) + 1)
        return logits.masked_fill(~query_mask[:, None], EMPTY)


class OwlViTForObjectDetection(nn.Module):
    """Pictures [N, 3, 12, 20], ids and mask [N, Q, T] -> logits [N, P, Q], boxes [N, P, 4]."""

    def __init__(self):
        super().__init__()
        width = VISION[0]
        self.class_head, self.box_head = OwlViTClassPredictionHead(width), OwlViTBoxPredictionHead(width)
        self.owlvit, self.layer_norm, self.sigmoid = OwlViTModel(), nn.LayerNorm(width), nn.Sigmoid()
        for name, p in self.named_parameters():
            size = p[0].numel() ** -0.5 if p.ndim > 1 else 0.2
            nn.init.normal_(p, "norm" in name and name.endswith("weight"), size)

    def compute_box_bias(self, like: Tensor) -> Tensor:
        x, y = torch.arange(1, COLUMNS + 1).to(like) / COLUMNS, torch.arange(1, ROWS + 1).to(like) / ROWS
        center = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).flatten(0, 1)
        both = torch.cat([center, 1 / torch.tensor([COLUMNS, ROWS]).to(like).expand_as(center)], -1)
        return torch.log(both + 1e-4) - torch.log1p(-both + 1e-4)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        text, image = self.owlvit(input_ids.flatten(0, 1), pixel_values, attention_mask.flatten(0, 1))
        image = self.owlvit.vision_model.post_layernorm(image)
        image = self.layer_norm(image[:, 1:] * image[:, :1])
        logits = self.class_head(image, text.unflatten(0, input_ids.shape[:2]), input_ids[..., 0] > 0)
        odds = self.box_head(image) + self.compute_box_bias(image)
        return {"logits": logits, "pred_boxes": self.sigmoid(odds)}


def scenes() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tinted rectangles on noise; texts of two to five words, of which the last query may be empty."""
    high, wide, ids = ROWS * PATCH, COLUMNS * PATCH, torch.zeros(PICTURES, QUERIES, LENGTH).long()
    pictures = 0.3 * torch.randn(PICTURES, 3, high, wide)
    boxes = torch.rand(PICTURES, OBJECTS, 4).mul(torch.tensor([0.7, 0.7, 0.3, 0.3])) + 0.15
    place = (boxes[..., 1] * ROWS).long() * COLUMNS + (boxes[..., 0] * COLUMNS).long()
    classes = torch.zeros(PICTURES, ROWS * COLUMNS, QUERIES)
    y, x = (torch.arange(high)[:, None] + 0.5) / high, (torch.arange(wide) + 0.5) / wide
    for n in range(PICTURES):
        for q in range(QUERIES - n % 2):
            count = int(torch.randint(1, LENGTH - 2, ()))
            ids[n, q, : count + 2] = torch.randint(1, WORDS - 2, (count + 2,))
            ids[n, q, [0, count + 1]] = torch.tensor([WORDS - 2, WORDS - 1])
        for m, (a, b, w, h) in enumerate(boxes[n].tolist()):
            q = (n + m) % (QUERIES - n % 2)
            tint = torch.cos(ids[n, q, 1] * torch.tensor([1.0, 2.0, 3.0]))[:, None, None]
            pictures[n] += tint * (((x - a).abs() < w / 2) & ((y - b).abs() < h / 2))
            classes[n, place[n, m], q] = 1
    inputs = {"pixel_values": pictures, "input_ids": ids, "attention_mask": (ids > 0).long()}
    return inputs, {"classes": classes, "boxes": boxes, "place": place}


def matched(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the classes; L1 and generalised IoU of the matched boxes; all by two."""
    found = outputs["pred_boxes"].gather(1, target["place"][..., None].expand(-1, -1, 4))
    pair = (x.chunk(2, -1) for x in (found, target["boxes"]))
    (a, c), (b, d) = ((middle - size / 2, middle + size / 2) for middle, size in pair)
    inside = (torch.minimum(c, d) - torch.maximum(a, b)).clamp(min=0).prod(-1)
    hull, union = (c.maximum(d) - a.minimum(b)).prod(-1), (c - a).prod(-1) + (d - b).prod(-1) - inside
    overlap = inside / union - (hull - union) / hull
    entropy = F.binary_cross_entropy_with_logits(outputs["logits"], target["classes"])
    return (entropy + F.l1_loss(found, target["boxes"]) + (1 - overlap).mean()) / 2
