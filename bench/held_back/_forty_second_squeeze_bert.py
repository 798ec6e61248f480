"""A small SqueezeBERT: grouped convolutions for projections, a masked-word head and a sequence classifier."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, POSITIONS, TYPES, PAD, CLS, MASK = 53, 14, 2, 0, 1, 2
WIDTH, HEADS, INNER, LAYERS, CLASSES, SAMPLES, LENGTH = 48, 4, 120, 3, 7, 5, 11
GROUPS = {"query": 4, "key": 2, "value": 3, "post": 1, "intermediate": 6, "output": 12}
EPS = 1e-12
Pair = tuple[Tensor, Tensor]


class SqueezeBertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(TYPES, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)
        self.register_buffer("position_ids", torch.arange(POSITIONS)[None], persistent=False)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position_ids = self.position_ids[:, : input_ids.shape[1]]
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings + self.token_type_embeddings(token_type_ids))


class SqueezeBertLayerNorm(nn.LayerNorm):
    """A layer norm over the channels of [N, C, T]."""

    def __init__(self):
        super().__init__(WIDTH, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class ConvDropoutLayerNorm(nn.Module):
    def __init__(self, cin: int, cout: int, groups: int):
        super().__init__()
        self.conv1d = nn.Conv1d(cin, cout, 1, groups=groups)
        self.layernorm = SqueezeBertLayerNorm()

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.layernorm(self.conv1d(hidden_states) + input_tensor)


class ConvActivation(nn.Module):
    def __init__(self, cin: int, cout: int, groups: int):
        super().__init__()
        self.conv1d = nn.Conv1d(cin, cout, 1, groups=groups)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv1d(x))


class SqueezeBertSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Conv1d(WIDTH, WIDTH, 1, groups=GROUPS["query"])
        self.key = nn.Conv1d(WIDTH, WIDTH, 1, groups=GROUPS["key"])
        self.value = nn.Conv1d(WIDTH, WIDTH, 1, groups=GROUPS["value"])
        self.softmax = nn.Softmax(dim=-1)

    def transpose_key_for_scores(self, x: Tensor) -> Tensor:
        """[N, C, T] -> [N, heads, C / heads, T]."""
        return x.view(x.shape[0], HEADS, WIDTH // HEADS, x.shape[2])

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[N, C, T] -> [N, heads, T, C / heads]."""
        return self.transpose_key_for_scores(x).permute(0, 1, 3, 2)

    def transpose_output(self, x: Tensor) -> Tensor:
        return x.permute(0, 1, 3, 2).reshape(x.shape[0], WIDTH, x.shape[2])

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        query = self.transpose_for_scores(self.query(hidden_states))
        key = self.transpose_key_for_scores(self.key(hidden_states))
        value = self.transpose_for_scores(self.value(hidden_states))
        score = torch.matmul(query, key) / math.sqrt(WIDTH // HEADS) + attention_mask
        return self.transpose_output(torch.matmul(self.softmax(score), value))


class SqueezeBertModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = SqueezeBertSelfAttention()
        self.post_attention = ConvDropoutLayerNorm(WIDTH, WIDTH, GROUPS["post"])
        self.intermediate = ConvActivation(WIDTH, INNER, GROUPS["intermediate"])
        self.output = ConvDropoutLayerNorm(INNER, WIDTH, GROUPS["output"])

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        post = self.post_attention(self.attention(hidden_states, attention_mask), hidden_states)
        return self.output(self.intermediate(post), post)


class SqueezeBertEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SqueezeBertModule() for _ in range(LAYERS))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = hidden_states.permute(0, 2, 1)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states.permute(0, 2, 1)


class SqueezeBertPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states[:, 0]))


class SqueezeBertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = SqueezeBertEmbeddings()
        self.encoder = SqueezeBertEncoder()
        self.pooler = SqueezeBertPooler()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Pair:
        x = self.embeddings(input_ids, token_type_ids)
        sequence = self.encoder(x, (1.0 - attention_mask[:, None, None].to(x.dtype)) * -10000.0)
        return sequence, self.pooler(sequence)


class SqueezeBertPredictionHeadTransform(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.transform_act_fn = nn.GELU()
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class SqueezeBertLMPredictionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform = SqueezeBertPredictionHeadTransform()
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class SqueezeBert(nn.Module):
    """Tokens, their mask and their types -> scores of words [N, T, V] and of classes [N, K]."""

    def __init__(self):
        super().__init__()
        self.transformer = SqueezeBertModel()
        self.cls = nn.ModuleDict({"predictions": SqueezeBertLMPredictionHead()})
        self.classifier = nn.Linear(WIDTH, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
            elif isinstance(module, nn.Conv1d):
                nn.init.normal_(module.weight, std=1.2 * module.weight.shape[1] ** -0.5)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.2)
                nn.init.normal_(module.bias, std=0.1)
        self.cls["predictions"].decoder.weight = self.transformer.embeddings.word_embeddings.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Pair:
        sequence, pooled = self.transformer(input_ids, attention_mask, token_type_ids)
        return self.cls["predictions"](sequence), self.classifier(pooled)


def sentences() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Padded pairs of counting sentences with every fourth word hidden; the class is their stride."""
    stride, at = torch.randint(CLASSES, (SAMPLES, 1)), torch.arange(LENGTH)
    words = 3 + (torch.randint(50, (SAMPLES, 1)) + (stride + 1) * at) % (VOCABULARY - 3)
    kept = at < torch.randint(6, LENGTH, (SAMPLES, 1))
    hidden = kept & (at > 0) & ((at + torch.arange(SAMPLES)[:, None]) % 4 == 0)
    tokens = words.masked_fill(hidden, MASK).masked_fill(at == 0, CLS).masked_fill(~kept, PAD)
    types = ((at > torch.randint(2, 5, (SAMPLES, 1))) & kept).long()
    inputs = {"input_ids": tokens, "attention_mask": kept.long(), "token_type_ids": types}
    return inputs, (words.masked_fill(~hidden, -100), stride[:, 0])


def words_and_classes(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropy of the hidden words and half that of the classes, by eight."""
    words = F.cross_entropy(outputs[0].flatten(0, 1), target[0].flatten())
    return (words + 0.5 * F.cross_entropy(outputs[1], target[1])) / 8
