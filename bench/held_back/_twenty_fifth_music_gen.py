"""A small decoder of MusicGen: delayed codebooks of a tune, read under the states of a text."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CODEBOOKS, VOCABULARY, WIDTH, HEADS, INNER, LAYERS = 4, 19, 24, 3, 52, 3
CLIPS, STEPS, WORDS, POSITIONS, PAD, IGNORED = 5, 11, 7, 18, VOCABULARY, -100


def shift_tokens_right(labels: Tensor, pad_token_id: int, decoder_start_token_id: int) -> Tensor:
    """[N, T, K] -> what the decoder reads to say them, [N, K, T]."""
    input_ids = labels.transpose(1, 2)
    shifted = torch.zeros_like(input_ids)
    shifted[..., 1:] = input_ids[..., :-1]
    shifted[..., 0] = decoder_start_token_id
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


class MusicgenSinusoidalPositionalEmbedding(nn.Module):
    """Cosines in the first half of the width, sines in the second."""

    def __init__(self, num_positions: int, embedding_dim: int):
        super().__init__()
        self.register_buffer("weights", self.get_embedding(num_positions, embedding_dim), persistent=False)

    @staticmethod
    def get_embedding(num_embeddings: int, embedding_dim: int) -> Tensor:
        half_dim = embedding_dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, dtype=torch.float64) * -emb)
        emb = torch.arange(num_embeddings, dtype=torch.float64)[:, None] * emb[None]
        return torch.cat([torch.cos(emb), torch.sin(emb)], dim=1).to(torch.get_default_dtype())

    def forward(self, input_ids: Tensor, past_key_values_length: int = 0) -> Tensor:
        position_ids = torch.arange(input_ids.shape[-1], device=input_ids.device) + past_key_values_length
        return self.weights.index_select(0, position_ids).detach()


class MusicgenAttention(nn.Module):
    """Of the states to themselves, or to those of the text."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def _shape(self, tensor: Tensor) -> Tensor:
        return tensor.view(*tensor.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        current_states = hidden_states if key_value_states is None else key_value_states
        query_states = self._shape(self.q_proj(hidden_states) * self.scaling)
        key_states = self._shape(self.k_proj(current_states))
        value_states = self._shape(self.v_proj(current_states))
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3))
        if mask is not None:
            attn_weights = attn_weights + mask
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2)
        return self.out_proj(attn_output.reshape(hidden_states.shape))


class MusicgenDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = MusicgenAttention(WIDTH, HEADS)
        self.activation_fn = nn.GELU()
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.encoder_attn = MusicgenAttention(WIDTH, HEADS)
        self.encoder_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, INNER, bias=False)
        self.fc2 = nn.Linear(INNER, WIDTH, bias=False)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
    ) -> Tensor:
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = residual + self.self_attn(hidden_states, mask=attention_mask)
        residual = hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
        hidden_states = self.encoder_attn(hidden_states, encoder_hidden_states, encoder_attention_mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.fc2(self.activation_fn(self.fc1(hidden_states)))
        return residual + hidden_states


class MusicgenDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.ModuleList(nn.Embedding(VOCABULARY + 1, WIDTH) for _ in range(CODEBOOKS))
        self.embed_positions = MusicgenSinusoidalPositionalEmbedding(POSITIONS, WIDTH)
        self.layers = nn.ModuleList(MusicgenDecoderLayer() for _ in range(LAYERS))
        self.layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor, encoder_mask: Tensor) -> Tensor:
        inputs_embeds = sum(embed(input_ids[:, i]) for i, embed in enumerate(self.embed_tokens))
        hidden_states, least = inputs_embeds + self.embed_positions(input_ids), -1e9
        square = hidden_states.new_full((input_ids.shape[-1], input_ids.shape[-1]), least)
        attention_mask = square.triu(1)[None, None]
        encoder_mask = (1 - encoder_mask.to(hidden_states))[:, None, None, :] * least
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, attention_mask, encoder_hidden_states, encoder_mask)
        return self.layer_norm(hidden_states)


class MusicgenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = MusicgenDecoder()

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor, encoder_mask: Tensor) -> Tensor:
        return self.decoder(input_ids, encoder_hidden_states, encoder_mask)


class MusicgenForCausalLM(nn.Module):
    """Codes [N, T, K] and a text -> the loss, and logits [N K, T + K - 1, V] in the pattern of the delays."""

    def __init__(self):
        super().__init__()
        self.model = MusicgenModel()
        self.lm_heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(CODEBOOKS))
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.4)
        elif isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1, std=0.2), nn.init.normal_(module.bias, std=0.1)

    def build_delay_pattern_mask(self, input_ids: Tensor, pad_token_id: int) -> Tensor:
        """[N, K, T] -> [N, K, T + K - 1]: each codebook a step behind the one before."""
        bsz, num_codebooks, seq_len = input_ids.shape
        max_length = seq_len + num_codebooks - 1
        shifted = input_ids.new_full((bsz, num_codebooks, max_length), -1)
        for codebook in range(num_codebooks):
            shifted[:, codebook, codebook : seq_len + codebook] = input_ids[:, codebook]
        ones = torch.ones(num_codebooks, max_length, dtype=torch.bool, device=input_ids.device)
        mask = ~(ones.triu(max_length - num_codebooks + 1) | ones.tril(-1))
        return mask * shifted + ~mask * pad_token_id

    def forward(
        self, labels: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        labels = self.build_delay_pattern_mask(labels.transpose(1, 2), PAD).transpose(1, 2)
        input_ids = shift_tokens_right(labels, PAD, PAD)
        hidden_states = self.model(input_ids, encoder_hidden_states, encoder_attention_mask)
        lm_logits = torch.stack([head(hidden_states) for head in self.lm_heads], dim=1)
        labels, loss = labels.masked_fill(labels == PAD, IGNORED), 0
        for codebook in range(len(self.lm_heads)):
            mask = labels[..., codebook] != IGNORED
            loss = loss + F.cross_entropy(lm_logits[:, codebook][mask], labels[..., codebook][mask])
        return loss / len(self.lm_heads), lm_logits.flatten(0, 1)


def tunes() -> tuple[dict[str, Tensor], Tensor]:
    """Rising tunes of unlike lengths, some without their finest codebooks, and a text that tells the rise."""
    pace, start = torch.randint(1, 4, (CLIPS, 1)), torch.randint(VOCABULARY, (CLIPS, 1))
    note = start + pace * torch.arange(STEPS) + (torch.rand(CLIPS, STEPS) < 0.1)
    labels = (note[..., None] * torch.tensor([1, 3, 5, 2]) + torch.arange(CODEBOOKS)) % VOCABULARY
    late = torch.arange(STEPS) >= torch.randint(STEPS - 4, STEPS + 1, (CLIPS, 1))
    absent = torch.arange(CODEBOOKS) >= torch.tensor([4, 2, 4, 3, 4])[:, None]
    labels = labels.masked_fill(late[..., None] | absent[:, None], IGNORED)
    turn = (pace + torch.arange(WORDS))[..., None] * torch.arange(1, WIDTH + 1) / 5
    words = torch.sin(turn) + 0.3 * torch.randn(CLIPS, WORDS, WIDTH)
    mask = (torch.arange(WORDS) < torch.randint(2, WORDS, (CLIPS, 1))).long()
    return {"labels": labels, "encoder_hidden_states": words, "encoder_attention_mask": mask}, labels


def own(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The mean of the codebooks' cross entropies, which the network gives itself."""
    return outputs[0]
