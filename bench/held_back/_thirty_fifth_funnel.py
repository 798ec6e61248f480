"""A small Funnel Transformer that labels tokens: three blocks, each half as long, and a decoder."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LABELS, LENGTH, SENTENCES = 31, 5, 18, 4
WIDTH, HEADS, HEAD, INNER, BLOCKS, EPS, CLS = 20, 3, 6, 28, (2, 2, 1), 1e-9, 2


class FunnelEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings, self.layer_norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer_norm(self.word_embeddings(input_ids))


class FunnelAttentionStructure(nn.Module):
    """What all attentions share: distances, segments, masks; and how they are pooled."""

    def init_attention_inputs(self, hidden: Tensor, mask: Tensor, token_type_ids: Tensor) -> tuple:
        one, two = token_type_ids[:, :, None], token_type_ids[:, None]
        token_type_mat = (one == two) | (one == CLS) | (two == CLS)
        cls_mask = F.pad(hidden.new_ones(hidden.shape[1] - 1, hidden.shape[1] - 1), (1, 0, 1, 0))
        return self.get_position_embeds(hidden), token_type_mat, mask.type_as(hidden), cls_mask

    def get_position_embeds(self, hidden: Tensor) -> list[list[Tensor | None]]:
        """For each block the encodings of distances among its states, and from the pooled to the longer."""
        found, pos = [], torch.arange(hidden.shape[1], device=hidden.device)
        for block in range(len(BLOCKS)):
            pooling, pooled = None, pos
            if block > 0:
                pooled = torch.cat([pos.new_tensor([1 - 2**block]), pos[1:-1:2]])
                pooling = self.encode(hidden, self.relative_pos(pos, 2 ** (block - 1), pooled, 2))
            pos = pooled
            found.append([self.encode(hidden, self.relative_pos(pos, 2**block, pos, 1)), pooling])
        return found

    def encode(self, hidden: Tensor, distance: Tensor) -> Tensor:
        half = torch.arange(WIDTH // 2, device=hidden.device, dtype=hidden.dtype)
        angle = distance[:, None] / 10000 ** (2 * half / WIDTH)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def relative_pos(self, pos: Tensor, stride: int, pooled: Tensor, shift: int) -> Tensor:
        most, least = int(pooled[0] - pos[0]) + shift * len(pooled) * stride, int(pooled[0] - pos[-1])
        return torch.arange(most, least - 1, -stride, device=pos.device)

    def stride_pool(self, x: Tensor, axis: int) -> Tensor:
        """The first once more, then every other one without the last."""
        x = torch.cat([x.narrow(axis, 0, 1), x], axis)
        return x.index_select(axis, torch.arange(0, x.shape[axis] - 1, 2, device=x.device))

    def pool_tensor(self, x: Tensor, mode: str = "mean") -> Tensor:
        x = torch.cat([x[:, :1], x[:, :-1]], 1)
        if mode == "mean":
            return F.avg_pool2d(x[:, None], (2, 1), ceil_mode=True)[:, 0]
        return -F.max_pool1d(-x[:, None], 2, ceil_mode=True)[:, 0]

    def pre_attention_pooling(self, hidden: Tensor, inputs: tuple) -> tuple[Tensor, tuple]:
        position, types, mask, cls_mask = inputs
        types, cls_mask = self.stride_pool(types, 1), self.stride_pool(cls_mask, 0)
        return self.pool_tensor(hidden), (position, types, mask, cls_mask)

    def post_attention_pooling(self, inputs: tuple) -> tuple:
        position, types, mask, cls_mask = inputs
        types, cls_mask = self.stride_pool(types, 2), self.stride_pool(cls_mask, 1)
        return position, types, self.pool_tensor(mask, "min"), cls_mask


class FunnelRelMultiheadAttention(nn.Module):
    def __init__(self, block_index: int):
        super().__init__()
        self.block_index = block_index
        self.q_head = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k_head, self.v_head = (nn.Linear(WIDTH, HEADS * HEAD) for _ in range(2))
        for name in ("r_w_bias", "r_r_bias", "r_s_bias"):
            setattr(self, name, nn.Parameter(torch.empty(HEADS, HEAD)))
        self.r_kernel = nn.Parameter(torch.empty(WIDTH, HEADS, HEAD))
        self.seg_embed = nn.Parameter(torch.empty(2, HEADS, HEAD))
        self.post_proj = nn.Linear(HEADS * HEAD, WIDTH)
        self.layer_norm, self.scale = nn.LayerNorm(WIDTH, eps=EPS), HEAD**-0.5

    def relative_positional_attention(self, position: list, q: Tensor, length: int, cls_mask: Tensor):
        shift = 1 if q.shape[1] == length else 2
        r_head = torch.einsum("td,dnh->tnh", position[self.block_index][shift - 1], self.r_kernel)
        score = torch.einsum("binh,tnh->bnit", q + self.r_r_bias * self.scale, r_head)
        batch, heads, rows, most = score.shape
        score = score.reshape(batch, heads, most, rows)[:, :, shift:]
        return score.reshape(batch, heads, rows, most - shift)[..., :length] * cls_mask

    def relative_token_type_attention(self, types: Tensor, q: Tensor, cls_mask: Tensor) -> Tensor:
        score = torch.einsum("bind,snd->bnis", q + self.r_s_bias * self.scale, self.seg_embed)
        return torch.where(types[:, None], score[..., 1:], score[..., :1]) * cls_mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_inputs: tuple) -> Tensor:
        position, types, mask, cls_mask = attention_inputs
        heads = zip((self.q_head, self.k_head, self.v_head), (query, key, value), strict=True)
        q, k, v = (head(x).unflatten(2, (HEADS, HEAD)) for head, x in heads)
        q = q * self.scale
        score = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias * self.scale, k)
        score = score + self.relative_positional_attention(position, q, key.shape[1], cls_mask)
        score = score + self.relative_token_type_attention(types, q, cls_mask)
        prob = torch.softmax(score - 1e6 * (1 - mask[:, None, None]), -1)
        mixed = torch.einsum("bnij,bjnd->bind", prob, v).flatten(2)
        return self.layer_norm(query + self.post_proj(mixed))


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class FunnelPositionwiseFFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_1 = nn.Linear(WIDTH, INNER)
        self.activation_function = NewGELUActivation()
        self.linear_2 = nn.Linear(INNER, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(hidden + self.linear_2(self.activation_function(self.linear_1(hidden))))


class FunnelLayer(nn.Module):
    def __init__(self, block_index: int):
        super().__init__()
        self.attention, self.ffn = FunnelRelMultiheadAttention(block_index), FunnelPositionwiseFFN()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_inputs: tuple) -> Tensor:
        return self.ffn(self.attention(query, key, value, attention_inputs))


class FunnelEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_structure = FunnelAttentionStructure()
        blocks = (nn.ModuleList(FunnelLayer(i) for _ in range(size)) for i, size in enumerate(BLOCKS))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor, mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The last states, and those after the first block."""
        shared, first = self.attention_structure, None
        inputs = shared.init_attention_inputs(hidden, mask, token_type_ids)
        for i, block in enumerate(self.blocks):
            for j, layer in enumerate(block):
                if i > 0 and j == 0:
                    pooled, inputs = shared.pre_attention_pooling(hidden, inputs)
                    hidden = layer(pooled, hidden, hidden, inputs)
                    inputs = shared.post_attention_pooling(inputs)
                else:
                    hidden = layer(hidden, hidden, hidden, inputs)
            first = hidden if i == 0 else first
        return hidden, first


class FunnelDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_structure = FunnelAttentionStructure()
        self.layers = nn.ModuleList([FunnelLayer(0)])

    def forward(self, final: Tensor, first: Tensor, mask: Tensor, token_type_ids: Tensor) -> Tensor:
        rest = F.pad(final[:, 1:].repeat_interleave(4, 1), (0, 0, 0, 3))
        hidden = torch.cat([final[:, :1], rest[:, : first.shape[1] - 1]], 1) + first
        inputs = self.attention_structure.init_attention_inputs(hidden, mask, token_type_ids)
        return self.layers[0](hidden, hidden, hidden, inputs)


class Funnel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.decoder = FunnelEmbeddings(), FunnelEncoder(), FunnelDecoder()
        self.classifier = nn.Linear(WIDTH, LABELS)
        for name, weight in self.named_parameters():
            size = 0.1 if "word" in name else 0.3 if weight.dim() == 1 or "r_" in name else 0.25
            nn.init.normal_(weight, 1.0 if name.endswith("norm.weight") else 0.0, size)

    def forward(self, input_ids: Tensor, mask: Tensor, token_type_ids: Tensor) -> Tensor:
        final, first = self.encoder(self.embeddings(input_ids), mask, token_type_ids)
        return self.classifier(self.decoder(final, first, mask, token_type_ids))


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Pairs of sentences, padded; a token's label goes by it and its neighbour; padding has none."""
    place, ids = torch.arange(LENGTH), torch.randint(3, WORDS, (SENTENCES, LENGTH))
    mask = place < torch.randint(9, LENGTH + 1, (SENTENCES, 1))
    types = (place >= torch.randint(4, 8, (SENTENCES, 1))).long() * mask
    ids, types = torch.where(mask, ids, 0), types.index_fill(1, torch.tensor([0]), CLS)
    ids[:, 0] = 1
    labels = ((ids + ids.roll(1, 1)) % LABELS).masked_fill(~mask, -100)
    return {"input_ids": ids, "mask": mask.long(), "token_type_ids": types}, labels


def tagging(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2
