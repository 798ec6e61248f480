"""A small Deep Speech 2: masked convolutions, bidirectional GRU layers between batch norms, and CTC."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

FREQUENCIES, FRAMES, SPEAKERS = 18, 26, 5
CHANNELS, HIDDEN, LAYERS, LABELS = (6, 7), 20, 3, 9


def drawn(module: nn.Module, gain: float = 1.0) -> nn.Module:
    """The module with the weights, biases and statistics of its norms drawn at random."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(norm.weight, gain, 0.2 * gain), nn.init.normal_(norm.bias, 0.2, 0.3)
            nn.init.normal_(norm.running_mean, 0.0, 0.2), nn.init.uniform_(norm.running_var, 0.3, 0.9)
    return module


def beyond(lengths: Tensor, size: int) -> Tensor:
    """[N, T], true where a frame is padding."""
    return torch.arange(size, device=lengths.device) >= lengths[:, None]


class SpectrogramNorm(nn.Module):
    """Log magnitudes [N, 1, F, T] by the mean and deviation of each utterance's valid frames."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        spect = torch.log1p(x)
        valid = ~beyond(lengths, x.size(3))[:, None, None, :]
        count = (lengths * x.size(2))[:, None, None, None]
        mean = (spect * valid).sum((1, 2, 3), keepdim=True) / count
        centered = (spect - mean) * valid
        std = (centered.pow(2).sum((1, 2, 3), keepdim=True) / (count - 1)).sqrt()
        return centered / std


class SequenceWise(nn.Module):
    """Collapses T x N x H to (T * N) x H for the module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        t, n = x.size(0), x.size(1)
        return self.module(x.reshape(t * n, -1)).view(t, n, -1)


class MaskConv(nn.Module):
    """Sets the padding to zero after each module of the sequence."""

    def __init__(self, seq_module: nn.Sequential):
        super().__init__()
        self.seq_module = seq_module

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        for module in self.seq_module:
            x = module(x)
            x = x.masked_fill(beyond(lengths, x.size(3))[:, None, None, :], 0)
        return x, lengths


class BatchRNN(nn.Module):
    """A batch norm, if any, and a bidirectional GRU over the valid frames whose directions are summed."""

    def __init__(self, input_size: int, hidden_size: int, batch_norm: bool = True):
        super().__init__()
        self.batch_norm = drawn(SequenceWise(nn.BatchNorm1d(input_size))) if batch_norm else None
        self.rnn = nn.GRU(input_size, hidden_size, bidirectional=True)

    def forward(self, x: Tensor, output_lengths: Tensor) -> Tensor:
        size = x.size(0)
        if self.batch_norm is not None:
            x = self.batch_norm(x)
        x = pack_padded_sequence(x, output_lengths.cpu(), enforce_sorted=False)
        x, _ = self.rnn(x)
        x, _ = pad_packed_sequence(x, total_length=size)
        return x.view(x.size(0), x.size(1), 2, -1).sum(2)


class DeepSpeech(nn.Module):
    """Spectrograms [N, 1, F, T] and their lengths -> log probabilities [N, T', labels], lengths."""

    def __init__(self):
        super().__init__()
        one, two = CHANNELS
        self.normalizer = SpectrogramNorm()
        self.conv = MaskConv(
            nn.Sequential(
                nn.Conv2d(1, one, (7, 5), stride=(2, 2), padding=(3, 2)),
                drawn(nn.BatchNorm2d(one), 2.0),
                nn.Hardtanh(0, 20),
                nn.Conv2d(one, two, (5, 3), stride=(2, 1), padding=(2, 1)),
                drawn(nn.BatchNorm2d(two)),
                nn.Hardtanh(0, 20),
            )
        )
        size = FREQUENCIES
        for conv in (self.conv.seq_module[0], self.conv.seq_module[3]):
            size = (size + 2 * conv.padding[0] - conv.kernel_size[0]) // conv.stride[0] + 1
        self.rnns = nn.Sequential(
            BatchRNN(two * size, HIDDEN, batch_norm=False),
            *(BatchRNN(HIDDEN, HIDDEN) for _ in range(LAYERS - 1)),
        )
        last = nn.Sequential(drawn(nn.BatchNorm1d(HIDDEN)), nn.Linear(HIDDEN, LABELS, bias=False))
        self.fc = nn.Sequential(SequenceWise(last))

    def get_seq_lens(self, lengths: Tensor) -> Tensor:
        for m in self.conv.modules():
            if isinstance(m, nn.Conv2d):
                span = m.dilation[1] * (m.kernel_size[1] - 1) + 1
                lengths = (lengths + 2 * m.padding[1] - span) // m.stride[1] + 1
        return lengths

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        output_lengths = self.get_seq_lens(lengths)
        x, _ = self.conv(self.normalizer(x, lengths), output_lengths)
        x = x.view(x.size(0), x.size(1) * x.size(2), x.size(3))
        x = x.transpose(1, 2).transpose(0, 1).contiguous()
        for rnn in self.rnns:
            x = rnn(x, output_lengths)
        x = self.fc(x).transpose(0, 1)
        return F.log_softmax(x, dim=-1), output_lengths


def utterances() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Magnitudes in which each label is a tone for a while, longest first, padded; labels, their counts."""
    shorter = torch.randint(FRAMES // 2, FRAMES, (SPEAKERS - 1,)).sort(descending=True).values
    lengths = torch.cat([torch.tensor([FRAMES]), shorter])
    counts = (lengths // 6).clamp(min=2)
    labels = torch.randint(1, LABELS, (SPEAKERS, FRAMES // 6))
    turn = (torch.arange(FRAMES) * counts[:, None] // lengths[:, None]).clamp(max=labels.shape[1] - 1)
    tone = 2.0 * labels.gather(1, turn)[:, None, :]
    bins = torch.arange(FREQUENCIES)[:, None]
    loud = (0.5 + 2 * torch.rand(SPEAKERS, 1, 1)) * (3 * torch.exp(-(((bins - tone) / 1.5) ** 2)) + 0.3)
    x = loud * torch.exp(0.3 * torch.randn(SPEAKERS, FREQUENCIES, FRAMES))
    x = x.masked_fill(beyond(lengths, FRAMES)[:, None], 0)[:, None]
    labels = labels.masked_fill(beyond(counts, labels.shape[1]), 0)
    return {"x": x, "lengths": lengths}, (labels, counts)


def ctc(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The CTC loss by label, by four."""
    log_probs, lengths = outputs
    return F.ctc_loss(log_probs.transpose(0, 1), target[0], lengths, target[1], zero_infinity=True) / 4
