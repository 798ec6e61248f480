"""A small Nystromformer with its masked-language head: attention by landmarks and an iterated inverse."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, INNER, LAYERS, PLACES, TYPES = 37, 28, 4, 44, 3, 33, 2
LENGTH, LANDMARKS, KERNEL, PAD, MASK, FIRST, SENTENCES = 30, 5, 9, 1, 4, 5, 3


def linear(inputs: int, outputs: int, gain: float = 0.8) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs)), nn.init.normal_(layer.bias, std=0.2)
    return layer


def layer_norm() -> nn.LayerNorm:
    norm = nn.LayerNorm(HIDDEN, eps=1e-5)
    nn.init.normal_(norm.weight, 1.0, 0.2), nn.init.normal_(norm.bias, std=0.2)
    return norm


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class NystromformerEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(PLACES + 2, HIDDEN)
        self.token_type_embeddings = nn.Embedding(TYPES, HIDDEN)
        for table in (self.word_embeddings, self.position_embeddings, self.token_type_embeddings):
            nn.init.normal_(table.weight, std=0.5)
        self.LayerNorm = layer_norm()
        self.register_buffer("position_ids", torch.arange(PLACES).expand((1, -1)) + 2, persistent=False)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position_ids = self.position_ids[:, : input_ids.shape[1]]
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(embeddings + self.position_embeddings(position_ids))


class NystromformerSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, HIDDEN // HEADS
        self.num_landmarks, self.seq_len = LANDMARKS, LENGTH
        self.query, self.key = linear(HIDDEN, HIDDEN, 1.5), linear(HIDDEN, HIDDEN, 1.5)
        self.value = linear(HIDDEN, HIDDEN)
        size, edge = (KERNEL, 1), (KERNEL // 2, 0)
        self.conv = nn.Conv2d(HEADS, HEADS, size, padding=edge, bias=False, groups=HEADS)
        nn.init.normal_(self.conv.weight, std=0.3)

    def iterative_inv(self, mat: Tensor, n_iter: int = 6) -> Tensor:
        """The Moore-Penrose inverse, iterated from the exact coefficient of each head."""
        identity = torch.eye(mat.size(-1)).to(mat)
        key, value = mat, mat.transpose(-1, -2)
        value = 1 / torch.max(torch.sum(key, dim=-2), dim=-1).values[:, :, None, None] * value
        for _ in range(n_iter):
            key_value = torch.matmul(key, value)
            inner = 15 * identity - torch.matmul(key_value, 7 * identity - key_value)
            value = torch.matmul(0.25 * value, 13 * identity - torch.matmul(key_value, inner))
        return value

    def landmarks(self, layer: Tensor) -> Tensor:
        """Means of the segments of [N, heads, T, C]."""
        shape = -1, self.num_attention_heads, self.num_landmarks, self.seq_len // self.num_landmarks
        return layer.reshape(*shape, self.attention_head_size).mean(dim=-2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query_layer = self.query(hidden_states).view(shape).transpose(1, 2)
        key_layer = self.key(hidden_states).view(shape).transpose(1, 2)
        value_layer = self.value(hidden_states).view(shape).transpose(1, 2)
        query_layer = query_layer / math.sqrt(math.sqrt(self.attention_head_size))
        key_layer = key_layer / math.sqrt(math.sqrt(self.attention_head_size))
        q_landmarks, k_landmarks = self.landmarks(query_layer), self.landmarks(key_layer)
        kernel_1 = torch.softmax(torch.matmul(query_layer, k_landmarks.transpose(-1, -2)), dim=-1)
        kernel_2 = torch.softmax(torch.matmul(q_landmarks, k_landmarks.transpose(-1, -2)), dim=-1)
        attention_scores = torch.matmul(q_landmarks, key_layer.transpose(-1, -2)) + attention_mask
        kernel_3 = torch.softmax(attention_scores, dim=-1)
        attention_probs = torch.matmul(kernel_1, self.iterative_inv(kernel_2))
        context_layer = torch.matmul(attention_probs, torch.matmul(kernel_3, value_layer))
        context_layer = context_layer + self.conv(value_layer)
        return context_layer.permute(0, 2, 1, 3).flatten(2)


class NystromformerSelfOutput(nn.Module):
    """A product, then the norm of its sum with what it is added to; also at the end of a layer."""

    def __init__(self, inputs: int = HIDDEN):
        super().__init__()
        self.dense, self.LayerNorm = linear(inputs, HIDDEN), layer_norm()

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class NystromformerAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = NystromformerSelfAttention(), NystromformerSelfOutput()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class NystromformerIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = linear(HIDDEN, INNER), NewGELUActivation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class NystromformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = NystromformerAttention(), NystromformerIntermediate()
        self.output = NystromformerSelfOutput(INNER)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attention_output), attention_output)


class NystromformerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(NystromformerLayer() for _ in range(LAYERS))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, attention_mask)
        return hidden_states


class NystromformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = NystromformerEmbeddings(), NystromformerEncoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        embeddings = self.embeddings(input_ids, token_type_ids)
        extended = (1.0 - attention_mask[:, None, None, :].to(embeddings)) * torch.finfo(embeddings.dtype).min
        return self.encoder(embeddings, extended)


class NystromformerPredictionHeadTransform(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.transform_act_fn = linear(HIDDEN, HIDDEN), NewGELUActivation()
        self.LayerNorm = layer_norm()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class NystromformerLMPredictionHead(nn.Module):
    def __init__(self, words: nn.Embedding):
        super().__init__()
        self.transform, self.decoder = NystromformerPredictionHeadTransform(), linear(HIDDEN, VOCABULARY)
        self.decoder.weight, self.bias = words.weight, self.decoder.bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class NystromformerForMaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.nystromformer = NystromformerModel()
        words = self.nystromformer.embeddings.word_embeddings
        self.cls = nn.ModuleDict({"predictions": NystromformerLMPredictionHead(words)})

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        hidden_states = self.nystromformer(input_ids, attention_mask, token_type_ids)
        return self.cls["predictions"](hidden_states)


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Pairs of sentences that count on by a step of their own; some words are masked, the end is padded."""
    at, last = torch.arange(LENGTH), torch.randint(19, LENGTH + 1, (SENTENCES, 1))
    start, step = torch.randint(32, (SENTENCES, 1)), torch.randint(1, 6, (SENTENCES, 1))
    words, real = FIRST + (start + step * at) % (VOCABULARY - FIRST), at < last
    hidden = real & ((torch.rand(SENTENCES, LENGTH) < 0.25) | (at == 7))
    ids = words.masked_fill(hidden, MASK).masked_fill(~real, PAD)
    types = (real & (at >= torch.randint(8, 18, (SENTENCES, 1)))).long()
    inputs = {"input_ids": ids, "attention_mask": real.long(), "token_type_ids": types}
    return inputs, words.masked_fill(~hidden, -100)


def masked_words(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) / 12
