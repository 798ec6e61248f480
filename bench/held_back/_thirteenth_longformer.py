"""A small Longformer for masked words: windows in overlapping chunks, marked tokens that see all."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, MASK, WORDS, UNSCORED = 1, 3, 40, -100
WIDTH, HEADS, INNER, WINDOWS, PLACES, KINDS = 24, 4, 40, (4, 8, 4), 32, 2


def varied(module: nn.Module) -> None:
    """Start with weights that let every table, projection, gain and shift count."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=1.2 / math.sqrt(module.in_features))
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.4)
    elif isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)


def sliding_chunks_query_key(query: Tensor, key: Tensor, w: int) -> Tensor:
    """[N, L, H, D] twice -> [N, L, H, 2w + 1]: each query by the keys from w before it to w after it."""
    n, length, heads, _ = query.shape
    query, key = (x.transpose(1, 2).flatten(0, 1).unfold(1, 2 * w, w) for x in (query, key))
    products = torch.einsum("bcdx,bcdy->bcxy", query, key)
    skewed = F.pad(products, (0, 0, 0, 1)).flatten(2).unflatten(2, (2 * w, 2 * w + 1))
    upper = torch.cat([skewed[:, :, :w, : w + 1], skewed[:, -1:, w:, : w + 1]], 1)
    start = F.pad(skewed[:, :1, : w - 1, 1 - w :], (1, 0, 1, 0))
    lower = torch.cat([start, skewed[:, :, w - 1 : -1, w + 1 :]], 1)
    scores = torch.cat([lower, upper], -1).reshape(n, heads, length, 2 * w + 1).transpose(1, 2)
    place = torch.arange(length, device=query.device)[:, None] + torch.arange(-w, w + 1, device=query.device)
    return scores.masked_fill(((place < 0) | (place >= length))[:, None], -torch.inf)


def sliding_chunks_probs_value(probs: Tensor, value: Tensor, w: int) -> Tensor:
    """[N, L, H, 2w + 1] and [N, L, H, D] -> [N, L, H, D]."""
    n, length, heads, dim = value.shape
    rows = probs.transpose(1, 2).reshape(n * heads, length // w, w, 2 * w + 1)
    rows = F.pad(rows, (0, w)).flatten(2)[..., :-w].unflatten(2, (w, 3 * w))
    value = F.pad(value.transpose(1, 2).flatten(0, 1), (0, 0, w, w)).unfold(1, 3 * w, w)
    return torch.einsum("bcwy,bcdy->bcwd", rows, value).reshape(n, heads, length, dim).transpose(1, 2)


class LongformerEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(PLACES, WIDTH, padding_idx=PAD)
        self.token_type_embeddings = nn.Embedding(KINDS, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-5)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position_ids = input_ids.ne(PAD).cumsum(1) * input_ids.ne(PAD) + PAD
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings + self.token_type_embeddings(token_type_ids))


