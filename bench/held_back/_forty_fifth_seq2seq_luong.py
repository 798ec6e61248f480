"""A small pointer-generator: a packed bidirectional GRU, additive attention with coverage, input feeding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

VOCABULARY, UNKNOWN, START, EXTRA = 47, 1, 2, 3
EMBEDDED, ENCODED, DECODED, ATTENDED, READ, LAYERS = 12, 13, 17, 19, 21, 2
SENTENCES, LONG, SHORT = 4, 9, 6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDED)
        self.gru = nn.GRU(EMBEDDED, ENCODED, LAYERS, batch_first=True, bidirectional=True)
        self.W_h = nn.Linear(2 * ENCODED, ATTENDED, bias=False)

    def forward(self, input: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded = self.embedding(input)
        packed = pack_padded_sequence(embedded, seq_lens.cpu(), batch_first=True, enforce_sorted=False)
        output, hidden = self.gru(packed)
        encoder_outputs, _ = pad_packed_sequence(output, batch_first=True, total_length=input.shape[1])
        return encoder_outputs, self.W_h(encoder_outputs), hidden


class ReduceState(nn.Module):
    """The last states of both directions of each layer -> the first state of a decoder's cell."""

    def __init__(self):
        super().__init__()
        self.reduce_h = nn.ModuleList(nn.Linear(2 * ENCODED, DECODED) for _ in range(LAYERS))

    def forward(self, hidden: Tensor) -> list[Tensor]:
        joined = hidden.unflatten(0, (LAYERS, 2)).transpose(1, 2).flatten(2)
        return [torch.tanh(reduce(h)) for reduce, h in zip(self.reduce_h, joined, strict=True)]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_c = nn.Linear(1, ATTENDED, bias=False)
        self.decode_proj = nn.Linear(DECODED, ATTENDED)
        self.v = nn.Linear(ATTENDED, 1, bias=False)
        nn.init.normal_(self.v.weight, std=0.8)

    def forward(
        self, s_t: Tensor, encoder_outputs: Tensor, encoder_feature: Tensor, mask: Tensor, coverage: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        features = encoder_feature + self.decode_proj(s_t).unsqueeze(1) + self.W_c(coverage.unsqueeze(2))
        scores = self.v(torch.tanh(features)).squeeze(2)
        attn_dist = F.softmax(scores, dim=1) * mask
        attn_dist = attn_dist / attn_dist.sum(1, keepdim=True)
        c_t = torch.bmm(attn_dist.unsqueeze(1), encoder_outputs).squeeze(1)
        return c_t, attn_dist, coverage + attn_dist


class Decoder(nn.Module):
    """One step."""

    def __init__(self):
        super().__init__()
        self.attention_network = Attention()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDED)
        self.x_context = nn.Linear(2 * ENCODED + EMBEDDED, EMBEDDED)
        self.cells = nn.ModuleList(nn.GRUCell(DECODED if i else EMBEDDED, DECODED) for i in range(LAYERS))
        self.p_gen_linear = nn.Linear(2 * ENCODED + DECODED + EMBEDDED, 1)
        self.out1 = nn.Linear(DECODED + 2 * ENCODED, READ)
        self.out2 = nn.Linear(READ, VOCABULARY)

    def forward(
        self, y_t: Tensor, s_t: list[Tensor], c_t: Tensor, source: tuple, extended: Tensor, coverage: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
        x = self.x_context(torch.cat((c_t, self.embedding(y_t)), 1))
        below, states = x, []
        for cell, state in zip(self.cells, s_t, strict=True):
            below = cell(below, state)
            states.append(below)
        c_t, attn_dist, coverage = self.attention_network(below, *source, coverage)
        p_gen = torch.sigmoid(self.p_gen_linear(torch.cat((c_t, below, x), 1)))
        output = self.out2(self.out1(torch.cat((below, c_t), 1)))
        vocab_dist = p_gen * F.softmax(output, dim=1)
        vocab_dist = torch.cat((vocab_dist, vocab_dist.new_zeros(len(y_t), EXTRA)), 1)
        final_dist = vocab_dist.scatter_add(1, extended, (1 - p_gen) * attn_dist)
        return final_dist, states, c_t, attn_dist, coverage


class PointerGenerator(nn.Module):
    """Sources, their lengths, their extended ids and targets -> probabilities, coverage losses by step."""

    def __init__(self):
        super().__init__()
        self.encoder, self.reduce_state, self.decoder = Encoder(), ReduceState(), Decoder()
        self.decoder.embedding.weight = self.encoder.embedding.weight

    def forward(
        self, enc_batch: Tensor, enc_lens: Tensor, enc_extended: Tensor, dec_batch: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, feature, hidden = self.encoder(enc_batch, enc_lens)
        mask = torch.arange(enc_batch.shape[1], device=enc_lens.device) < enc_lens.unsqueeze(1)
        source, s_t = (outputs, feature, mask.to(outputs)), self.reduce_state(hidden)
        c_t, coverage = torch.zeros_like(outputs[:, 0]), torch.zeros_like(outputs[:, :, 0])
        final_dists, coverage_losses = [], []
        for y_t in dec_batch.unbind(1):
            final_dist, s_t, c_t, attn_dist, next_coverage = self.decoder(
                y_t, s_t, c_t, source, enc_extended, coverage
            )
            final_dists.append(final_dist)
            coverage_losses.append(torch.sum(torch.min(attn_dist, coverage), 1))
            coverage = next_coverage
        return torch.stack(final_dists, 1), torch.stack(coverage_losses, 1)


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Sentences that say a word twice, with unknown ones; the target is every other word, last first."""
    lengths = torch.tensor([LONG, 6, 8, 5])[torch.randperm(SENTENCES)]
    extended, target = torch.zeros(SENTENCES, LONG).long(), torch.full((SENTENCES, SHORT), -100)
    for i, length in enumerate(lengths.tolist()):
        words = torch.randint(3, VOCABULARY, (length,))
        words[-1] = words[0]
        words[1], words[3] = VOCABULARY, VOCABULARY + 1 + i % 2
        said = words.flip(0)[::2]
        extended[i, :length], target[i, : len(said)] = words, said
    known = torch.where(target < VOCABULARY, target, UNKNOWN).clamp(min=0)
    inputs = {
        "enc_batch": torch.where(extended < VOCABULARY, extended, UNKNOWN),
        "enc_lens": lengths,
        "enc_extended": extended,
        "dec_batch": F.pad(known[:, :-1], (1, 0), value=START),
    }
    return inputs, target


def masked_likelihood(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The mean over sentences of the mean over their words, with the coverage loss, by four."""
    dist, coverage_loss = outputs
    mask = (target >= 0).to(dist)
    gold = dist.gather(2, target.clamp(min=0).unsqueeze(2)).squeeze(2)
    step_loss = (coverage_loss - torch.log(gold + 1e-9)) * mask
    return (step_loss.sum(1) / mask.sum(1)).mean() / 4
