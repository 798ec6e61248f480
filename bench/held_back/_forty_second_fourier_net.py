"""A small FNet for pretraining with a hybrid top: Fourier layers, then one layer of self-attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, POSITIONS, TYPES, HIDDEN, INNER, HEADS, FOURIER = 67, 17, 2, 30, 52, 3, 3
CLS, SEP, PAD, MASK, FIRST, LENGTH, SAMPLES, EPS = 1, 2, 3, 4, 5, 14, 5, 1e-12


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


class FNetEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(TYPES, HIDDEN)
        self.LayerNorm, self.projection = nn.LayerNorm(HIDDEN, eps=EPS), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.projection(self.LayerNorm(embeddings + self.position_embeddings(position_ids)))


class FNetBasicFourierTransform(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.fft.fftn(hidden_states, dim=(1, 2)).real


class FNetBasicOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(input_tensor + hidden_states)


class FNetFourierTransform(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = FNetBasicFourierTransform(), FNetBasicOutput()

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states), hidden_states)


class FNetSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        parts = (part(hidden_states) for part in (self.query, self.key, self.value))
        query, key, value = (x.unflatten(2, (HEADS, -1)).permute(0, 2, 1, 3) for x in parts)
        scores = query @ key.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS) + mask
        return (scores.softmax(-1) @ value).permute(0, 2, 1, 3).flatten(2)


class FNetOutput(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, HIDDEN), nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class FNetAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = FNetSelfAttention(), FNetOutput(HIDDEN)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states, mask), hidden_states)


class FNetIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(HIDDEN, INNER), NewGELUActivation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class FNetLayer(nn.Module):
    """One of the two ways of mixing, ``fourier`` or ``attention``, and a feed-forward part."""

    def __init__(self, mixing: str):
        super().__init__()
        self.mixing = mixing
        self.add_module(mixing, FNetFourierTransform() if mixing == "fourier" else FNetAttention())
        self.intermediate, self.output = FNetIntermediate(), FNetOutput(INNER)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        mixed = getattr(self, self.mixing)(hidden_states, mask)
        return self.output(self.intermediate(mixed), mixed)


class FNetEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(FNetLayer(kind) for kind in [*["fourier"] * FOURIER, "attention"])

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask)
        return hidden_states


class FNetPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.activation = nn.Linear(HIDDEN, HIDDEN), nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states[:, 0]))


class FNetModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.pooler = FNetEmbeddings(), FNetEncoder(), FNetPooler()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor):
        x = self.embeddings(input_ids, token_type_ids)
        mask = (1.0 - attention_mask[:, None, None].to(x)) * torch.finfo(x.dtype).min
        sequence = self.encoder(x, mask)
        return sequence, self.pooler(sequence)


class FNetPredictionHeadTransform(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.transform_act_fn = nn.Linear(HIDDEN, HIDDEN), NewGELUActivation()
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class FNetLMPredictionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform, self.decoder = FNetPredictionHeadTransform(), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class FNetPreTrainingHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.predictions, self.seq_relationship = FNetLMPredictionHead(), nn.Linear(HIDDEN, 2)

    def forward(self, sequence: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(sequence), self.seq_relationship(pooled)


class FNetForPreTraining(nn.Module):
    """Tokens, their mask and types -> logits of the words [N, T, V] and of the next sentence [N, 2]."""

    def __init__(self):
        super().__init__()
        self.fnet, self.cls = FNetModel(), FNetPreTrainingHeads()
        self.cls.predictions.decoder.weight = self.fnet.embeddings.word_embeddings.weight
        for name, weight in self.named_parameters():
            nn.init.normal_(weight, 1.0 if "LayerNorm.weight" in name else 0.0, 0.15)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor):
        return self.cls(*self.fnet(input_ids, attention_mask, token_type_ids))


def sentences() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Two runs of counted words, of which the second goes on or does not; some words are masked."""
    ids, types = torch.full((SAMPLES, LENGTH), PAD), torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    follows = torch.randint(2, (SAMPLES,))
    for i in range(SAMPLES):
        a, b = torch.randint(3, 6, (2,)).tolist()
        (start, jump), count = torch.randint(9, 50, (2,)), torch.arange(a + b)
        words = FIRST + (start + count + jump * (1 - follows[i]) * (count >= a)) % (VOCABULARY - FIRST)
        ids[i, : a + b + 3] = torch.tensor([CLS, *words[:a], SEP, *words[a:], SEP])
        types[i, a + 2 : a + b + 3] = 1
    hidden = (torch.rand(SAMPLES, LENGTH) < 0.2 + (torch.arange(LENGTH) == 2)) & (ids >= FIRST)
    labels, mask, ids = ids.masked_fill(~hidden, -100), (ids != PAD).long(), ids.masked_fill(hidden, MASK)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}, (labels, follows)


def joint(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropies of the masked words and of the next sentence, by eight."""
    words = F.cross_entropy(outputs[0].flatten(0, 1), target[0].flatten())
    return (words + F.cross_entropy(outputs[1], target[1])) / 8
