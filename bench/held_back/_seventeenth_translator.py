"""A small recurrent translator: a reader of both directions, a writer with attention and input feeding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

UNK, PAD, BOS, EOS = range(4)
FIRST, SOURCE_WORDS, TARGET_WORDS = 4, 17, 15


@dataclass
class TranslatorConfig:
    """The sizes; the reader's states are those of two directions."""

    encoder_embed_dim: int = 10
    encoder_hidden_size: int = 8
    decoder_embed_dim: int = 11
    decoder_hidden_size: int = 14
    decoder_out_embed_dim: int = 12
    num_layers: int = 2


class LSTMEncoder(nn.Module):
    """Ids [N, S] and lengths [N] -> states [S, N, units], last states and cells, which ids are padding."""

    def __init__(self, config: TranslatorConfig):
        super().__init__()
        self.num_layers, self.output_units = config.num_layers, 2 * config.encoder_hidden_size
        self.embed_tokens = nn.Embedding(SOURCE_WORDS, config.encoder_embed_dim, padding_idx=PAD)
        self.lstm = nn.LSTM(
            config.encoder_embed_dim, config.encoder_hidden_size, config.num_layers, bidirectional=True
        )

    def combine_bidir(self, last: Tensor) -> Tensor:
        """[layers x 2, N, hidden] -> [layers, N, 2 hidden], the forward direction first."""
        by_layer = last.unflatten(0, (self.num_layers, 2))
        return by_layer.transpose(1, 2).flatten(2)

    def forward(self, src_tokens: Tensor, src_lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.embed_tokens(src_tokens).transpose(0, 1)
        packed = pack_padded_sequence(x, src_lengths.cpu(), enforce_sorted=False)
        packed, (hiddens, cells) = self.lstm(packed)
        x, _ = pad_packed_sequence(packed, total_length=src_tokens.shape[1])
        return x, self.combine_bidir(hiddens), self.combine_bidir(cells), src_tokens.eq(PAD).t()


class AttentionLayer(nn.Module):
    """Luong's: a projected state asks each source state; what it gets is joined to the state itself."""

    def __init__(self, input_dim: int, source_dim: int, output_dim: int):
        super().__init__()
        self.input_proj = nn.Linear(input_dim, source_dim, bias=False)
        self.output_proj = nn.Linear(input_dim + source_dim, output_dim, bias=False)

    def forward(self, state: Tensor, source: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        scores = (source * self.input_proj(state)).sum(2)
        weights = scores.masked_fill(padding, float("-inf")).softmax(0)
        context = (weights[:, :, None] * source).sum(0)
        return torch.tanh(self.output_proj(torch.cat([context, state], 1))), weights


class LSTMDecoder(nn.Module):
    """Previous ids [N, T] and what the encoder gave -> scores [N, T, words] and weights [N, T, S]."""

    def __init__(self, config: TranslatorConfig, encoder_units: int):
        super().__init__()
        embed, hidden, last = (
            config.decoder_embed_dim,
            config.decoder_hidden_size,
            config.decoder_out_embed_dim,
        )
        self.hidden_size = hidden
        self.embed_tokens = nn.Embedding(TARGET_WORDS, embed, padding_idx=PAD)
        self.encoder_hidden_proj = nn.Linear(encoder_units, hidden)
        self.encoder_cell_proj = nn.Linear(encoder_units, hidden)
        self.layers = nn.ModuleList(
            nn.LSTMCell(embed + hidden if i == 0 else hidden, hidden) for i in range(config.num_layers)
        )
        self.attention = AttentionLayer(hidden, encoder_units, hidden)
        self.additional_fc = nn.Linear(hidden, last)
        self.fc_out = nn.Linear(last, TARGET_WORDS)

    def forward(self, prev_output_tokens: Tensor, encoder_out: tuple) -> tuple[Tensor, Tensor]:
        source, last_hiddens, last_cells, padding = encoder_out
        words = self.embed_tokens(prev_output_tokens).transpose(0, 1)
        hiddens = [self.encoder_hidden_proj(h) for h in last_hiddens]
        cells = [self.encoder_cell_proj(c) for c in last_cells]
        input_feed = words.new_zeros(words.shape[1], self.hidden_size)
        outs, attn = [], []
        for word in words:
            x = torch.cat([word, input_feed], 1)
            for i, layer in enumerate(self.layers):
                hiddens[i], cells[i] = layer(x, (hiddens[i], cells[i]))
                x = hiddens[i]
            input_feed, weights = self.attention(x, source, padding)
            outs.append(input_feed)
            attn.append(weights)
        x = torch.stack(outs).transpose(0, 1)
        return self.fc_out(self.additional_fc(x)), torch.stack(attn).permute(2, 0, 1)


class LSTMModel(nn.Module):
    """Source ids, their lengths and previous target ids -> scores of the words, attention weights."""

    def __init__(self, config: TranslatorConfig | None = None):
        super().__init__()
        config = config or TranslatorConfig()
        self.encoder = LSTMEncoder(config)
        self.decoder = LSTMDecoder(config, self.encoder.output_units)
        self.apply(self.varied)

    @staticmethod
    def varied(module: nn.Module) -> None:
        """Start with weights that let every layer, bias and gate count."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.8)
        elif isinstance(module, nn.Linear | nn.LSTM | nn.LSTMCell):
            for name, weight in module.named_parameters():
                fan = weight.shape[-1]
                nn.init.normal_(weight, std=0.3 if name.startswith("bias") else 1.2 * fan**-0.5)

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor
    ) -> dict[str, Tensor]:
        logits, attn = self.decoder(prev_output_tokens, self.encoder(src_tokens, src_lengths))
        return {"logits": logits, "attn": attn}


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Four sentences to be told backwards without their last word; one word of each is unknown."""
    lengths = torch.tensor([8, 6, 5, 4])[torch.randperm(4), None]
    places = torch.arange(8)
    words = torch.randint(FIRST, SOURCE_WORDS, (4, 8))
    source = words.scatter(1, torch.randint(3, (4, 1)), UNK).scatter(1, lengths - 1, EOS)
    source = source.masked_fill(places >= lengths, PAD)
    told = FIRST + (3 * words) % (TARGET_WORDS - FIRST)
    places = places[:-1]
    target = told.gather(1, (lengths - 3 - places).clamp(min=0)).scatter(1, lengths - 2, EOS)
    padding = places >= lengths - 1
    target = target.masked_fill(padding, PAD)
    previous = torch.cat([torch.full((4, 1), BOS), target[:, :-1]], 1).masked_fill(padding, PAD)
    inputs = {"src_tokens": source, "src_lengths": lengths[:, 0], "prev_output_tokens": previous}
    return inputs, target


def smoothed(outputs: dict[str, Tensor], target: Tensor, epsilon: float = 0.1) -> Tensor:
    """Cross entropy a word; a part of each target is spread evenly over all the other words."""
    losses = -outputs["logits"].log_softmax(-1)
    real = target.ne(PAD)
    own = losses.gather(2, target[:, :, None])[:, :, 0][real].sum()
    every = losses.sum(2)[real].sum()
    share = epsilon / (losses.shape[2] - 1)
    return ((1 - epsilon - share) * own + share * every) / real.sum()
