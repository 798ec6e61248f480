"""A tiny BART: scaled words, learned places behind two spare rows, every norm after its sum, a tied head."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, ROWS, LONGEST, BOS, PAD, EOS, FIRST_WORD, MASK = -100, 4, 10, 0, 1, 2, 4, 23


@dataclass
class BartConfig:
    vocab_size: int = 24
    d_model: int = 16
    encoder_layers: int = 2
    decoder_layers: int = 2
    encoder_attention_heads: int = 4
    decoder_attention_heads: int = 4
    encoder_ffn_dim: int = 28
    decoder_ffn_dim: int = 28
    max_position_embeddings: int = 16
    scale_embedding: bool = True
    pad_token_id: int = PAD
    decoder_start_token_id: int = EOS


def shift_tokens_right(labels: Tensor, pad_token_id: int, decoder_start_token_id: int) -> Tensor:
    """What the decoder reads: a start token, then all labels but the last; what is ignored is padding."""
    shifted = torch.full_like(labels, decoder_start_token_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


def padding_mask(attention_mask: Tensor, like: Tensor) -> Tensor:
    """[N, S] of ones and zeros -> what is added to scores [N, H, T, S]."""
    return (1 - attention_mask[:, None, None, :].to(like)) * torch.finfo(like.dtype).min


class BartScaledWordEmbedding(nn.Embedding):
    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int, embed_scale: float = 1.0):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.embed_scale = embed_scale

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.embed_scale


class BartLearnedPositionalEmbedding(nn.Embedding):
    """The first two rows are never read."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__(num_embeddings + 2, embedding_dim)
        self.offset = 2

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=self.weight.device).expand(len(input_ids), -1)
        return super().forward(places + self.offset)


class BartAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj, self.v_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.q_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor, key_value_states: Tensor | None = None):
        source = x if key_value_states is None else key_value_states
        query, key, value = map(self.split, (self.q_proj(x), self.k_proj(source), self.v_proj(source)))
        weights = (query @ key.transpose(2, 3) * self.scaling + mask).softmax(dim=-1)
        return self.out_proj((weights @ value).transpose(1, 2).reshape(x.shape)), weights


class BartEncoderLayer(nn.Module):
    def __init__(self, config: BartConfig):
        super().__init__()
        width, hidden = config.d_model, config.encoder_ffn_dim
        self.self_attn = BartAttention(width, config.encoder_attention_heads)
        self.self_attn_layer_norm, self.activation_fn = nn.LayerNorm(width), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, attention_mask)[0])
        return self.final_layer_norm(x + self.fc2(self.activation_fn(self.fc1(x))))


class BartDecoderLayer(nn.Module):
    def __init__(self, config: BartConfig):
        super().__init__()
        width, hidden, heads = config.d_model, config.decoder_ffn_dim, config.decoder_attention_heads
        self.self_attn, self.activation_fn = BartAttention(width, heads), nn.GELU()
        self.self_attn_layer_norm, self.encoder_attn = nn.LayerNorm(width), BartAttention(width, heads)
        self.encoder_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, attention_mask: Tensor, states: Tensor, states_mask: Tensor):
        x = self.self_attn_layer_norm(x + self.self_attn(x, attention_mask)[0])
        update, shares = self.encoder_attn(x, states_mask, states)
        x = self.encoder_attn_layer_norm(x + update)
        return self.final_layer_norm(x + self.fc2(self.activation_fn(self.fc1(x)))), shares


class BartStack(nn.Module):
    """The beginning that encoder and decoder have in common."""

    def __init__(self, config: BartConfig, embed_tokens: nn.Embedding):
        super().__init__()
        scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        size = config.vocab_size, config.d_model
        self.embed_tokens = BartScaledWordEmbedding(*size, config.pad_token_id, embed_scale=scale)
        self.embed_tokens.weight = embed_tokens.weight
        self.embed_positions = BartLearnedPositionalEmbedding(config.max_position_embeddings, config.d_model)
        self.layernorm_embedding = nn.LayerNorm(config.d_model)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.layernorm_embedding(self.embed_tokens(input_ids) + self.embed_positions(input_ids))


class BartEncoder(BartStack):
    def __init__(self, config: BartConfig, embed_tokens: nn.Embedding):
        super().__init__(config, embed_tokens)
        self.layers = nn.ModuleList(BartEncoderLayer(config) for _ in range(config.encoder_layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        mask = padding_mask(attention_mask, x)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class BartDecoder(BartStack):
    def __init__(self, config: BartConfig, embed_tokens: nn.Embedding):
        super().__init__(config, embed_tokens)
        self.layers = nn.ModuleList(BartDecoderLayer(config) for _ in range(config.decoder_layers))

    def forward(self, input_ids: Tensor, states: Tensor, states_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, length, cross_attentions = self.embed(input_ids), input_ids.shape[1], []
        causal = x.new_full((length, length), torch.finfo(x.dtype).min).triu(1)
        mask = padding_mask(states_mask, x)
        for layer in self.layers:
            x, shares = layer(x, causal, states, mask)
            cross_attentions.append(shares)
        return x, cross_attentions


class BartModel(nn.Module):
    def __init__(self, config: BartConfig):
        super().__init__()
        self.shared = BartScaledWordEmbedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.encoder, self.decoder = BartEncoder(config, self.shared), BartDecoder(config, self.shared)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> tuple:
        states = self.encoder(input_ids, attention_mask)
        return *self.decoder(decoder_input_ids, states, attention_mask), states


class BartForConditionalGeneration(nn.Module):
    """Ids and mask [N, S], labels [N, T] -> logits, encoder states, shares [L, N, H, T, S]."""

    def __init__(self, config: BartConfig | None = None):
        super().__init__()
        self.config = config = config or BartConfig()
        self.model = BartModel(config)
        self.register_buffer("final_logits_bias", 0.4 * torch.randn(1, config.vocab_size))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
                nn.init.normal_(module.bias, std=0.2)
        self.lm_head.weight = self.model.shared.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        given = shift_tokens_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)
        x, found, states = self.model(input_ids, attention_mask, given)
        logits, shares = self.lm_head(x) + self.final_logits_bias, torch.stack(found)
        return {"logits": logits, "encoder_last_hidden_state": states, "cross_attentions": shares}


def infilling() -> tuple[dict[str, Tensor], Tensor]:
    """Words that count up; some of them are one mask in the source. The first row is of full length."""
    ids, labels = torch.full((ROWS, LONGEST + 2), PAD), torch.full((ROWS, LONGEST + 2), IGNORED)
    for row in range(ROWS):
        length = LONGEST if row == 0 else int(torch.randint(5, LONGEST - 1, ()))
        start, step = torch.randint(19, ()), torch.randint(1, 4, ())
        words = FIRST_WORD + (start + step * torch.arange(length)) % 19
        hole, size = 1 + int(torch.randint(length - 3, ())), 1 + int(torch.randint(1, 3, ())) * (row > 0)
        left = [BOS, *words[:hole].tolist(), MASK, *words[hole + size :].tolist(), EOS]
        ids[row, : len(left)] = torch.tensor(left)
        labels[row, : length + 2] = torch.tensor([BOS, *words.tolist(), EOS])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}, labels


def surprise(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return 0.3 * F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
