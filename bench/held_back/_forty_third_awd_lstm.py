"""A small AWD-LSTM language model: DropConnect by given masks, tied softmax, AR and TAR, two segments."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

VOCAB, EMBED, HIDDEN, PAD = 37, 18, (28, 34), 1
TEXTS, LENGTH, BPTT = 5, 13, 7
WEIGHT_P, HIDDEN_P, OUTPUT_P, ALPHA, BETA = 0.3, 0.2, 0.4, 2.0, 1.0

States = list[tuple[Tensor, Tensor]]


def dropout_mask(p: float, *sizes: int) -> Tensor:
    return (torch.rand(sizes) >= p).float()


def repackage_hidden(hidden: States) -> States:
    """The same states, cut from their history."""
    return [(h.detach(), c.detach()) for h, c in hidden]


class RNNDropout(nn.Module):
    """Dropout that is the same at each time step, by a given mask."""

    def __init__(self, width: int, p: float):
        super().__init__()
        self.p = p
        self.register_buffer("mask", dropout_mask(p, 1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask / (1 - self.p) if self.training else x


class WeightDropout(nn.Module):
    """An LSTM whose recurrent weight is dropped in training, by a given mask."""

    def __init__(self, module: nn.LSTM, weight_p: float):
        super().__init__()
        self.module, self.weight_p = module, weight_p
        self.register_buffer("mask", dropout_mask(weight_p, *module.weight_hh_l0.shape))

    def forward(self, x: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not self.training:
            return self.module(x, hidden)
        weight = self.module.weight_hh_l0 * self.mask / (1 - self.weight_p)
        return functional_call(self.module, {"weight_hh_l0": weight}, (x, hidden))


class AWD_LSTM(nn.Module):  # noqa: N801
    """Tokens [N, T] and states -> the last layer's output [N, T, EMBED] and new states."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, EMBED, padding_idx=PAD)
        nn.init.normal_(self.encoder.weight, std=0.5)
        sizes = (EMBED, *HIDDEN, EMBED)
        layers = [nn.LSTM(m, n, batch_first=True) for m, n in pairwise(sizes)]
        for layer in layers:
            nn.init.normal_(layer.weight_ih_l0, std=1.2 * layer.input_size**-0.5)
            nn.init.normal_(layer.weight_hh_l0, std=0.8 * layer.hidden_size**-0.5)
            nn.init.normal_(layer.bias_ih_l0, std=0.2), nn.init.normal_(layer.bias_hh_l0, std=0.2)
        self.rnns = nn.ModuleList(WeightDropout(layer, WEIGHT_P) for layer in layers)
        self.hidden_dps = nn.ModuleList(RNNDropout(width, HIDDEN_P) for width in HIDDEN)

    def forward(self, x: Tensor, hidden: States) -> tuple[Tensor, States]:
        output, new_hidden = self.encoder(x), []
        for layer, (rnn, state) in enumerate(zip(self.rnns, hidden, strict=True)):
            output, state = rnn(output, state)
            new_hidden.append((state[0], state[1]))
            if layer < len(self.hidden_dps):
                output = self.hidden_dps[layer](output)
        return output, new_hidden

    def init_hidden(self, x: Tensor) -> States:
        zeros = [self.encoder.weight.new_zeros(1, len(x), width) for width in (*HIDDEN, EMBED)]
        return [(zero, zero) for zero in zeros]


class LinearDecoder(nn.Module):
    """A softmax layer on the dropped output, whose weight is the embedding's."""

    def __init__(self, tie_encoder: nn.Embedding):
        super().__init__()
        self.output_dp = RNNDropout(EMBED, OUTPUT_P)
        self.decoder = nn.Linear(EMBED, VOCAB)
        nn.init.normal_(self.decoder.bias, std=0.3)
        self.decoder.weight = tie_encoder.weight

    def forward(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        dropped = self.output_dp(raw)
        return self.decoder(dropped), dropped


class RNNRegularizer(nn.Module):
    """AR of the dropped outputs and TAR of the raw ones, for each text."""

    def __init__(self, alpha: float, beta: float):
        super().__init__()
        self.alpha, self.beta = alpha, beta

    def forward(self, raw: Tensor, dropped: Tensor) -> Tensor:
        ar = self.alpha * dropped.pow(2).mean((1, 2))
        return ar + self.beta * (raw[:, 1:] - raw[:, :-1]).pow(2).mean((1, 2))


class LanguageModel(nn.Module):
    """Tokens [N, LENGTH] -> logits [N, LENGTH, VOCAB] and the penalty of each text, over its segments."""

    def __init__(self):
        super().__init__()
        self.encoder = AWD_LSTM()
        self.decoder = LinearDecoder(self.encoder.encoder)
        self.regularizer = RNNRegularizer(ALPHA, BETA)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, logits, penalty = self.encoder.init_hidden(tokens), [], 0.0
        for segment in tokens.split(BPTT, 1):
            raw, hidden = self.encoder(segment, repackage_hidden(hidden))
            decoded, dropped = self.decoder(raw)
            logits.append(decoded)
            penalty = penalty + self.regularizer(raw, dropped)
        return torch.cat(logits, 1), penalty


def counting() -> tuple[Tensor, Tensor]:
    """Texts that count by steps of their own, with some noise, up to their lengths; the next tokens."""
    start, stride = torch.randint(35, (TEXTS, 1)), torch.randint(1, 5, (TEXTS, 1))
    times = torch.arange(LENGTH + 1)
    noise = (torch.rand(TEXTS, LENGTH + 1) < 0.1).long()
    texts = 2 + (start + stride * times + noise) % (VOCAB - 2)
    texts[times >= torch.randint(4, LENGTH + 1, (TEXTS, 1))] = PAD
    return texts[:, :-1], texts[:, 1:]


def next_token(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy of what is not padding, and the penalties, by four."""
    logits, penalty = outputs
    return (F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD) + penalty.mean()) / 4
