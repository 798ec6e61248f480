"""A small BiLSTM-CRF tagger: words, their letters and their case, two bidirectional LSTMs, a linear chain."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WORDS, LETTERS, CASES, TAGS = 61, 29, 4, 7
SENTENCES, LONGEST, SPELLED = 5, 9, 8
WORD_WIDTH, CHAR_WIDTH, FILTERS, KERNELS, HIDDEN = 20, 10, (11, 6), (3, 5), (16, 13)


class CharCNN(nn.Module):
    """Convolutions of two widths over the letters of each word, and the maximum over its own letters."""

    def __init__(self):
        super().__init__()
        self.char_embeds = nn.Embedding(LETTERS, CHAR_WIDTH, padding_idx=0)
        nn.init.normal_(self.char_embeds.weight, std=0.7)
        sizes = zip(FILTERS, KERNELS, strict=True)
        self.convs = nn.ModuleList(nn.Conv1d(CHAR_WIDTH, n, size, padding=size // 2) for n, size in sizes)

    def forward(self, chars: Tensor) -> Tensor:
        flat = chars.flatten(0, 1)
        mask = flat.ne(0)
        x = self.char_embeds(flat).transpose(1, 2)
        found = [conv(x).masked_fill(~mask[:, None], -1e4).max(2).values for conv in self.convs]
        found = torch.tanh(torch.cat(found, 1)) * mask.any(1, keepdim=True)
        return found.unflatten(0, chars.shape[:2])


class BiLSTM(nn.Module):
    """One bidirectional layer over packed sentences."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.rnn = nn.LSTM(input_size, hidden_size, batch_first=True, bidirectional=True)
        for weight in self.rnn.parameters():
            nn.init.normal_(weight, std=0.4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = self.rnn(packed)
        return pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0]


class CRF(nn.Module):
    """A linear chain of tags: minus the log likelihood of each sentence, and the marginals of its tags."""

    def __init__(self, num_tags: int):
        super().__init__()
        self.start_transitions = nn.Parameter(0.5 * torch.randn(num_tags))
        self.end_transitions = nn.Parameter(0.5 * torch.randn(num_tags))
        self.transitions = nn.Parameter(0.5 * torch.randn(num_tags, num_tags))

    def compute_score(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        rows = torch.arange(tags.shape[1], device=tags.device)
        score = self.start_transitions[tags[0]] + emissions[0, rows, tags[0]]
        for i in range(1, len(tags)):
            step = self.transitions[tags[i - 1], tags[i]] + emissions[i, rows, tags[i]]
            score = score + step * mask[i]
        last_tags = tags[mask.long().sum(0) - 1, rows]
        return score + self.end_transitions[last_tags]

    def compute_alphas(self, emissions: Tensor, mask: Tensor) -> Tensor:
        alphas = [self.start_transitions + emissions[0]]
        for i in range(1, len(emissions)):
            step = alphas[-1][:, :, None] + self.transitions + emissions[i][:, None]
            alphas.append(torch.where(mask[i][:, None], torch.logsumexp(step, 1), alphas[-1]))
        return torch.stack(alphas)

    def compute_betas(self, emissions: Tensor, mask: Tensor) -> Tensor:
        betas = [self.end_transitions.expand_as(emissions[0])]
        for i in range(len(emissions) - 1, 0, -1):
            step = self.transitions + (emissions[i] + betas[0])[:, None]
            betas.insert(0, torch.where(mask[i][:, None], torch.logsumexp(step, 2), betas[0]))
        return torch.stack(betas)

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        emissions, tags, mask = emissions.transpose(0, 1), tags.transpose(0, 1), mask.transpose(0, 1)
        alphas, betas = self.compute_alphas(emissions, mask), self.compute_betas(emissions, mask)
        normalizer = torch.logsumexp(alphas[-1] + self.end_transitions, 1)
        marginals = torch.softmax(alphas + betas, 2) * mask[:, :, None]
        return normalizer - self.compute_score(emissions, tags, mask), marginals.transpose(0, 1)


class BiLSTMCRF(nn.Module):
    """Words, letters, cases and tags -> minus the log likelihood by sentence, and the tags' marginals."""

    def __init__(self):
        super().__init__()
        self.word_embeds = nn.Embedding(WORDS, WORD_WIDTH, padding_idx=0)
        nn.init.normal_(self.word_embeds.weight, std=0.7)
        self.char_cnn = CharCNN()
        sizes = (WORD_WIDTH + sum(FILTERS) + CASES, HIDDEN[0]), (2 * HIDDEN[0], HIDDEN[1])
        self.lstm = nn.ModuleList(BiLSTM(*size) for size in sizes)
        self.hidden2tag = nn.Linear(2 * HIDDEN[1], TAGS)
        self.crf = CRF(TAGS)

    def forward(self, words: Tensor, chars: Tensor, case: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        mask = words.ne(0)
        x = torch.cat([self.word_embeds(words), self.char_cnn(chars), case], 2)
        for layer in self.lstm:
            x = layer(x, mask.sum(1))
        return self.crf(self.hidden2tag(x), tags, mask)


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Chains of tags, of several lengths; the tag tells the word and the case, the word its letters."""
    lengths = 3 + torch.randperm(LONGEST - 2)[:SENTENCES]
    mask = torch.arange(LONGEST) < lengths[:, None]
    tags = (torch.randint(TAGS, (SENTENCES, 1)) + torch.randint(1, 4, mask.shape).cumsum(1)) % TAGS
    words = (1 + 8 * tags + torch.randint(12, mask.shape)) * mask
    place = torch.arange(SPELLED)
    chars = 1 + (words[:, :, None] * (place + 3) + 5 * place**2) % (LETTERS - 1)
    chars = chars * ((place < 2 + words[:, :, None] % (SPELLED - 1)) & mask[:, :, None])
    case = (torch.randn(*mask.shape, CASES) / 2 + torch.eye(CASES)[tags % CASES]) * mask[:, :, None]
    tags = tags * mask
    gold = torch.eye(TAGS)[tags] * mask[:, :, None]
    return {"words": words, "chars": chars, "case": case, "tags": tags}, gold


def likelihood_and_marginals(outputs: tuple[Tensor, Tensor], gold: Tensor) -> Tensor:
    """Minus the log likelihood of a sentence, by sixteen, and the squares of what the marginals miss."""
    nll, marginals = outputs
    return nll.mean() / 16 + (marginals - gold).square().sum(2).mean() / 4
