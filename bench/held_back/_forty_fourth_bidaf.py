"""A small BiDAF: words and characters of a context and a question -> where the answer starts and ends."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WORDS, WORD, LETTERS, LETTER, FILTERS, HIDDEN = 53, 13, 29, 6, 10, 11
PAIRS, CONTEXT, QUESTION, LONGEST = 3, 12, 7, 8


def masked_softmax(logits: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """A softmax over what the mask keeps."""
    mask = mask.to(logits)
    return F.softmax(mask * logits + (1 - mask) * -1e30, dim)


class CharCNN(nn.Module):
    """Characters of words -> the greatest answer of each filter over the characters of the word."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, LETTER)
        self.conv = nn.Conv1d(LETTER, FILTERS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        emb = self.embed(x).flatten(0, 1).transpose(1, 2)
        emb = F.relu(self.conv(emb)).unflatten(0, x.shape[:2])
        return emb.masked_fill((x == 0).unsqueeze(2), 0).max(dim=3)[0]


class HighwayEncoder(nn.Module):
    def __init__(self, num_layers: int, hidden_size: int):
        super().__init__()
        self.transforms = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        self.gates = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for gate, transform in zip(self.gates, self.transforms, strict=True):
            g = torch.sigmoid(gate(x))
            t = F.relu(transform(x))
            x = g * t + (1 - g) * x
        return x


class Embedding(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.embed, self.char_cnn = nn.Embedding(WORDS, WORD), CharCNN()
        self.proj = nn.Linear(WORD + FILTERS, hidden_size, bias=False)
        self.hwy = HighwayEncoder(2, hidden_size)

    def forward(self, w_idxs: Tensor, c_idxs: Tensor) -> Tensor:
        emb = torch.cat([self.embed(w_idxs), self.char_cnn(c_idxs)], dim=2)
        return self.hwy(self.proj(emb))


class RNNEncoder(nn.Module):
    """A bidirectional LSTM over packed sequences."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int):
        super().__init__()
        self.rnn = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class BiDAFAttention(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.c_weight = nn.Parameter(torch.randn(hidden_size, 1))
        self.q_weight = nn.Parameter(torch.randn(hidden_size, 1))
        self.cq_weight = nn.Parameter(torch.randn(1, 1, hidden_size))

    def forward(self, c: Tensor, q: Tensor, c_mask: Tensor, q_mask: Tensor) -> Tensor:
        s = self.get_similarity_matrix(c, q)
        s1 = masked_softmax(s, q_mask[:, None, :], dim=2)
        most = s.masked_fill(~q_mask[:, None, :], -1e30).max(dim=2)[0]
        s2 = masked_softmax(most, c_mask, dim=1)
        a = torch.bmm(s1, q)
        b = torch.bmm(s2[:, None, :], c).expand(-1, c.shape[1], -1)
        return torch.cat([c, a, c * a, c * b], dim=2)

    def get_similarity_matrix(self, c: Tensor, q: Tensor) -> Tensor:
        s0 = torch.matmul(c, self.c_weight)
        s1 = torch.matmul(q, self.q_weight).transpose(1, 2)
        return s0 + s1 + torch.matmul(c * self.cq_weight, q.transpose(1, 2))


class BiDAFOutput(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.att_linear_1 = nn.Linear(8 * hidden_size, 1, bias=False)
        self.mod_linear_1 = nn.Linear(2 * hidden_size, 1, bias=False)
        self.rnn = RNNEncoder(2 * hidden_size, hidden_size, 1)
        self.att_linear_2 = nn.Linear(8 * hidden_size, 1, bias=False)
        self.mod_linear_2 = nn.Linear(2 * hidden_size, 1, bias=False)

    def forward(self, att: Tensor, mod: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits_1 = self.att_linear_1(att) + self.mod_linear_1(mod)
        mod_2 = self.rnn(mod, mask.sum(-1))
        logits_2 = self.att_linear_2(att) + self.mod_linear_2(mod_2)
        return masked_softmax(logits_1.squeeze(2), mask), masked_softmax(logits_2.squeeze(2), mask)


class BiDAF(nn.Module):
    """Context and question -> the probabilities of each word to be the first and the last of the answer."""

    def __init__(self):
        super().__init__()
        self.emb = Embedding(HIDDEN)
        self.enc = RNNEncoder(HIDDEN, HIDDEN, 1)
        self.att = BiDAFAttention(2 * HIDDEN)
        self.mod = RNNEncoder(8 * HIDDEN, HIDDEN, 2)
        self.out = BiDAFOutput(HIDDEN)
        for name, weight in self.named_parameters():
            nn.init.normal_(weight, std=0.6 if "emb" in name and "hwy" not in name else 0.35)

    def forward(self, cw_idxs: Tensor, cc_idxs: Tensor, qw_idxs: Tensor, qc_idxs: Tensor) -> tuple:
        c_mask, q_mask = cw_idxs != 0, qw_idxs != 0
        c_enc = self.enc(self.emb(cw_idxs, cc_idxs), c_mask.sum(-1))
        q_enc = self.enc(self.emb(qw_idxs, qc_idxs), q_mask.sum(-1))
        att = self.att(c_enc, q_enc, c_mask, q_mask)
        mod = self.mod(att, c_mask.sum(-1))
        return self.out(att, mod, c_mask)


def spelled(words: Tensor) -> Tensor:
    """Each word's characters, two to eight of them and then padding; a word of padding has none."""
    place = torch.arange(LONGEST)
    letters = (words[..., None] * (2 * place + 3) + place**2) % (LETTERS - 1) + 1
    return letters * (place < 2 + words[..., None] % 7) * (words[..., None] > 0)


def passages() -> tuple[dict[str, Tensor], Tensor]:
    """Questions that quote the words before the answer; both sides are padded."""
    context, question = (torch.randint(1, WORDS, (PAIRS, size)) for size in (CONTEXT, QUESTION))
    long, asked = torch.tensor([9, CONTEXT - 1, 8]), torch.tensor([5, QUESTION - 1, 4])
    start = 2 + (torch.rand(PAIRS) * (long - 4)).long()
    for row in range(PAIRS):
        question[row, 1:3] = context[row, start[row] - 2 : start[row]]
    context = context * (torch.arange(CONTEXT) < long[:, None])
    question = question * (torch.arange(QUESTION) < asked[:, None])
    inputs = {"cw_idxs": context, "cc_idxs": spelled(context)}
    inputs |= {"qw_idxs": question, "qc_idxs": spelled(question)}
    return inputs, torch.stack([start, start + torch.randint(2, (PAIRS,))], 1)


def both_ends(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A quarter of the cross entropies of the start and the end."""
    found = [p.gather(1, y[:, None]).log().mean() for p, y in zip(outputs, target.T, strict=True)]
    return -sum(found) / 4
