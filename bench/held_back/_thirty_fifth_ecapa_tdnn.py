"""A small ECAPA-TDNN with its classifier and additive angular margin, over utterances of relative lengths."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MELS, FRAMES, CHANNELS, MFA, ATTENTION, SQUEEZED, EMBEDDED = 10, 32, 24, 40, 9, 7, 14
SPEAKERS, SAMPLES, UTTERANCES, SCALE, BLOCKS = 5, 3, 4, 4, 3


def length_to_mask(length: Tensor, max_len: int) -> Tensor:
    return torch.arange(max_len, device=length.device) < length[:, None]


class Conv1d(nn.Module):
    """A convolution of [N, C, T] that keeps the length by reflection."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 1, dilation: int = 1):
        super().__init__()
        self.padding = dilation * (kernel_size - 1) // 2
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation)
        nn.init.normal_(self.conv.weight, std=1.2 / math.sqrt(in_channels * kernel_size))
        nn.init.normal_(self.conv.bias, 0.1, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.padding, self.padding), mode="reflect"))


class BatchNorm1d(nn.Module):
    def __init__(self, input_size: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(input_size)
        nn.init.normal_(self.norm.weight, 0.9, 0.2), nn.init.normal_(self.norm.bias, std=0.2)
        self.norm.running_mean.normal_(0.5, 0.2), self.norm.running_var.uniform_(0.5, 1.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class TDNNBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int):
        super().__init__()
        self.conv = Conv1d(in_channels, out_channels, kernel_size, dilation)
        self.activation, self.norm = nn.ReLU(), BatchNorm1d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.conv(x)))


class Res2NetBlock(nn.Module):
    def __init__(self, channels: int, scale: int, kernel_size: int, dilation: int):
        super().__init__()
        width, self.scale = channels // scale, scale
        self.blocks = nn.ModuleList(TDNNBlock(width, width, kernel_size, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        y = []
        for i, x_i in enumerate(torch.chunk(x, self.scale, dim=1)):
            if i == 0:
                y_i = x_i
            elif i == 1:
                y_i = self.blocks[i - 1](x_i)
            else:
                y_i = self.blocks[i - 1](x_i + y_i)
            y.append(y_i)
        return torch.cat(y, dim=1)


class SEBlock(nn.Module):
    def __init__(self, in_channels: int, se_channels: int, out_channels: int):
        super().__init__()
        self.conv1, self.relu = Conv1d(in_channels, se_channels), nn.ReLU()
        self.conv2, self.sigmoid = Conv1d(se_channels, out_channels), nn.Sigmoid()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = length_to_mask(lengths * x.shape[-1], x.shape[-1]).unsqueeze(1)
        s = (x * mask).sum(dim=2, keepdim=True) / mask.sum(dim=2, keepdim=True)
        return self.sigmoid(self.conv2(self.relu(self.conv1(s)))) * x


class SERes2NetBlock(nn.Module):
    def __init__(self, channels: int, kernel_size: int, dilation: int):
        super().__init__()
        self.tdnn1 = TDNNBlock(channels, channels, 1, 1)
        self.res2net_block = Res2NetBlock(channels, SCALE, kernel_size, dilation)
        self.tdnn2 = TDNNBlock(channels, channels, 1, 1)
        self.se_block = SEBlock(channels, SQUEEZED, channels)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        residual = x
        x = self.tdnn2(self.res2net_block(self.tdnn1(x)))
        return self.se_block(x, lengths) + residual


class AttentiveStatisticsPooling(nn.Module):
    def __init__(self, channels: int, attention_channels: int):
        super().__init__()
        self.eps = 1e-12
        self.tdnn = TDNNBlock(channels * 3, attention_channels, 1, 1)
        self.tanh, self.conv = nn.Tanh(), Conv1d(attention_channels, channels)

    def _compute_statistics(self, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        mean = (m * x).sum(2)
        return mean, torch.sqrt((m * (x - mean.unsqueeze(2)).pow(2)).sum(2).clamp(self.eps))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = length_to_mask(lengths * x.shape[-1], x.shape[-1]).unsqueeze(1)
        mean, std = self._compute_statistics(x, mask.to(x) / mask.sum(dim=2, keepdim=True))
        context = [each.unsqueeze(2).repeat(1, 1, x.shape[-1]) for each in (mean, std)]
        attn = self.conv(self.tanh(self.tdnn(torch.cat([x, *context], dim=1))))
        attn = F.softmax(attn.masked_fill(~mask, float("-inf")), dim=2)
        return torch.cat(self._compute_statistics(x, attn), dim=1).unsqueeze(2)


class ECAPATDNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([TDNNBlock(MELS, CHANNELS, 5, 1)])
        self.blocks.extend(SERes2NetBlock(CHANNELS, 3, 2 + i) for i in range(BLOCKS))
        self.mfa = TDNNBlock(CHANNELS * BLOCKS, MFA, 1, 1)
        self.asp, self.asp_bn = AttentiveStatisticsPooling(MFA, ATTENTION), BatchNorm1d(2 * MFA)
        self.fc = Conv1d(2 * MFA, EMBEDDED)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x, xl = self.blocks[0](x.transpose(1, 2)), []
        for layer in self.blocks[1:]:
            x = layer(x, lengths)
            xl.append(x)
        x = self.mfa(torch.cat(xl, dim=1))
        return self.fc(self.asp_bn(self.asp(x, lengths))).transpose(1, 2)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SPEAKERS, EMBEDDED))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x.squeeze(1)), F.normalize(self.weight))