class LongformerSelfAttention(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.num_heads, self.one_sided_attn_window_size = HEADS, WINDOWS[layer_id] // 2
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.query_global, self.key_global, self.value_global = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, -1))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """``attention_mask`` [N, L] is 0 at padding, 1 at a local token and 2 at a global one."""
        w, is_masked, is_global = self.one_sided_attn_window_size, attention_mask == 0, attention_mask == 2
        lowest = torch.finfo(hidden_states.dtype).min
        query = self.split(self.query(hidden_states)) / math.sqrt(WIDTH // HEADS)
        key, value = self.split(self.key(hidden_states)), self.split(self.value(hidden_states))
        scores = sliding_chunks_query_key(query, key, w)
        removed = (attention_mask != 1)[:, :, None, None]
        float_mask = removed.to(query.dtype).masked_fill(removed, lowest)
        scores = scores + sliding_chunks_query_key(torch.ones_like(float_mask), float_mask, w)
        counts = is_global.sum(1)
        is_slot = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]
        global_scores = torch.einsum("nlhd,nshd->nlhs", query, self.gather(key, is_global, is_slot))
        global_scores = global_scores.masked_fill(~is_slot[:, None, None], lowest)
        probs = torch.cat([global_scores, scores], -1).softmax(-1)
        probs = probs.masked_fill(is_masked[:, :, None, None], 0.0)
        global_probs, local_probs = probs.split([is_slot.shape[1], 2 * w + 1], -1)
        output = torch.einsum("nlhs,nshd->nlhd", global_probs, self.gather(value, is_global, is_slot))
        output = output + sliding_chunks_probs_value(local_probs, value, w)
        from_global = self.global_output(hidden_states, is_masked, is_global, is_slot)
        return output.flatten(2).index_put((is_global,), from_global[is_slot])

    @staticmethod
    def gather(x: Tensor, is_global: Tensor, is_slot: Tensor) -> Tensor:
        """The global tokens of each sequence first to last, zeros where a sequence has fewer."""
        return x.new_zeros(*is_slot.shape, *x.shape[2:]).index_put((is_slot,), x[is_global])

    def global_output(self, hidden: Tensor, is_masked: Tensor, is_global: Tensor, is_slot: Tensor) -> Tensor:
        query = self.split(self.query_global(self.gather(hidden, is_global, is_slot)))
        key, value = self.split(self.key_global(hidden)), self.split(self.value_global(hidden))
        scores = torch.einsum("nshd,nlhd->nhsl", query / math.sqrt(WIDTH // HEADS), key)
        probs = scores.masked_fill(is_masked[:, None, None], torch.finfo(scores.dtype).min).softmax(-1)
        return torch.einsum("nhsl,nlhd->nshd", probs, value).flatten(2)


class LongformerOutput(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, WIDTH), nn.LayerNorm(WIDTH, eps=1e-5)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class LongformerAttention(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.self, self.output = LongformerSelfAttention(layer_id), LongformerOutput(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class LongformerLayer(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        inner = OrderedDict(dense=nn.Linear(WIDTH, INNER), intermediate_act_fn=nn.GELU())
        self.attention, self.intermediate = LongformerAttention(layer_id), nn.Sequential(inner)
        self.output = LongformerOutput(INNER)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attention_output), attention_output)


class LongformerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(LongformerLayer(i) for i in range(len(WINDOWS)))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


class LongformerModel(nn.Module):
    """Tokens [N, L] -> [N, L, C]; inside, L is padded to a multiple of the largest window."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = LongformerEmbeddings(), LongformerEncoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, types: Tensor) -> Tensor:
        edge = (0, -input_ids.shape[1] % max(WINDOWS))
        embedded = self.embeddings(F.pad(input_ids, edge, value=PAD), F.pad(types, edge))
        return self.encoder(embedded, F.pad(attention_mask, edge))[:, : input_ids.shape[1]]


class LongformerLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.layer_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-5)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, features: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(F.gelu(self.dense(features))))


class LongformerForMaskedLM(nn.Module):
    """Tokens, the two masks and the kinds of tokens, all [N, L] -> scores of the words [N, L, WORDS]."""

    def __init__(self):
        super().__init__()
        self.longformer, self.lm_head = LongformerModel(), LongformerLMHead()
        self.apply(varied)
        self.lm_head.decoder.weight = self.longformer.embeddings.word_embeddings.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, global_attention_mask: Tensor, token_type_ids: Tensor
    ) -> Tensor:
        attention_mask = attention_mask * (global_attention_mask + 1)
        return self.lm_head(self.longformer(input_ids, attention_mask, token_type_ids))


def passages() -> tuple[dict[str, Tensor], Tensor]:
    """Three padded walks through the words, some words masked; the first token and up to two are global."""
    lengths = torch.tensor([21, 17, 13]) - torch.tensor([0, *torch.randint(3, (2,))])
    walk = torch.randint(36, (3, 1)) + torch.randint(1, 3, (3, 21)).cumsum(1)
    ids, real = walk % (WORDS - 4) + 4, torch.arange(21) < lengths[:, None]
    ids[:, 0], ids[torch.arange(3), lengths - 1] = 0, 2
    hidden = real & (ids > MASK) & (torch.rand(ids.shape) < 0.3)
    labels, ids = ids.masked_fill(~hidden, UNSCORED), ids.masked_fill(hidden, MASK).masked_fill(~real, PAD)
    marks = torch.zeros_like(ids)
    for row, count in enumerate((3, 1, 2)):
        marks[row, [0, *(torch.randperm(int(lengths[row]) - 1) + 1)[: count - 1]]] = 1
    kinds = (torch.arange(21) >= lengths[:, None] // 3) & real
    masks = {"attention_mask": real.long(), "global_attention_mask": marks}
    return {"input_ids": ids, **masks, "token_type_ids": kinds.long()}, labels


def masked_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=UNSCORED) / 4
