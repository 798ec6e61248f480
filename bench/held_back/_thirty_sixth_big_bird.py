"""A small BigBird: block sparse attention over padded pairs of sequences, with its heads for pre-training."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, PLACES, TYPES, HIDDEN, INNER, HEADS, LAYERS = 37, 40, 2, 21, 44, 3, 3
BLOCK, BLOCKS, RANDOM, BATCH = 4, 9, 2, 5
LENGTH, PENALTY = BLOCK * BLOCKS, -10000.0
PAD, CLS, SEP, MASK = range(4)


def rand_table() -> Tensor:
    """The random blocks of each head and each query block but the first and the last: none seen anyway."""
    rows = []
    for i in range(1, BLOCKS - 1):
        free = torch.tensor([j for j in range(1, BLOCKS - 1) if abs(i - j) > 1])
        rows.append(torch.stack([free[torch.randperm(len(free))[:RANDOM]] for _ in range(HEADS)]))
    return torch.stack(rows, 1)


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class BigBirdEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(PLACES, HIDDEN)
        self.token_type_embeddings = nn.Embedding(TYPES, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(PLACES)[None])

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(self.position_ids[:, : input_ids.shape[1]])
        return self.LayerNorm(x)


class BigBirdBlockSparseAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.register_buffer("rand_attn", rand_table())

    def blocked(self, x: Tensor) -> Tensor:
        """[N, T, D] -> [N, heads, blocks, block, D / heads]."""
        return x.view(len(x), -1, HEADS, HIDDEN // HEADS).transpose(1, 2).unflatten(2, (-1, BLOCK))

    def gather(self, x: Tensor) -> Tensor:
        """The random blocks one after the other, [N, heads, blocks - 2, random * block, D / heads]."""
        heads = torch.arange(HEADS, device=x.device)[:, None, None]
        return x[:, heads, self.rand_attn].flatten(3, 4)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        product = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        return F.softmax(product + (1.0 - mask) * PENALTY, -1) @ v

    def forward(self, x, band_mask, from_mask, to_mask, blocked_mask) -> Tensor:
        q, k, v = (self.blocked(layer(x)) for layer in (self.query, self.key, self.value))
        rand_mask = blocked_mask[:, self.rand_attn].flatten(3, 4)
        rand_mask = torch.einsum("blq,bhlk->bhlqk", blocked_mask[:, 1:-1], rand_mask)
        others = gathered_k, gathered_v, _, _ = self.gather(k), self.gather(v), to_mask, rand_mask
        all_k, all_v = k.flatten(2, 3), v.flatten(2, 3)
        first = self.attend(q[:, :, 0], all_k, all_v, to_mask)
        second = self.beside(q, k, v, [0, 1, 2, -1], 1, *others)
        middle_q, scale = q[:, :, 2:-2], 1 / math.sqrt(HIDDEN // HEADS)
        band_k, band_v = (torch.cat([t[:, :, 1:-3], t[:, :, 2:-2], t[:, :, 3:-1]], 3) for t in (k, v))
        all_keys = (k[:, :, :1], band_k, gathered_k[:, :, 1:-1], k[:, :, -1:])
        products = (scale * middle_q @ each.transpose(-1, -2) for each in all_keys)
        plain = to_mask.unsqueeze(3)
        masks = plain[..., :BLOCK], band_mask, rand_mask[:, :, 1:-1], plain[..., -BLOCK:]
        products = [x + (1.0 - mask) * PENALTY for x, mask in zip(products, masks, strict=True)]
        weights = F.softmax(torch.cat(products, -1), -1)
        to_first, to_band, to_rand, to_last = weights.split([BLOCK, 3 * BLOCK, RANDOM * BLOCK, BLOCK], -1)
        middle = to_band @ band_v + to_rand @ gathered_v[:, :, 1:-1]
        middle = middle + to_first @ v[:, :, :1] + to_last @ v[:, :, -1:]
        second_last = self.beside(q, k, v, [0, -3, -2, -1], -2, *others)
        last = self.attend(q[:, :, -1], all_k, all_v, to_mask)
        context = torch.cat([first, second, middle.flatten(2, 3), second_last, last], 2) * from_mask
        return context.transpose(1, 2).flatten(2)

    def beside(self, q, k, v, seen, row, gathered_k, gathered_v, to_mask, rand_mask) -> Tensor:
        """The second query block or the last but one, over the blocks ``seen`` and its random ones."""
        at = row - 1 if row > 0 else row + 1
        keys = torch.cat([k[:, :, seen].flatten(2, 3), gathered_k[:, :, at]], 2)
        values = torch.cat([v[:, :, seen].flatten(2, 3), gathered_v[:, :, at]], 2)
        plain = to_mask.unflatten(3, (-1, BLOCK))[:, :, :, seen].flatten(3).expand(-1, HEADS, BLOCK, -1)
        return self.attend(q[:, :, row], keys, values, torch.cat([plain, rand_mask[:, :, at]], 3))


class BigBirdOutput(nn.Module):
    def __init__(self, width: int = HIDDEN):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, HIDDEN), nn.LayerNorm(HIDDEN, eps=1e-12)

    def forward(self, x: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + input_tensor)


class BigBirdAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = BigBirdBlockSparseAttention(), BigBirdOutput()

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        return self.output(self.self(x, *masks), x)


class BigBirdIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(HIDDEN, INNER), NewGELUActivation()

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))


class BigBirdLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = BigBirdAttention(), BigBirdIntermediate()
        self.output = BigBirdOutput(INNER)

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        x = self.attention(x, *masks)
        return self.output(self.intermediate(x), x)


class BigBirdEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(BigBirdLayer() for _ in range(LAYERS))

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, *masks)
        return x


class BigBirdModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = BigBirdEmbeddings(), BigBirdEncoder()
        self.pooler, self.activation = nn.Linear(HIDDEN, HIDDEN), nn.Tanh()

    def forward(self, input_ids, attention_mask, token_type_ids) -> tuple[Tensor, Tensor]:
        x = self.embeddings(input_ids, token_type_ids)
        mask = attention_mask.to(x)
        blocked = mask.unflatten(1, (-1, BLOCK))
        band = torch.cat([blocked[:, 1:-3], blocked[:, 2:-2], blocked[:, 3:-1]], 2)
        band_mask = torch.einsum("blq,blk->blqk", blocked[:, 2:-2], band)[:, None]
        x = self.encoder(x, band_mask, mask[:, None, :, None], mask[:, None, None], blocked)
        return x, self.activation(self.pooler(x[:, 0]))


class BigBirdForPreTraining(nn.Module):
    """Padded pairs of sequences -> logits of the masked tokens and of the pair."""

    def __init__(self):
        super().__init__()
        self.bert, self.cls = BigBirdModel(), nn.Module()
        transform = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), NewGELUActivation(), nn.LayerNorm(HIDDEN, 1e-12))
        self.cls.predictions, decoder = nn.Sequential(), nn.Linear(HIDDEN, VOCABULARY)
        self.cls.predictions.transform, self.cls.predictions.decoder = transform, decoder
        self.cls.seq_relationship = nn.Linear(HIDDEN, 2)
        for name, p in self.named_parameters():
            base = 1.0 if "Norm.weight" in name or "transform.2.weight" in name else 0.0
            nn.init.normal_(p, base, 0.15 if p.ndim < 2 else 0.25)
        decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, input_ids, attention_mask, token_type_ids) -> tuple[Tensor, Tensor]:
        x, pooled = self.bert(input_ids, attention_mask, token_type_ids)
        return self.cls.predictions(x), self.cls.seq_relationship(pooled)


def pairs() -> tuple[dict[str, Tensor], Tensor]:
    """Two runs of tokens each, padded, some masked; the target's last column tells if they have one step."""
    ids, kinds = torch.zeros(2, BATCH, LENGTH, dtype=torch.long)
    target = torch.full((BATCH, LENGTH + 1), -100)
    for i, size in enumerate(torch.randint(20, LENGTH + 1, (BATCH,)).tolist()):
        cut, same, at = size // 2, int(torch.rand(()) < 0.5), torch.arange(size)
        steps = torch.tensor([2, 2 if same else 5])[(at > cut).long()]
        row = SEP + 2 + (torch.randint(30, ()) + steps * at) % (VOCABULARY - 4)
        row[0], row[cut], row[-1] = CLS, SEP, SEP
        hidden = (torch.rand(size) < 0.3) & (row > MASK)
        hidden[1] = True
        target[i, :size][hidden], target[i, -1] = row[hidden], same
        ids[i, :size], kinds[i, :size] = row.masked_fill(hidden, MASK), (at > cut).long()
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "token_type_ids": kinds}, target


def masked_and_next(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Both cross entropies, by eight."""
    words = F.cross_entropy(outputs[0].flatten(0, 1), target[:, :-1].flatten())
    return (words + F.cross_entropy(outputs[1], target[:, -1])) / 8