class AdditiveAngularMargin(nn.Module):
    def __init__(self, margin: float = 0.2, scale: float = 10.0):
        super().__init__()
        self.scale, self.cos_m, self.sin_m = scale, math.cos(margin), math.sin(margin)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        cosine = outputs.clamp(-1 + 1e-7, 1 - 1e-7)
        phi = cosine * self.cos_m - torch.sqrt(1 - cosine.pow(2)) * self.sin_m
        return self.scale * (targets * phi + (1 - targets) * cosine)


class SpeakerBrain(nn.Module):
    """[N, U, T, F], U utterances of each speaker, their lengths and the speaker -> embeddings, logits."""

    def __init__(self):
        super().__init__()
        self.embedding_model, self.classifier = ECAPATDNN(), Classifier()
        self.loss_fn = AdditiveAngularMargin()

    def forward(self, feats: Tensor, lengths: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.embedding_model(feats.flatten(0, 1), lengths.flatten())
        targets = F.one_hot(speaker.repeat_interleave(feats.shape[1]), SPEAKERS).to(feats)
        logits = self.loss_fn(self.classifier(embeddings), targets)
        return tuple(x.view(*feats.shape[:2], -1) for x in (embeddings, logits))


def utterances() -> tuple[dict[str, Tensor], Tensor]:
    """Gliding tones at the height of each speaker, zero after the end."""
    speaker, lengths = (
        torch.randint(SPEAKERS, (SAMPLES,)),
        torch.randint(18, FRAMES + 1, (SAMPLES, UTTERANCES)),
    )
    lengths[:, 0] = FRAMES
    time, mel = torch.arange(FRAMES)[:, None], torch.arange(MELS)
    start, pace = 6 * torch.rand(2, SAMPLES, UTTERANCES, 1, 1)
    height = 2.0 + 1.3 * speaker[:, None, None, None] + torch.sin(start + (0.2 + 0.05 * pace) * time)
    feats = 2 * torch.exp(-((mel - height) ** 2) / 3) - 0.6 + 0.3 * torch.randn(*lengths.shape, FRAMES, MELS)
    feats = feats * (time < lengths[..., None, None])
    return {"feats": feats, "lengths": lengths / FRAMES, "speaker": speaker}, speaker


def speaker_loss(outputs: tuple[Tensor, Tensor], speaker: Tensor) -> Tensor:
    """A third of the cross entropy of the speakers, each of several utterances."""
    logits = outputs[1]
    return F.cross_entropy(logits.flatten(0, 1), speaker.repeat_interleave(logits.shape[1])) / 3
