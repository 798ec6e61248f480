"""A small FT-Transformer: a token for each column of a table with gaps, and a CLS token at the end."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAIN, CATEGORIES, EDGES = 5, (3, 8, 4), (-1.5, -0.9, -0.6, 0.1, 0.3, 0.8, 1.0, 1.4)
WIDTH, HEADS, HIDDEN, KEPT, BLOCKS = 24, 3, 20, 6, 3
VALUES, CLASSES, ROWS = 2, 7, 13


class NumericalFeatureTokenizer(nn.Module):
    """[N, features] -> [N, features, WIDTH]: a weight and a bias for each feature."""

    def __init__(self, n_features: int, d_token: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_features, d_token))
        self.bias = nn.Parameter(torch.empty(n_features, d_token))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[None] * x[..., None] + self.bias[None]


class PiecewiseLinearEncoding(nn.Module):
    """How much of each bin a value fills; the outer bins go on beyond their outer edges."""

    def __init__(self, edges: tuple[float, ...]):
        super().__init__()
        self.register_buffer("edges", torch.tensor(edges))

    def forward(self, x: Tensor) -> Tensor:
        x = (x[..., None] - self.edges[:-1]) / self.edges.diff()
        parts = x[..., :1].clamp_max(1), x[..., 1:-1].clamp(0, 1), x[..., -1:].clamp_min(0)
        return torch.cat(parts, -1)


class PiecewiseLinearEmbedding(nn.Module):
    def __init__(self, edges: tuple[float, ...], d_token: int):
        super().__init__()
        self.encoding = PiecewiseLinearEncoding(edges)
        self.linear = nn.Linear(len(edges) - 1, d_token)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.encoding(x))


class CategoricalFeatureTokenizer(nn.Module):
    """One table for all features, each from its offset on, and a bias for each feature."""

    def __init__(self, cardinalities: tuple[int, ...], d_token: int):
        super().__init__()
        self.register_buffer("category_offsets", torch.tensor([0, *cardinalities[:-1]]).cumsum(0))
        self.embeddings = nn.Embedding(sum(cardinalities), d_token)
        self.bias = nn.Parameter(torch.empty(len(cardinalities), d_token))

    def forward(self, x: Tensor) -> Tensor:
        return self.embeddings(x + self.category_offsets[None]) + self.bias[None]


class MissingToken(nn.Module):
    """Puts a learned token of the feature where its value is missing."""

    def __init__(self, n_features: int, d_token: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_features, d_token))

    def forward(self, tokens: Tensor, missing: Tensor) -> Tensor:
        return torch.where(missing[..., None], self.weight, tokens)


class FeatureTokenizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_tokenizer = NumericalFeatureTokenizer(PLAIN, WIDTH)
        self.ple_tokenizer = PiecewiseLinearEmbedding(EDGES, WIDTH)
        self.cat_tokenizer = CategoricalFeatureTokenizer(CATEGORIES, WIDTH)
        self.missing_token = MissingToken(PLAIN + 1 + len(CATEGORIES), WIDTH)

    def forward(self, x_num: Tensor, x_cat: Tensor, missing: Tensor) -> Tensor:
        plain, binned = self.num_tokenizer(x_num[:, :-1]), self.ple_tokenizer(x_num[:, -1:])
        x = [plain, binned, self.cat_tokenizer(x_cat)]
        return self.missing_token(torch.cat(x, 1), missing)


class CLSToken(nn.Module):
    def __init__(self, d_token: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_token))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.weight.expand(len(x), 1, -1)], 1)


class MultiheadAttention(nn.Module):
    """Attention whose keys and values are compressed over the tokens, for all heads alike."""

    def __init__(self, d_token: int, n_heads: int):
        super().__init__()
        self.W_q = nn.Linear(d_token, d_token)
        self.W_k, self.W_v, self.W_out = (nn.Linear(d_token, d_token) for _ in range(3))
        self.n_heads = n_heads

    def _reshape(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, x_q: Tensor, x_kv: Tensor, key_compression, value_compression) -> Tensor:
        q, k, v = self.W_q(x_q), self.W_k(x_kv), self.W_v(x_kv)
        k = key_compression(k.transpose(1, 2)).transpose(1, 2)
        v = value_compression(v.transpose(1, 2)).transpose(1, 2)
        q, k, v = map(self._reshape, (q, k, v))
        attention = F.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1)
        return self.W_out((attention @ v).transpose(1, 2).flatten(2))


class ReGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return a * F.relu(b)


class FFN(nn.Module):
    def __init__(self, d_token: int, d_hidden: int):
        super().__init__()
        self.linear_first = nn.Linear(d_token, 2 * d_hidden)
        self.activation = ReGLU()
        self.linear_second = nn.Linear(d_hidden, d_token)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_second(self.activation(self.linear_first(x)))


class Head(nn.Module):
    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.normalization = nn.LayerNorm(d_in)
        self.activation = nn.ReLU()
        self.linear = nn.Linear(d_in, d_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.activation(self.normalization(x[:, -1])))


class Transformer(nn.Module):
    """Pre-norm blocks; the first has no attention norm, and the last asks for the CLS token only."""

    def __init__(self, n_tokens: int):
        super().__init__()
        self.blocks = nn.ModuleList()
        for i in range(BLOCKS):
            block = nn.ModuleDict({"attention": MultiheadAttention(WIDTH, HEADS), "ffn": FFN(WIDTH, HIDDEN)})
            if i:
                block["attention_normalization"] = nn.LayerNorm(WIDTH)
            block["ffn_normalization"] = nn.LayerNorm(WIDTH)
            block["key_compression"] = nn.Linear(n_tokens, KEPT, bias=False)
            block["value_compression"] = nn.Linear(n_tokens, KEPT, bias=False)
            self.blocks.append(block)
        self.head = Head(WIDTH, VALUES + CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            y = block["attention_normalization"](x) if "attention_normalization" in block else x
            asking = y
            if i + 1 == len(self.blocks):
                asking, x = y[:, -1:], x[:, -1:]
            x = x + block["attention"](asking, y, block["key_compression"], block["value_compression"])
            x = x + block["ffn"](block["ffn_normalization"](x))
        return self.head(x)


class FTTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_tokenizer = FeatureTokenizer()
        self.cls_token = CLSToken(WIDTH)
        self.transformer = Transformer(PLAIN + 1 + len(CATEGORIES) + 1)
        for name, weight in self.named_parameters():
            spread = weight.shape[1] ** -0.5 if weight.ndim == 2 and "token" not in name else 0.4
            nn.init.normal_(weight, 1.0 if "normalization.weight" in name else 0.0, spread)

    def forward(self, x_num: Tensor, x_cat: Tensor, missing: Tensor) -> Tensor:
        return self.transformer(self.cls_token(self.feature_tokenizer(x_num, x_cat, missing)))


def table() -> tuple[dict[str, Tensor], Tensor]:
    """Correlated columns with gaps, which hold zeros; two values and a class to be told from them."""
    x = torch.randn(ROWS, 2) @ torch.randn(2, PLAIN + 1) * 0.7 + 0.6 * torch.randn(ROWS, PLAIN + 1)
    cat = torch.stack([torch.randint(count, (ROWS,)) for count in CATEGORIES], 1)
    values = torch.stack([x[:, 0] - x[:, -1].abs(), x[:, 1].tanh() + 0.3 * cat[:, 0]], 1)
    label = (cat[:, 1] + (x[:, 2] > 0)) % CLASSES
    missing = torch.rand(ROWS, PLAIN + 1 + len(CATEGORIES)) < 0.2
    x, cat = x.masked_fill(missing[:, : PLAIN + 1], 0), cat.masked_fill(missing[:, PLAIN + 1 :], 0)
    return {"x_num": x, "x_cat": cat, "missing": missing}, torch.cat([values, label[:, None]], 1)


def values_and_class(outputs: Tensor, target: Tensor) -> Tensor:
    """The squared error of the values and the cross entropy of the class, by six."""
    error = F.mse_loss(outputs[:, :VALUES], target[:, :VALUES])
    return (error + F.cross_entropy(outputs[:, VALUES:], target[:, VALUES].long())) / 6
