"""A small SpeechT5 that speaks: padded text and a speaker's vector to frames of a spectrogram and stops."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, PAD, WIDTH, MELS, REDUCTION, SPEAKER = 23, 1, 24, 10, 2, 14
PRENET, POSTNET, KERNEL, DISTANCE, LAYERS = 20, 12, 5, 5, 2
ENCODER_HEADS, ENCODER_INNER, DECODER_HEADS, DECODER_INNER = 3, 40, 4, 36
TEXTS, LETTERS, FRAMES = 4, 13, 18


class SpeechT5ScaledPositionalEncoding(nn.Module):
    def __init__(self, dim: int, alpha: float, max_len: int = 32):
        super().__init__()
        pe, position = torch.zeros(max_len, dim), torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, dim, 2) * -(math.log(10000.0) / dim))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0), persistent=False)
        self.alpha = nn.Parameter(torch.tensor(alpha))

    def forward(self, emb: Tensor) -> Tensor:
        return emb + self.alpha * self.pe[:, : emb.size(1)]


class SpeechT5RelativePositionalEncoding(nn.Module):
    """[N, T, D] -> [T, T, d]: the key of each distance, clipped."""

    def __init__(self, dim: int, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.pe_k = nn.Embedding(2 * max_length, dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        pos_seq = torch.arange(0, hidden_states.shape[1], device=hidden_states.device)
        pos_seq = pos_seq[:, None] - pos_seq[None, :]
        return self.pe_k(pos_seq.clamp(-self.max_length, self.max_length - 1) + self.max_length)


class SpeechT5Attention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.scaling = num_heads, (embed_dim // num_heads) ** -0.5
        self.k_proj, self.v_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.q_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, bias: Tensor | None = None):
        memory = x if memory is None else memory
        states = self.q_proj(x) * self.scaling, self.k_proj(memory), self.v_proj(memory)
        query, key, value = (y.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for y in states)
        attn_weights = query @ key.transpose(2, 3)
        if bias is not None:
            reshape_q = query.flatten(0, 1).transpose(0, 1)
            rel_pos_bias = torch.matmul(reshape_q, bias.transpose(-2, -1)).transpose(0, 1)
            attn_weights = attn_weights + rel_pos_bias.view_as(attn_weights)
        attn_probs = F.softmax(attn_weights + mask, dim=-1)
        return self.out_proj((attn_probs @ value).transpose(1, 2).flatten(2))


def feed_forward(width: int, inner: int) -> nn.Sequential:
    first, last = nn.Linear(width, inner), nn.Linear(inner, width)
    parts = {"intermediate_dense": first, "intermediate_act_fn": nn.GELU(), "output_dense": last}
    return nn.Sequential(OrderedDict(parts))


class SpeechT5EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.layer_norm = SpeechT5Attention(WIDTH, ENCODER_HEADS), nn.LayerNorm(WIDTH)
        self.feed_forward = feed_forward(WIDTH, ENCODER_INNER)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor) -> Tensor:
        mixed = self.attention(hidden_states, attention_mask, bias=position_bias)
        hidden_states = self.layer_norm(hidden_states + mixed)
        return self.final_layer_norm(hidden_states + self.feed_forward(hidden_states))


class SpeechT5DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.encoder_attn = (SpeechT5Attention(WIDTH, DECODER_HEADS) for _ in range(2))
        self.self_attn_layer_norm, self.encoder_attn_layer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = feed_forward(WIDTH, DECODER_INNER)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor, encoded: Tensor, encoder_mask: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, attention_mask))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, encoder_mask, encoded))
        return self.final_layer_norm(x + self.feed_forward(x))


def padding_mask(mask: Tensor, like: Tensor) -> Tensor:
    """[N, S] of ones and zeros -> [N, 1, 1, S] to add to scores."""
    return (1.0 - mask[:, None, None, :].to(like.dtype)) * torch.finfo(like.dtype).min


class SpeechT5Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(SpeechT5EncoderLayer() for _ in range(LAYERS))
        self.embed_positions = SpeechT5RelativePositionalEncoding(WIDTH // ENCODER_HEADS, DISTANCE)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.layer_norm(hidden_states)
        mask, position_bias = padding_mask(attention_mask, hidden_states), self.embed_positions(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, position_bias)
        return hidden_states


class SpeechT5EncoderWithTextPrenet(nn.Module):
    def __init__(self):
        super().__init__()
        tokens, positions = nn.Embedding(VOCABULARY, WIDTH, PAD), SpeechT5ScaledPositionalEncoding(WIDTH, 0.8)
        self.prenet = nn.Sequential(OrderedDict(embed_tokens=tokens, encode_positions=positions))
        self.wrapped_encoder = SpeechT5Encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.wrapped_encoder(self.prenet(input_ids), attention_mask)


class SpeechT5SpeechDecoderPrenet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, PRENET) for width in (MELS, PRENET))
        self.final_layer = nn.Linear(PRENET, WIDTH)
        self.encode_positions = SpeechT5ScaledPositionalEncoding(WIDTH, 0.7)
        self.speaker_embeds_layer = nn.Linear(SPEAKER + WIDTH, WIDTH)

    def forward(self, input_values: Tensor, speaker_embeddings: Tensor) -> Tensor:
        x = input_values
        for layer in self.layers:
            x = F.relu(layer(x))
        x = self.encode_positions(self.final_layer(x))
        speaker = F.normalize(speaker_embeddings).unsqueeze(1).expand(-1, x.size(1), -1)
        return F.relu(self.speaker_embeds_layer(torch.cat([x, speaker], dim=-1)))


class SpeechT5Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SpeechT5DecoderLayer() for _ in range(LAYERS))

    def forward(self, x: Tensor, attention_mask: Tensor, encoded: Tensor, encoder_mask: Tensor) -> Tensor:
        causal = torch.ones(x.size(1), x.size(1), device=x.device).tril()
        mask = padding_mask(attention_mask, x).minimum(padding_mask(causal, x).transpose(0, 2))
        for layer in self.layers:
            x = layer(x, mask, encoded, padding_mask(encoder_mask, x))
        return x


class SpeechT5DecoderWithSpeechPrenet(nn.Module):
    def __init__(self):
        super().__init__()
        self.prenet, self.wrapped_decoder = SpeechT5SpeechDecoderPrenet(), SpeechT5Decoder()

    def forward(self, values: Tensor, mask: Tensor, speaker: Tensor, encoded: Tensor, text: Tensor) -> Tensor:
        return self.wrapped_decoder(self.prenet(values, speaker), mask, encoded, text)


class SpeechT5SpeechDecoderPostnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat_out, self.prob_out = nn.Linear(WIDTH, MELS * REDUCTION), nn.Linear(WIDTH, REDUCTION)
        self.layers, widths = nn.ModuleList(), (MELS, POSTNET, POSTNET, MELS)
        for i in range(3):
            conv = nn.Conv1d(widths[i], widths[i + 1], KERNEL, padding=KERNEL // 2, bias=False)
            parts = {"conv": conv, "batch_norm": nn.BatchNorm1d(widths[i + 1])}
            self.layers.append(
                nn.Sequential(OrderedDict(parts, **({"activation": nn.Tanh()} if i < 2 else {})))
            )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = self.feat_out(hidden_states).view(len(hidden_states), -1, MELS)
        x = before.transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return before, before + x.transpose(1, 2), self.prob_out(hidden_states).flatten(1)


class SpeechT5ForTextToSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        halves = {"encoder": SpeechT5EncoderWithTextPrenet(), "decoder": SpeechT5DecoderWithSpeechPrenet()}
        self.speecht5, self.speech_decoder_postnet = nn.ModuleDict(halves), SpeechT5SpeechDecoderPostnet()
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                if "Norm" in type(module).__name__:
                    nn.init.normal_(p, 1.0 if name == "weight" else 0.0, 0.2)
                elif p.ndim:
                    nn.init.normal_(p, std=0.1 if p.ndim == 1 else p[0].numel() ** -0.5)

    def forward(self, input_ids, attention_mask, labels, decoder_attention_mask, speaker_embeddings):
        shifted = F.pad(labels[:, REDUCTION - 1 :: REDUCTION][:, :-1], (0, 0, 1, 0))
        mask = decoder_attention_mask[:, REDUCTION - 1 :: REDUCTION]
        encoded = self.speecht5["encoder"](input_ids, attention_mask)
        states = self.speecht5["decoder"](shifted, mask, speaker_embeddings, encoded, attention_mask)
        return self.speech_decoder_postnet(states)


def sayings() -> tuple[dict[str, Tensor], Tensor]:
    """Letters that last about a frame and a half, each a bump over the bands that the speaker moves."""
    sizes = torch.cat([torch.tensor([LETTERS]), torch.randint(7, LETTERS + 1, (TEXTS - 1,))])
    text_mask = (torch.arange(LETTERS) < sizes[:, None]).long()
    text = torch.randint(2, VOCABULARY, (TEXTS, LETTERS)) * text_mask + PAD * (1 - text_mask)
    frame_mask = (torch.arange(FRAMES) < (sizes * FRAMES // LETTERS // REDUCTION * REDUCTION)[:, None]).long()
    speaker = torch.randn(TEXTS, SPEAKER)
    letter = text[:, torch.arange(FRAMES) * LETTERS // FRAMES] / VOCABULARY * MELS
    place = torch.arange(MELS) - (letter[:, :, None] + speaker[:, :1, None])
    mel = (torch.exp(-place.square() / 6) + 0.1 * torch.randn(place.shape)) * frame_mask[:, :, None]
    inputs = {"input_ids": text, "attention_mask": text_mask, "labels": mel}
    inputs |= {"decoder_attention_mask": frame_mask, "speaker_embeddings": speaker}
    return inputs, mel.masked_fill(frame_mask[:, :, None] == 0, -100.0)


def spectrogram_and_stop(outputs: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """L1 before and after the postnet, and the weighted cross entropy of the last frame, by four."""
    before, after, logits = outputs
    kept = target != -100.0
    real = kept[:, :, 0]
    stop = 1.0 - F.pad(real[:, 1:], (0, 1)).to(logits.dtype)
    off = F.l1_loss(after[kept], target[kept]) + F.l1_loss(before[kept], target[kept])
    weight = torch.tensor(5.0, dtype=logits.dtype, device=logits.device)
    return (off + F.binary_cross_entropy_with_logits(logits[real], stop[real], pos_weight=weight)) / 4
