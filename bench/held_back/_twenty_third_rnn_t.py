"""A tiny RNN transducer: speech frames, the labels before, their joint lattice, and its loss by hand."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BLANK, LABELS, BANDS, ROWS = 0, 8, 10, 4


@dataclass
class RNNTConfig:
    in_feats: int = BANDS
    n_classes: int = LABELS + 1
    conv_channels: tuple[int, int] = (6, 8)
    enc_in: int = 16
    pre_rnn_hidden: int = 12
    post_rnn_hidden: int = 16
    post_rnn_layers: int = 2
    stack_time_factor: int = 2
    pred_embed: int = 12
    pred_hidden: int = 16
    joint_hidden: int = 20


def sequence_mask(lengths: Tensor, count: int) -> Tensor:
    """[N] -> [N, T], true where a row has a frame."""
    return torch.arange(count, device=lengths.device) < lengths[:, None]


class ConvSubsampling(nn.Module):
    """[N, T, F] -> [N, T / 2, D]; what the first convolution makes of the padding is masked."""

    def __init__(self, config: RNNTConfig):
        super().__init__()
        first, second = config.conv_channels
        self.conv1 = nn.Conv2d(1, first, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(first, eps=1e-3)
        self.conv2 = nn.Conv2d(first, second, 3, stride=(1, 2), padding=1)
        self.out = nn.Linear(second * ((config.in_feats + 3) // 4), config.enc_in)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm(self.conv1(x.unsqueeze(1))))
        lengths = (lengths + 1) // 2
        x = x * sequence_mask(lengths, x.shape[2])[:, None, :, None].to(x)
        x = F.relu(self.conv2(x))
        return self.out(x.transpose(1, 2).flatten(2)), lengths


class StackTime(nn.Module):
    """Frames side by side, ``factor`` in one; zeros fill the last."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        n, t, width = x.shape
        x = torch.cat([x, x.new_zeros(n, -t % self.factor, width)], dim=1)
        lengths = (lengths + self.factor - 1) // self.factor
        return x.reshape(n, -1, width * self.factor), lengths


