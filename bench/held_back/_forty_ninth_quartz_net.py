"""A small QuartzNet: masked separable convolutions in residual blocks, trained by CTC."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, FRAMES, UTTERANCES, LETTERS, SPELLED = 9, 37, 4, 12, 6


class PerFeatureNormalizer(nn.Module):
    """[N, F, T] less its mean over the valid frames, by its deviation; zero after each length."""

    def forward(self, x: Tensor, lens: Tensor) -> Tensor:
        valid = (torch.arange(x.shape[2], device=x.device) < lens[:, None])[:, None]
        count = lens[:, None, None]
        mean = x.masked_fill(~valid, 0).sum(2, keepdim=True) / count
        centered = (x - mean).masked_fill(~valid, 0)
        std = (centered.square().sum(2, keepdim=True) / (count - 1)).sqrt() + 1e-5
        return centered / std


class MaskedConv1d(nn.Module):
    def __init__(self, inplanes: int, planes: int, kernel: int, stride=1, dilation=1, groups=1):
        super().__init__()
        padding = dilation * (kernel - 1) // 2
        self.conv = nn.Conv1d(inplanes, planes, kernel, stride, padding, dilation, groups, bias=False)

    def get_seq_len(self, lens: Tensor) -> Tensor:
        (kernel,), (stride,) = self.conv.kernel_size, self.conv.stride
        (padding,), (dilation,) = self.conv.padding, self.conv.dilation
        return (lens + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1

    def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(x.shape[2], device=x.device) >= lens[:, None]
        return self.conv(x.masked_fill(mask[:, None], 0)), self.get_seq_len(lens)


class SqueezeExcite(nn.Module):
    """Gates from the mean of a window of frames, stretched to all frames."""

    def __init__(self, channels: int, reduction_ratio: int = 4, context_window: int = 5):
        super().__init__()
        self.pool, hidden = nn.AvgPool1d(context_window, stride=1), channels // reduction_ratio
        up = nn.Linear(hidden, channels, bias=False)
        self.fc = nn.Sequential(nn.Linear(channels, hidden, bias=False), nn.ReLU(), up)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.pool(x).transpose(1, 2)).transpose(1, 2)
        return x * torch.sigmoid(F.interpolate(y, size=x.shape[2], mode="nearest"))


class JasperBlock(nn.Module):
    """Repeats of convolution and norm; each pane's 1x1 convolution is added before the last relu."""

    def __init__(
        self,
        inplanes: int,
        planes: int,
        kernel: int,
        repeat: int = 1,
        stride: int = 1,
        dilation: int = 1,
        separable: bool = True,
        panes: tuple[int, ...] = (),
        se: bool = False,
    ):
        super().__init__()
        self.mconv = nn.ModuleList()
        for i in range(repeat):
            if i:
                self.mconv.append(nn.ReLU())
            self.mconv.extend(self.conv_bn(inplanes, planes, kernel, stride, dilation, separable))
            inplanes = planes
        if se:
            self.mconv.append(SqueezeExcite(planes))
        self.res = nn.ModuleList(nn.ModuleList(self.conv_bn(pane, planes, 1, 1, 1, False)) for pane in panes)
        self.mout = nn.Sequential(nn.ReLU())

    @staticmethod
    def conv_bn(inplanes: int, planes: int, kernel: int, stride: int, dilation: int, separable: bool):
        norm = nn.BatchNorm1d(planes, eps=1e-3, momentum=0.1)
        if not separable:
            return [MaskedConv1d(inplanes, planes, kernel, stride, dilation), norm]
        depth = MaskedConv1d(inplanes, inplanes, kernel, stride, dilation, groups=inplanes)
        return [depth, MaskedConv1d(inplanes, planes, 1), norm]

    @staticmethod
    def run(layers: nn.ModuleList, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        for layer in layers:
            if isinstance(layer, MaskedConv1d):
                x, lens = layer(x, lens)
            else:
                x = layer(x)
        return x, lens

    def forward(self, xs: list[Tensor], lens: Tensor) -> tuple[list[Tensor], Tensor]:
        out, after = self.run(self.mconv, xs[-1], lens)
        for x, layers in zip(xs, self.res, strict=False):
            out = out + self.run(layers, x, lens)[0]
        out = self.mout(out)
        return ([*xs, out] if len(self.res) else [out]), after


class ConvASRDecoder(nn.Module):
    def __init__(self, feat_in: int):
        super().__init__()
        self.decoder_layers = nn.Sequential(nn.Conv1d(feat_in, LETTERS + 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.decoder_layers(x).transpose(1, 2), dim=-1)


class QuartzNet(nn.Module):
    """Log features [N, F, T] and lengths -> log probabilities [N, T / 2, letters + blank] and lengths."""

    def __init__(self):
        super().__init__()
        self.preprocessor = PerFeatureNormalizer()
        self.encoder = nn.ModuleList(
            [
                JasperBlock(FEATURES, 15, 5, stride=2),
                JasperBlock(15, 28, 7, repeat=2, panes=(15,), se=True),
                JasperBlock(28, 40, 3, repeat=2, panes=(15, 28)),
                JasperBlock(40, 46, 5, dilation=2),
                JasperBlock(46, 54, 1, separable=False),
            ]
        )
        self.decoder = ConvASRDecoder(54)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                for near_one in (module.weight, module.running_var):
                    nn.init.uniform_(near_one, 0.6, 1.4)
                for near_zero in (module.bias, module.running_mean):
                    nn.init.normal_(near_zero, std=0.2)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        xs, lens = [self.preprocessor(features, lengths)], lengths
        for block in self.encoder:
            xs, lens = block(xs, lens)
        return self.decoder(xs[-1]), lens


def spoken() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Each letter sounds in its own bands for some frames; what is padded is -1 among the letters."""
    lengths = torch.randint(23, FRAMES, (UTTERANCES,))
    lengths[1] = FRAMES
    letters = torch.randint(LETTERS, (UTTERANCES, SPELLED))
    said = torch.randint(3, SPELLED + 1, (UTTERANCES,))
    now = (torch.arange(FRAMES) * said[:, None] // lengths[:, None]).clamp(max=SPELLED - 1)
    pitch = letters.gather(1, now)[:, None].float()
    sound = 2 * torch.cos(pitch * (1 + torch.arange(FEATURES))[:, None] * 0.5) - 4
    features = sound + 0.5 * torch.randn(UTTERANCES, FEATURES, FRAMES)
    features = features.masked_fill(torch.arange(FRAMES) >= lengths[:, None, None], 0)
    return (features, lengths), letters.masked_fill(torch.arange(SPELLED) >= said[:, None], -1)


def spelling(outputs: tuple[Tensor, Tensor], letters: Tensor) -> Tensor:
    (logs, lens), said = outputs, (letters >= 0).sum(1)
    text = letters.clamp(min=0)
    losses = F.ctc_loss(logs.transpose(0, 1), text, lens, said, LETTERS, "none", zero_infinity=True)
    return (losses / said).mean() / 10
