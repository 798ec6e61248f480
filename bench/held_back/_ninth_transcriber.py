"""A small transcriber of speech: an encoder of mel frames and a decoder of words, two layers each."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, INNER, LAYERS = 16, 2, 32, 2
MELS, SPOKEN, FRAMES, PLACES = 10, 5, 4, 12
VOCAB, PAD, START, END, IGNORED = 19, 0, 1, 2, -100


def spread_out(module: nn.Module) -> None:
    """Start with lively attention, and with shifts and norm weights that count."""
    if isinstance(module, nn.Linear | nn.Conv1d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, 1.0, 0.2)
        nn.init.normal_(module.bias, std=0.1)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.4)


def shift_tokens_right(labels: Tensor) -> Tensor:
    """What the decoder is given: the start token, then each label but the last."""
    shifted = labels.new_zeros(labels.shape)
    shifted[:, 1:] = labels[:, :-1].clone()
    shifted[:, 0] = START
    return shifted.masked_fill_(shifted == IGNORED, PAD)


class SinusoidalPositions(nn.Module):
    """The sines and then the cosines of slower and slower waves."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        _, length, width = hidden_states.shape
        kind = {"dtype": hidden_states.dtype, "device": hidden_states.device}
        step = math.log(10000) / (width // 2 - 1)
        rates = torch.exp(-step * torch.arange(width // 2, **kind))
        angles = torch.arange(length, **kind)[:, None] * rates[None, :]
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class LearnedPositions(nn.Embedding):
    """The first rows of a table."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.weight[: input_ids.shape[1]]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], HEADS, self.head_dim).transpose(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        source = hidden_states if key_value_states is None else key_value_states
        query = self.heads(self.q_proj(hidden_states) * self.scaling)
        key, value = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
        weights = torch.matmul(query, key.transpose(2, 3))
        if attention_mask is not None:
            weights = weights + attention_mask
        attended = torch.matmul(F.softmax(weights, dim=-1), value)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.activation_fn = nn.GELU()
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = residual + self.self_attn(self.self_attn_layer_norm(hidden_states))
        residual = hidden_states
        hidden_states = self.activation_fn(self.fc1(self.final_layer_norm(hidden_states)))
        return residual + self.fc2(hidden_states)


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.activation_fn = nn.GELU()
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.encoder_attn = Attention()
        self.encoder_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, encoder_states: Tensor, attention_mask: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = residual + self.self_attn(hidden_states, attention_mask=attention_mask)
        residual = hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
        hidden_states = residual + self.encoder_attn(hidden_states, key_value_states=encoder_states)
        residual = hidden_states
        hidden_states = self.activation_fn(self.fc1(self.final_layer_norm(hidden_states)))
        return residual + self.fc2(hidden_states)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, WIDTH, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, kernel_size=3, stride=2, padding=1)
        self.embed_positions = SinusoidalPositions()
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, input_features: Tensor) -> Tensor:
        hidden_states = F.gelu(self.conv1(input_features))
        hidden_states = F.gelu(self.conv2(hidden_states)).permute(0, 2, 1)
        hidden_states = hidden_states + self.embed_positions(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.layer_norm(hidden_states)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.embed_positions = LearnedPositions(PLACES, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, encoder_states: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(input_ids)
        length = input_ids.shape[1]
        mask = hidden_states.new_full((length, length), -torch.inf).triu(1)
        for layer in self.layers:
            hidden_states = layer(hidden_states, encoder_states, mask)
        return self.layer_norm(hidden_states)


class SpeechModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, input_features: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.decoder(decoder_input_ids, self.encoder(input_features))


class Transcriber(nn.Module):
    """Mel frames [N, mels, T] and the labels [N, L] -> logits [N, L, words]."""

    def __init__(self):
        super().__init__()
        self.model = SpeechModel()
        self.proj_out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.apply(spread_out)
        self.proj_out.weight = self.model.decoder.embed_tokens.weight

    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        return self.proj_out(self.model(input_features, shift_tokens_right(labels)))


def speech() -> tuple[dict[str, Tensor], Tensor]:
    """Two to five words, each some frames of its own sound, then silence; all under noise."""
    words = torch.randint(END + 1, VOCAB, (6, SPOKEN))
    count = torch.randint(2, SPOKEN + 1, (6, 1))
    at = torch.arange(SPOKEN + 1)
    labels = F.pad(words, (0, 1)).masked_fill(at == count, END).masked_fill(at > count, IGNORED)
    sounds = torch.cos(torch.outer(torch.arange(VOCAB), 0.37 * torch.arange(1, MELS + 1)))
    heard = sounds[words] * (at[:-1] < count)[..., None]
    frames = heard.repeat_interleave(FRAMES, 1).transpose(1, 2)
    return {"input_features": frames + 0.3 * torch.randn(frames.shape), "labels": labels}, labels.clone()


def next_word(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