class RNNTEncoder(nn.Module):
    def __init__(self, config: RNNTConfig):
        super().__init__()
        self.pre_encode = ConvSubsampling(config)
        self.pre_rnn = nn.LSTM(config.enc_in, config.pre_rnn_hidden, batch_first=True, bidirectional=True)
        self.stack_time = StackTime(config.stack_time_factor)
        stacked = 2 * config.pre_rnn_hidden * config.stack_time_factor
        self.norm = nn.LayerNorm(stacked)
        self.post_rnn = nn.LSTM(stacked, config.post_rnn_hidden, config.post_rnn_layers, batch_first=True)

    @staticmethod
    def run(rnn: nn.LSTM, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        x, length = self.pre_encode(audio_signal, length)
        x, length = self.stack_time(self.run(self.pre_rnn, x, length), length)
        return self.run(self.post_rnn, self.norm(x), length), length


class RNNTDecoder(nn.Module):
    """The prediction network: labels [N, U] -> [N, U + 1, D], the first after a blank."""

    def __init__(self, config: RNNTConfig):
        super().__init__()
        self.embed = nn.Embedding(config.n_classes, config.pred_embed)
        self.dec_rnn = nn.GRU(config.pred_embed, config.pred_hidden, batch_first=True)

    def forward(self, targets: Tensor) -> Tensor:
        return self.dec_rnn(self.embed(F.pad(targets, (1, 0), value=BLANK)))[0]


class RNNTJoint(nn.Module):
    """[N, T, D] and [N, U + 1, E] -> log-probabilities [N, T, U + 1, V]."""

    def __init__(self, config: RNNTConfig):
        super().__init__()
        self.enc = nn.Linear(config.post_rnn_hidden, config.joint_hidden)
        self.pred = nn.Linear(config.pred_hidden, config.joint_hidden)
        self.joint_net = nn.Sequential(nn.Tanh(), nn.Linear(config.joint_hidden, config.n_classes))

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        f, g = self.enc(encoder_outputs).unsqueeze(2), self.pred(decoder_outputs).unsqueeze(1)
        return self.joint_net(f + g).log_softmax(dim=-1)


class RNNTLoss(nn.Module):
    """The negative log-probability of the labels [N], summed over all ways through the lattice."""

    def __init__(self, blank: int = BLANK):
        super().__init__()
        self.blank = blank

    def forward(self, log_probs: Tensor, targets: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        n, frames, states, _ = log_probs.shape
        blanks = log_probs[..., self.blank]
        index = targets[:, None, :, None].expand(-1, frames, -1, -1)
        labels = log_probs[:, :, :-1].gather(3, index).squeeze(3)
        blank, label = ([row.unbind(1) for row in x.unbind(1)] for x in (blanks, labels))
        alpha: list[list[Tensor]] = []
        for t in range(frames):
            row: list[Tensor] = []
            for u in range(states):
                stays = alpha[t - 1][u] + blank[t - 1][u] if t else None
                emits = row[u - 1] + label[t][u - 1] if u else None
                if stays is not None and emits is not None:
                    row.append(torch.logaddexp(stays, emits))
                elif stays is not None or emits is not None:
                    row.append(stays if emits is None else emits)
                else:
                    row.append(log_probs.new_zeros(n))
            alpha.append(row)
        rows, last = torch.arange(n, device=lengths.device), lengths - 1
        lattice = torch.stack([torch.stack(row, dim=1) for row in alpha], dim=1)
        return -(lattice[rows, last, label_lengths] + blanks[rows, last, label_lengths])


class RNNTModel(nn.Module):
    """Frames [N, T, F] and labels [N, U], each with lengths -> the lattice, and the loss of each row."""

    def __init__(self, config: RNNTConfig | None = None):
        super().__init__()
        config = config or RNNTConfig()
        self.encoder, self.decoder = RNNTEncoder(config), RNNTDecoder(config)
        self.joint, self.loss = RNNTJoint(config), RNNTLoss()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, std=0.3)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=1.7 * module.weight[0].numel() ** -0.5)
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.LSTM | nn.GRU):
                for weight in module.parameters():
                    nn.init.uniform_(weight, -0.45, 0.45)
        nn.init.normal_(self.encoder.pre_encode.norm.running_mean, std=0.2)
        nn.init.uniform_(self.encoder.pre_encode.norm.running_var, 0.3, 0.9)

    def forward(self, signal: Tensor, length: Tensor, targets: Tensor, target_length: Tensor) -> dict:
        encoded, length = self.encoder(signal, length)
        log_probs = self.joint(encoded, self.decoder(targets))
        return {"log_probs": log_probs, "losses": self.loss(log_probs, targets, length, target_length)}


def utterances() -> tuple[tuple[Tensor, ...], Tensor]:
    """Each label sounds for some frames in two bands, one of which glides; the longest row has a frame
    that finds no partner in the time reduction."""
    bands, heard, spoken = torch.arange(BANDS), [], []
    for row in torch.randperm(ROWS).tolist():
        count = 4 if row == 0 else int(torch.randint(2, 4, ()))
        labels, pieces = torch.randint(1, LABELS + 1, (count,)), []
        for label in labels.tolist():
            size = 8 if row == 0 else int(torch.randint(5, 9, ()))
            time = (torch.arange(size) + 0.5)[:, None] / size
            tones = (label - 1 + 2 * time, torch.full_like(time, 3 * label % BANDS))
            loud = (torch.pi * time).sin()
            pieces.append(loud * sum(torch.exp(-((bands - tone) ** 2)) for tone in tones))
        sound = F.pad(torch.cat(pieces), (0, 0, 0, int(torch.randint(1, 3, ()))))
        heard.append(sound * 1.5 + 0.1 * torch.randn_like(sound))
        spoken.append(labels)
    lengths, counts = (torch.tensor([len(x) for x in xs]) for xs in (heard, spoken))
    sounds, targets = (nn.utils.rnn.pad_sequence(xs, batch_first=True) for xs in (heard, spoken))
    return (sounds, lengths, targets, counts), counts


def per_label(outputs: dict[str, Tensor], counts: Tensor) -> Tensor:
    """The mean loss of a label, made smaller so that training is calm."""
    return 0.2 * (outputs["losses"] / counts).mean()
