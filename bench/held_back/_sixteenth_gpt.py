"""A small GPT-2: attention cooled by the depth of its layer, texts padded on the left, read in two parts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, POSITIONS, WIDTH, HEADS, LAYERS = 29, 16, 24, 3, 3
LENGTH, PREFIX, IGNORED = 12, 5, -100

Past = tuple[Tensor, Tensor]


class Conv1D(nn.Module):
    """A linear layer whose weight has the inputs first."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and bias count."""
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, Conv1D):
        nn.init.normal_(module.weight, std=len(module.weight) ** -0.5)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.25)


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))
        return 0.5 * x * (1 + inner.tanh())


class GPT2Attention(nn.Module):
    """Heads over the keys of the past and its own; scores shrink with the number of the layer."""

    def __init__(self, layer_idx: int):
        super().__init__()
        seen = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
        self.register_buffer("bias", seen[None, None], persistent=False)
        self.layer_idx = layer_idx
        self.c_attn = Conv1D(3 * WIDTH, WIDTH)
        self.c_proj = Conv1D(WIDTH, WIDTH)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        weights = query @ key.transpose(-1, -2) / math.sqrt(value.shape[-1])
        weights = weights / (self.layer_idx + 1)
        asked, known = query.shape[-2], key.shape[-2]
        causal = self.bias[:, :, known - asked : known, :known]
        weights = weights.masked_fill(~causal, -torch.inf) + attention_mask
        return weights.softmax(-1) @ value

    def forward(self, x: Tensor, attention_mask: Tensor, layer_past: Past | None) -> tuple[Tensor, Past]:
        parts = self.c_attn(x).split(WIDTH, 2)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if layer_past is not None:
            key = torch.cat([layer_past[0], key], -2)
            value = torch.cat([layer_past[1], value], -2)
        context = self._attn(query, key, value, attention_mask)
        return self.c_proj(context.transpose(1, 2).flatten(2)), (key, value)


class GPT2MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = Conv1D(4 * WIDTH, WIDTH)
        self.c_proj = Conv1D(WIDTH, 4 * WIDTH)
        self.act = NewGELUActivation()

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, eps=1e-5)
        self.attn = GPT2Attention(layer_idx)
        self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-5)
        self.mlp = GPT2MLP()

    def forward(self, x: Tensor, attention_mask: Tensor, layer_past: Past | None) -> tuple[Tensor, Past]:
        y, present = self.attn(self.ln_1(x), attention_mask, layer_past)
        x = x + y
        return x + self.mlp(self.ln_2(x)), present


class GPT2Model(nn.Module):
    """States of the tokens, and the keys and values of each layer; the mask covers the past as well."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.h = nn.ModuleList(GPT2Block(i) for i in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, eps=1e-5)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: tuple[Past, ...] | None = None
    ) -> tuple[Tensor, tuple[Past, ...]]:
        position_ids = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        x = self.wte(input_ids) + self.wpe(position_ids[:, -input_ids.shape[1] :])
        absent = 1 - attention_mask[:, None, None, :].to(x.dtype)
        absent = absent * torch.finfo(x.dtype).min
        presents = []
        for block, past in zip(self.h, past_key_values or [None] * LAYERS, strict=True):
            x, present = block(x, absent, past)
            presents.append(present)
        return self.ln_f(x), tuple(presents)


class GPT2LMHeadModel(nn.Module):
    """Tokens [N, T] and their mask -> scores of the next tokens [N, T, V]; the prefix is read first."""

    def __init__(self):
        super().__init__()
        self.transformer = GPT2Model()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(varied)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        prefix, cache = self.transformer(input_ids[:, :PREFIX], attention_mask[:, :PREFIX])
        rest, _ = self.transformer(input_ids[:, PREFIX:], attention_mask, cache)
        return self.lm_head(torch.cat([prefix, rest], 1))


def texts() -> tuple[dict[str, Tensor], Tensor]:
    """Four texts that count in steps of their own with slips, of which three are padded on the left."""
    start, stride = torch.randint(VOCABULARY, (4, 1)), torch.randint(1, 5, (4, 1))
    tokens = start + stride * torch.arange(LENGTH) + (torch.rand(4, LENGTH) < 0.15)
    mask = (torch.arange(LENGTH) >= torch.randperm(4)[:, None]).long()
    tokens = (tokens % (VOCABULARY - 1) + 1) * mask
    labels = tokens.masked_fill(mask.cumsum(1) < 2, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask}, labels


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each label and the scores one place before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
