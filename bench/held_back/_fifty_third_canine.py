"""A small CANINE that tags characters: hashes, deep layers over molecules, and characters again."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRIMES = (31, 43, 59, 61, 73, 97, 103, 113)
HIDDEN, HEADS, INTERMEDIATE, HASHES, BUCKETS, TYPES = 24, 3, 40, 4, 29, 2
RATE, KERNEL, STRIDE, DEEP, EPS = 4, 4, 7, 2, 1e-12
TEXTS, LENGTH, TAGS, KINDS = 5, 23, 4, 3


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(HIDDEN, eps=EPS)


class CanineEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(HASHES):
            setattr(self, f"HashBucketCodepointEmbedder_{i}", nn.Embedding(BUCKETS, HIDDEN // HASHES))
        self.char_position_embeddings = nn.Embedding(BUCKETS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(TYPES, HIDDEN)
        self.LayerNorm = norm()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        shards = []
        for i, prime in enumerate(PRIMES[:HASHES]):
            hashed = ((input_ids + 1) * prime) % BUCKETS
            shards.append(getattr(self, f"HashBucketCodepointEmbedder_{i}")(hashed))
        embeddings = torch.cat(shards, dim=-1) + self.token_type_embeddings(token_type_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.LayerNorm(embeddings + self.char_position_embeddings(position_ids))


class CharactersToMolecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, RATE, stride=RATE)
        self.activation = nn.GELU()
        self.LayerNorm = norm()

    def forward(self, char_encoding: Tensor) -> Tensor:
        downsampled = self.activation(self.conv(char_encoding.transpose(1, 2)).transpose(1, 2))
        return self.LayerNorm(torch.cat([char_encoding[:, 0:1], downsampled[:, 0:-1]], dim=1))


class ConvProjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2 * HIDDEN, HIDDEN, KERNEL)
        self.activation = nn.GELU()
        self.LayerNorm = norm()

    def forward(self, inputs: Tensor) -> Tensor:
        pad_beg = (KERNEL - 1) // 2
        padded = F.pad(inputs.transpose(1, 2), (pad_beg, KERNEL - 1 - pad_beg))
        return self.LayerNorm(self.activation(self.conv(padded).transpose(1, 2)))


class CanineSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, from_tensor: Tensor, to_tensor: Tensor, attention_mask: Tensor) -> Tensor:
        key, value = self.heads(self.key(to_tensor)), self.heads(self.value(to_tensor))
        query = self.heads(self.query(from_tensor))
        scores = query @ key.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5
        scores = scores + (1 - attention_mask[:, None].to(scores)) * torch.finfo(scores.dtype).min
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class CanineOutput(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, HIDDEN)
        self.LayerNorm = norm()

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class CanineAttention(nn.Module):
    """Attention, or local attention where the first position sees all and each block sees the first."""

    def __init__(self, local: bool):
        super().__init__()
        self.self, self.output, self.local = CanineSelfAttention(), CanineOutput(HIDDEN), local

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not self.local:
            return self.output(self.self(x, x, mask), x)
        length, outputs = x.shape[1], []
        from_chunks = [(0, 1)] + [(i, min(length, i + STRIDE)) for i in range(1, length, STRIDE)]
        to_chunks = [(0, length)] + [(i, min(length, i + STRIDE)) for i in range(0, length, STRIDE)]
        for (start, end), (first, last) in zip(from_chunks, to_chunks, strict=True):
            seen = torch.cat([mask[:, start:end, 0:1], mask[:, start:end, first:last]], dim=2)
            to_tensor = torch.cat([x[:, 0:1], x[:, first:last]], dim=1)
            outputs.append(self.self(x[:, start:end], to_tensor, seen))
        return self.output(torch.cat(outputs, dim=1), x)


class CanineIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, INTERMEDIATE)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class CanineLayer(nn.Module):
    def __init__(self, local: bool):
        super().__init__()
        self.attention, self.intermediate = CanineAttention(local), CanineIntermediate()
        self.output = CanineOutput(INTERMEDIATE)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, mask)
        return self.output(self.intermediate(attention_output), attention_output)


class CanineEncoder(nn.Module):
    def __init__(self, layers: int, local: bool = False):
        super().__init__()
        self.layer = nn.ModuleList(CanineLayer(local) for _ in range(layers))

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        mask = mask[:, None].expand(-1, hidden_states.shape[1], -1)
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, mask)
        return hidden_states


class CanineModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.char_embeddings, self.initial_char_encoder = CanineEmbeddings(), CanineEncoder(1, local=True)
        self.chars_to_molecules, self.encoder = CharactersToMolecules(), CanineEncoder(DEEP)
        self.projection, self.final_char_encoder = ConvProjection(), CanineEncoder(1)
        self.pooler = nn.Sequential(OrderedDict(dense=nn.Linear(HIDDEN, HIDDEN), activation=nn.Tanh()))

    def _repeat_molecules(self, molecules: Tensor, char_seq_length: int) -> Tensor:
        repeated = molecules[:, 1:].repeat_interleave(RATE, dim=1)
        rest = molecules[:, -1:].repeat_interleave(char_seq_length % RATE + RATE, dim=1)
        return torch.cat([repeated, rest], dim=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple:
        molecule_mask = F.max_pool1d(attention_mask[:, None].float(), RATE, RATE)[:, 0]
        embeddings = self.char_embeddings(input_ids, token_type_ids)
        chars = self.initial_char_encoder(embeddings, attention_mask)
        molecules = self.encoder(self.chars_to_molecules(chars), molecule_mask)
        repeated = self._repeat_molecules(molecules, input_ids.shape[1])
        sequence = self.projection(torch.cat([chars, repeated], dim=-1))
        return self.final_char_encoder(sequence, attention_mask), self.pooler(molecules[:, 0])


class CanineTagger(nn.Module):
    """Codepoints, their mask and types -> logits of a tag for each, and of a kind for each text."""

    def __init__(self):
        super().__init__()
        self.canine, self.classifier = CanineModel(), nn.Linear(HIDDEN, TAGS)
        self.text_classifier = nn.Linear(HIDDEN, KINDS)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.2)
                nn.init.normal_(module.bias, 0, 0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple:
        sequence, pooled = self.canine(input_ids, attention_mask, token_type_ids)
        return self.classifier(sequence), self.text_classifier(pooled)


def texts() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Two sentences of words in scripts, between marks; the tag is a letter's script, or that of a space."""
    place, end = torch.arange(LENGTH), torch.randint(9, LENGTH, (TEXTS, 1))
    kind = torch.randint(KINDS, (TEXTS,))
    script = (kind[:, None] + (place // 6 % 3 == 2)) % KINDS
    space = (place + torch.randint(4, (TEXTS, 1))) % 5 == 4
    ids = torch.tensor([97, 945, 1072])[script] + torch.randint(20, (TEXTS, LENGTH))
    ids = ids.masked_fill(space, 32).masked_fill(place == 0, 0xE000).masked_fill(place == end, 0xE001)
    tags = script.masked_fill(space, KINDS).masked_fill((place == 0) | (place >= end), -100)
    mask = (place <= end).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": (place > end // 2) * mask}
    return inputs, (tags, kind)


def tags_and_kinds(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    tags = F.cross_entropy(outputs[0].flatten(0, 1), target[0].flatten(), ignore_index=-100)
    return (tags + 0.5 * F.cross_entropy(outputs[1], target[1])) / 4
