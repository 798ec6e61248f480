"""A small Whisper: sounds through two convolutions and an encoder, words by a decoder that looks at them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FRAMES, STEPS, END, START, IGNORED = 24, 10, 27, 28, -100


@dataclass(frozen=True)
class WhisperConfig:
    vocab_size: int = 30
    num_mel_bins: int = 10
    d_model: int = 24
    attention_heads: int = 4
    ffn_dim: int = 40
    encoder_layers: int = 2
    decoder_layers: int = 2
    max_source_positions: int = FRAMES // 2
    max_target_positions: int = 14
    pad_token_id: int = END
    decoder_start_token_id: int = START


def sinusoids(length: int, channels: int, max_timescale: float = 10000.0) -> Tensor:
    """[length, channels]: the sines of all rates, then their cosines."""
    half = channels // 2
    rates = max_timescale ** -(torch.arange(half) / (half - 1))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def shift_tokens_right(labels: Tensor, pad: int, start: int) -> Tensor:
    """The labels one step later; what the loss ignores becomes the filling token."""
    shifted = labels.roll(1, 1)
    shifted[:, 0] = start
    return shifted.masked_fill(shifted == IGNORED, pad)


class WhisperPositionalEmbedding(nn.Embedding):
    """The first rows of the table, as many as there are tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.weight[: input_ids.shape[1]]


class WhisperAttention(nn.Module):
    """Attention to the states themselves or to others; the keys have no bias."""

    def __init__(self, config: WhisperConfig):
        super().__init__()
        width, self.num_heads = config.d_model, config.attention_heads
        self.head_dim = width // self.num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj, self.q_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(
        self, x: Tensor, key_value_states: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        source = x if key_value_states is None else key_value_states
        q = self.split(self.q_proj(x) * self.scaling)
        k, v = self.split(self.k_proj(source)), self.split(self.v_proj(source))
        scores = q @ k.transpose(2, 3)
        if mask is not None:
            scores = scores + mask
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class WhisperEncoderLayer(nn.Module):
    def __init__(self, config: WhisperConfig):
        super().__init__()
        width = config.d_model
        self.self_attn, self.self_attn_layer_norm = WhisperAttention(config), nn.LayerNorm(width)
        self.activation_fn = nn.GELU()
        self.fc1, self.fc2 = nn.Linear(width, config.ffn_dim), nn.Linear(config.ffn_dim, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(x))))


class WhisperDecoderLayer(nn.Module):
    def __init__(self, config: WhisperConfig):
        super().__init__()
        width = config.d_model
        self.self_attn, self.self_attn_layer_norm = WhisperAttention(config), nn.LayerNorm(width)
        self.activation_fn = nn.GELU()
        self.encoder_attn, self.encoder_attn_layer_norm = WhisperAttention(config), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, config.ffn_dim), nn.Linear(config.ffn_dim, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, sound: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask=mask)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), key_value_states=sound)
        return x + self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(x))))


class WhisperEncoder(nn.Module):
    """Features [N, bins, frames] -> states [N, frames / 2, width]; the table of positions is fixed."""

    def __init__(self, config: WhisperConfig):
        super().__init__()
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, width).requires_grad_(False)
        self.layers = nn.ModuleList(WhisperEncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, input_features: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(input_features)))).transpose(1, 2)
        rows = torch.arange(self.embed_positions.num_embeddings, device=x.device)
        x = x + self.embed_positions(rows)
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class WhisperDecoder(nn.Module):
    def __init__(self, config: WhisperConfig):
        super().__init__()
        width = config.d_model
        self.embed_tokens = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.embed_positions = WhisperPositionalEmbedding(config.max_target_positions, width)
        self.layers = nn.ModuleList(WhisperDecoderLayer(config) for _ in range(config.decoder_layers))
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, sound: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) + self.embed_positions(input_ids)
        length = x.shape[1]
        mask = x.new_full((length, length), torch.finfo(x.dtype).min).triu(1)
        for layer in self.layers:
            x = layer(x, sound, mask)
        return self.layer_norm(x)


class WhisperModel(nn.Module):
    def __init__(self, config: WhisperConfig):
        super().__init__()
        self.encoder, self.decoder = WhisperEncoder(config), WhisperDecoder(config)

    def forward(self, input_features: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.decoder(decoder_input_ids, self.encoder(input_features))


class WhisperForConditionalGeneration(nn.Module):
    """Features [N, bins, frames] and labels [N, T] -> logits [N, T, vocabulary]."""

    def __init__(self, config: WhisperConfig | None = None):
        super().__init__()
        self.config = config = config or WhisperConfig()
        self.model = WhisperModel(config)
        self.proj_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.apply(self.varied)
        self.proj_out.weight = self.model.decoder.embed_tokens.weight
        table = self.model.encoder.embed_positions.weight
        with torch.no_grad():
            table.copy_(sinusoids(*table.shape))

    @staticmethod
    def varied(module: nn.Module) -> None:
        """Start with weights that let every layer, gain and shift count."""
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.6, 1.4)
        elif isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
            nn.init.normal_(module.weight, std=1.2 * module.weight[0].numel() ** -0.5)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.2)

    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        ids = shift_tokens_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)
        return self.proj_out(self.model(input_features, ids))


def speech() -> tuple[dict[str, Tensor], Tensor]:
    """Three sentences of words that sound for two frames each; one word of each was not understood."""
    words = torch.randint(END, (3, STEPS))
    lengths = torch.tensor([STEPS, 9, 8])[torch.randperm(3), None]
    spoken = torch.arange(STEPS) < lengths - 1
    tones = torch.outer(torch.arange(END) + 1, torch.arange(10) + 1).mul(0.7).sin()
    mel = F.pad(tones[words] * spoken[..., None], (0, 0, 1, 1)).repeat_interleave(2, 1).transpose(1, 2)
    labels = words.scatter(1, lengths - 1, END).masked_fill(torch.arange(STEPS) >= lengths, IGNORED)
    labels = labels.scatter(1, torch.randint(1, 5, (3, 1)), IGNORED)
    return {"input_features": mel + 0.2 * torch.randn(mel.shape), "labels": labels}, labels


def words_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


Whisper = WhisperForConditionalGeneration
