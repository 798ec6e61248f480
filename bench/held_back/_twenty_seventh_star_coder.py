"""A small GPT-BigCode (StarCoder): multi-query attention over left-padded lines of code."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, PLACES, WIDTH, HEADS, INNER, LAYERS = 61, 18, 40, 5, 104, 3
ROWS, LENGTH, NEWLINE, IGNORED = 6, 13, 1, -100


def upcast_masked_softmax(x: Tensor, mask: Tensor, mask_value: Tensor, scale: float) -> Tensor:
    """The softmax of scores that are multiplied first; a row without any key attends to all alike."""
    return torch.where(mask, x * scale, mask_value).softmax(-1)


class GPTBigCodeAttention(nn.Module):
    """All heads ask for themselves, and share one key and one value."""

    def __init__(self, layer_idx: int):
        super().__init__()
        self.layer_idx, self.num_heads, self.head_dim = layer_idx, HEADS, WIDTH // HEADS
        self.embed_dim, self.kv_dim = WIDTH, WIDTH // HEADS
        self.c_attn = nn.Linear(self.embed_dim, self.embed_dim + 2 * self.kv_dim)
        self.c_proj = nn.Linear(self.embed_dim, self.embed_dim)
        self.attn_dropout = nn.Dropout(0.0)
        self.resid_dropout = nn.Dropout(0.0)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        unscale = self.layer_idx + 1
        scale_factor = unscale**-1 / self.head_dim**0.5
        batch, length = query.shape[:2]
        rows = query.reshape(batch, length * self.num_heads, self.head_dim)
        scores = scale_factor * torch.bmm(rows, key.transpose(1, 2))
        scores = scores.view(batch, length, self.num_heads, -1)
        mask_value = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        weights = self.attn_dropout(upcast_masked_softmax(scores, attention_mask, mask_value, unscale))
        return torch.bmm(weights.view(batch, length * self.num_heads, -1), value).view(query.shape)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        sizes = (self.embed_dim, 2 * self.kv_dim)
        query, key_value = self.c_attn(hidden_states).split(sizes, dim=2)
        key, value = key_value.split((self.head_dim, self.head_dim), dim=-1)
        return self.resid_dropout(self.c_proj(self._attn(query, key, value, attention_mask)))


class GPTBigCodeMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, INNER)
        self.c_proj = nn.Linear(INNER, WIDTH)
        self.act = nn.GELU("tanh")
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))


class GPTBigCodeBlock(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, eps=1e-5)
        self.attn = GPTBigCodeAttention(layer_idx)
        self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-5)
        self.mlp = GPTBigCodeMLP()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.attn(self.ln_1(hidden_states), attention_mask) + residual
        residual = hidden_states
        return residual + self.mlp(self.ln_2(hidden_states))


class GPTBigCodeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(PLACES, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList(GPTBigCodeBlock(i) for i in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, eps=1e-5)
        self.register_buffer("bias", torch.ones(PLACES, PLACES, dtype=torch.bool).tril(), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_ids.shape[1]
        position_ids = attention_mask.long().cumsum(-1) - 1
        position_ids = position_ids.masked_fill(attention_mask == 0, 1)
        mask = self.bias[None, :length, :length] & attention_mask.bool()[:, None]
        hidden_states = self.drop(self.wte(input_ids) + self.wpe(position_ids))
        for block in self.h:
            hidden_states = block(hidden_states, mask[:, :, None])
        return self.ln_f(hidden_states)


class GPTBigCodeForCausalLM(nn.Module):
    """Tokens and their mask, [N, T] each -> logits [N, T, V]; the head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.transformer = GPTBigCodeModel()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.25)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.2)
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.normal_(module.bias, std=0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.transformer(input_ids, attention_mask))


def lines() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of lines that are alike but for a name, padded on the left; the target is the next token."""
    spot = torch.arange(LENGTH + 1)
    period = torch.randint(3, 6, (ROWS, 1))
    words = torch.randint(2, 30, (ROWS, 6)).gather(1, spot % period)
    fresh = torch.randint(30, VOCABULARY, (ROWS, LENGTH + 1))
    tokens = torch.where(spot % period == 1, fresh, words)
    tokens = tokens.masked_fill(spot % period == 0, NEWLINE)
    start = torch.cat([torch.zeros(1).long(), torch.randint(1, LENGTH - 5, (ROWS - 1,))])[:, None]
    real = spot >= start
    tokens = tokens.masked_fill(~real, 0)
    target = tokens[:, 1:].masked_fill(~real[:, :-1], IGNORED)
    return {"input_ids": tokens[:, :-1], "attention_mask": real[:, :-1].long()}, target


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """A quarter of the cross entropy of the tokens whose left neighbour is real."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED) / 4
