"""Right pairs out of torch's own modules, against hand-written ones."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bench.real_bugs import right_pair
from bench.real_bugs._losing import Smoothed, smoothed
from bench.tasks import _classes, _task, autoencoder, cnn, recurrent

pair = partial(right_pair, "https://github.com/pytorch/pytorch", f"torch {torch.__version__.split('+')[0]}")


class Encoding(nn.Module):
    """[N, 7, 16] and a padding mask -> [N, 4]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, activation="gelu", batch_first=True)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.fc(self.layer(x, src_key_padding_mask=padding)[:, 0])


def _padded() -> tuple[dict, Tensor]:
    padding = torch.arange(7) >= torch.randint(3, 8, (8, 1))
    return {"x": torch.randn(8, 7, 16), "padding": padding}, _classes(8, 4)


class Words(nn.Module):
    """Bags of words [N, 6] and signals [N, 5] -> [N, 4]."""

    def __init__(self):
        super().__init__()
        self.bag, self.bilinear = nn.EmbeddingBag(19, 7, mode="mean"), nn.Bilinear(7, 5, 6)
        self.fc = parametrizations.weight_norm(nn.Linear(6, 4))

    def forward(self, words: Tensor, signal: Tensor) -> Tensor:
        return self.fc(self.bilinear(self.bag(words), signal).tanh())


encoding = _task("encoding", Encoding, _padded)
words = _task(
    "words",
    Words,
    lambda: ({"words": torch.randint(19, (9, 6)), "signal": torch.randn(9, 5)}, _classes(9, 4)),
)


class EncoderLayer(nn.Module):
    def __init__(self, own: nn.TransformerEncoderLayer):
        super().__init__()
        attention = own.self_attn
        for name, weight, bias in zip(
            "qkv", attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True
        ):
            linear = nn.Linear(16, 16)
            linear.weight, linear.bias = (nn.Parameter(t.detach().clone()) for t in (weight, bias))
            setattr(self, name, linear)
        self.out, self.up, self.down = attention.out_proj, own.linear1, own.linear2
        self.first, self.second = own.norm1, own.norm2

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = (q @ k.mT / 2).masked_fill(src_key_padding_mask[:, None, None], -torch.inf)
        x = self.first(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return self.second(x + self.down(F.gelu(self.up(x))))


@pair(encoding)
def encoder_layer_by_hand(model: nn.Module) -> nn.Module:
    model.layer = EncoderLayer(model.layer)
    return model


@pair(words)
def bag_as_a_product_of_counts(model: nn.Module) -> nn.Module:
    class Counts(nn.Module):
        def __init__(self, bag: nn.EmbeddingBag):
            super().__init__()
            self.weight = bag.weight

        def forward(self, x: Tensor) -> Tensor:
            return F.one_hot(x, len(self.weight)).to(self.weight).mean(1) @ self.weight

    model.bag = Counts(model.bag)
    return model


@pair(words)
def bilinear_by_einsum(model: nn.Module) -> nn.Module:
    class Einsum(nn.Module):
        def __init__(self, own: nn.Bilinear):
            super().__init__()
            self.weight, self.bias = own.weight, own.bias

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.einsum("ni,oij,nj->no", x, self.weight, y) + self.bias

    model.bilinear = Einsum(model.bilinear)
    return model


@pair(words)
def weight_norm_by_hand(model: nn.Module) -> nn.Module:
    class Normed(nn.Module):
        def __init__(self, own: nn.Module):
            super().__init__()
            stored = own.parametrizations.weight
            self.g, self.v = (nn.Parameter(t.detach().clone()) for t in (stored.original0, stored.original1))
            self.bias = own.bias

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.g * self.v / self.v.square().sum(1, keepdim=True).sqrt(), self.bias)

    model.fc = Normed(model.fc)
    return model


@pair(recurrent)
def lstm_by_cells(model: nn.Module) -> nn.Module:
    class Cells(nn.Module):
        def __init__(self, lstm: nn.LSTM):
            super().__init__()
            self.cell = nn.LSTMCell(6, 14)
            self.cell.load_state_dict({n.removesuffix("_l0"): t for n, t in lstm.state_dict().items()})

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            state, states = None, []
            for now in x.unbind(1):
                state = self.cell(now, state)
                states.append(state[0])
            return torch.stack(states, 1), None

    model.lstm = Cells(model.lstm)
    return model


@pair(recurrent)
def gru_cell_as_a_gru(model: nn.Module) -> nn.Module:
    class OneStep(nn.Module):
        def __init__(self, cell: nn.GRUCell):
            super().__init__()
            self.gru = nn.GRU(14, 10)
            self.gru.load_state_dict({f"{n}_l0": t for n, t in cell.state_dict().items()})

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.gru(x[None], h[None])[1][0]

    model.cell = OneStep(model.cell)
    return model


@pair(cnn)
def batch_norm_by_its_moments(model: nn.Module) -> nn.Module:
    class Moments(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                scale = self.weight * (self.running_var + self.eps).rsqrt()
                return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]
            var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            with torch.no_grad():
                count = x.numel() // x.shape[1]
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * count / (count - 1), self.momentum)
            normed = (x - mean[:, None, None]) / (var + self.eps).sqrt()[:, None, None]
            return normed * self.weight[:, None, None] + self.bias[:, None, None]

    model.bn1.__class__ = model.bn2.__class__ = Moments
    return model


@pair(cnn)
def group_norm_as_layer_norms(model: nn.Module) -> nn.Module:
    class Groups(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            groups = x.unflatten(1, (self.num_groups, -1))
            y = F.layer_norm(groups, groups.shape[2:], eps=self.eps).flatten(1, 2)
            return y * self.weight[:, None, None] + self.bias[:, None, None]

    model.norm3.__class__ = Groups
    return model


@pair(autoencoder)
def transposed_conv_by_zeros_between(model: nn.Module) -> nn.Module:
    class Zeros(nn.ConvTranspose2d):
        def forward(self, x: Tensor, output_size=None) -> Tensor:
            n, c, h, w = x.shape
            apart = x.new_zeros(n, c, 2 * h - 1, 2 * w - 1)
            apart[:, :, ::2, ::2] = x
            return F.conv2d(apart, self.weight.flip(2, 3).transpose(0, 1), self.bias, padding=2)

    model.up1.__class__ = model.up2.__class__ = Zeros
    return model


@pair(smoothed)
def label_smoothing_by_hand(model: nn.Module) -> nn.Module:
    class ByHand(Smoothed):
        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            logs, labels = logits.log_softmax(-1).flatten(0, 1), labels.flatten()
            logs, labels = logs[labels >= 0], labels[labels >= 0]
            target = 0.9 * F.one_hot(labels, logs.shape[1]) + 0.1 / logs.shape[1]
            return -(target.to(logs) * logs).sum(1).mean()

    model.criterion = ByHand()
    return model
