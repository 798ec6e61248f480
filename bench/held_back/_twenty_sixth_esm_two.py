"""A small ESM-2: masked proteins through rotary pre-norm layers to a tied head, and contacts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LETTERS, WIDTH, INNER, LAYERS, HEADS = 33, 24, 52, 4, 3
CLS, PAD, EOS, MASK, FIRST, KINDS = 0, 1, 2, 32, 4, 20
PROTEINS, LONGEST, SIZE, UNKNOWN = 5, 15, 17, -100


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def average_product_correct(x: Tensor) -> Tensor:
    a1, a2, a12 = x.sum(-1, keepdim=True), x.sum(-2, keepdim=True), x.sum((-1, -2), keepdim=True)
    return x - a1 * a2 / a12


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.outer(torch.arange(q.shape[-2]).type_as(self.inv_freq), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos(), emb.sin()
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class EsmContactHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.regression, self.activation = nn.Linear(LAYERS * HEADS, 1), nn.Sigmoid()

    def forward(self, tokens: Tensor, attentions: Tensor) -> Tensor:
        eos_mask = tokens.ne(EOS).to(attentions)
        eos_mask = eos_mask.unsqueeze(1) * eos_mask.unsqueeze(2)
        attentions = (attentions * eos_mask[:, None, None])[..., :-1, :-1]
        attentions = attentions[..., 1:, 1:].flatten(1, 2)
        attentions = average_product_correct(attentions + attentions.mT).permute(0, 2, 3, 1)
        return self.activation(self.regression(attentions).squeeze(3))


class EsmEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(LETTERS, WIDTH, padding_idx=PAD)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        masked = input_ids == MASK
        embeddings = self.word_embeddings(input_ids).masked_fill(masked.unsqueeze(-1), 0.0)
        mask_ratio_observed = masked.sum(-1).to(embeddings) / attention_mask.sum(-1)
        embeddings = embeddings * (1 - 0.15 * 0.8) / (1 - mask_ratio_observed)[:, None, None]
        return embeddings * attention_mask.unsqueeze(-1).to(embeddings)


class EsmSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rotary_embeddings = RotaryEmbedding(WIDTH // HEADS)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        layers = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        query_layer, key_layer, value_layer = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in layers)
        query_layer = query_layer * (WIDTH // HEADS) ** -0.5
        query_layer, key_layer = self.rotary_embeddings(query_layer, key_layer)
        attention_probs = (query_layer @ key_layer.transpose(-1, -2) + attention_mask).softmax(-1)
        return (attention_probs @ value_layer).transpose(1, 2).flatten(2), attention_probs


class EsmOutput(nn.Module):
    def __init__(self, in_features: int):
        super().__init__()
        self.dense = nn.Linear(in_features, WIDTH)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.dense(hidden_states) + input_tensor


class EsmAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output, self.LayerNorm = EsmSelfAttention(), EsmOutput(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        mixed, attention_probs = self.self(self.LayerNorm(hidden_states), attention_mask)
        return self.output(mixed, hidden_states), attention_probs


class EsmIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return gelu(self.dense(hidden_states))


class EsmLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate, self.output = EsmAttention(), EsmIntermediate(), EsmOutput(INNER)
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        attention_output, attention_probs = self.attention(hidden_states, attention_mask)
        intermediate_output = self.intermediate(self.LayerNorm(attention_output))
        return self.output(intermediate_output, attention_output), attention_probs


class EsmEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(EsmLayer() for _ in range(LAYERS))
        self.emb_layer_norm_after = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        attentions = []
        for layer_module in self.layer:
            hidden_states, attention_probs = layer_module(hidden_states, attention_mask)
            attentions.append(attention_probs)
        return self.emb_layer_norm_after(hidden_states), torch.stack(attentions, dim=1)


class EsmModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.contact_head = EsmEmbeddings(), EsmEncoder(), EsmContactHead()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = self.embeddings(input_ids, attention_mask)
        seen = attention_mask.to(hidden_states)
        extended = (1.0 - seen[:, None, None, :]) * torch.finfo(seen.dtype).min
        sequence_output, attns = self.encoder(hidden_states, extended)
        attns = attns * seen[:, None, None, None, :] * seen[:, None, None, :, None]
        return sequence_output, self.contact_head(input_ids, attns)


class EsmLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.layer_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, LETTERS, bias=False)
        self.bias = nn.Parameter(torch.zeros(LETTERS))

    def forward(self, features: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(gelu(self.dense(features)))) + self.bias


class EsmForMaskedLM(nn.Module):
    """Tokens and which are no padding -> logits of the letters, and chances of contact of the residues."""

    def __init__(self):
        super().__init__()
        self.esm, self.lm_head = EsmModel(), EsmLMHead()
        self.lm_head.decoder.weight = self.esm.embeddings.word_embeddings.weight
        for name, p in self.named_parameters():
            nn.init.normal_(p, 1.0 if p.ndim == 1 and "weight" in name else 0.0, 0.25)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        sequence_output, contacts = self.esm(input_ids, attention_mask)
        return {"logits": self.lm_head(sequence_output), "contacts": contacts}


def hairpins() -> tuple[dict[str, Tensor], Tensor]:
    """Masked chains of complements, folded back; targets of a row of labels over the map of contacts."""
    input_ids, target = torch.full((PROTEINS, SIZE), PAD), torch.full((PROTEINS, SIZE + 1, SIZE), UNKNOWN)
    for ids, (labels, *touching) in zip(input_ids, target, strict=True):
        n = LONGEST if ids is input_ids[0] else int(torch.randint(8, LONGEST + 1, ()))
        place, fold = torch.arange(n), n - 1 + int(torch.randint(-2, 3, ()))
        chain, mate = torch.randint(FIRST, FIRST + KINDS, (n,)), fold - place
        paired = (mate >= 0) & (mate < place)
        chain[paired] = 2 * FIRST + KINDS - 1 - chain[mate[paired]]
        for i in range(n):
            touching[i + 1][1 : n + 1] = ((mate[i] == place) & ((place - i).abs() > 2)).long()
        chosen, dice = torch.rand(n) < 0.2, torch.rand(n)
        labels[1 : n + 1] = torch.where(chosen, chain, UNKNOWN)
        chain = torch.where(chosen & (dice < 0.1), torch.randint(FIRST, FIRST + KINDS, (n,)), chain)
        ids[0], ids[n + 1] = CLS, EOS
        ids[1 : n + 1] = torch.where(chosen & (dice > 0.2), MASK, chain)
    return {"input_ids": input_ids, "attention_mask": input_ids.ne(PAD).long()}, target


def letters_and_contacts(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The cross entropies of the chosen letters and of the contacts of residues, a quarter of their sum."""
    labels, touching = target[:, 0], target[:, 2:-1, 1:-1]
    known, chance = touching >= 0, outputs["contacts"]
    letters = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=UNKNOWN)
    return (letters + F.binary_cross_entropy(chance[known], touching[known].to(chance))) / 4
