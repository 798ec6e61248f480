"""Two ports of a small QuartzNet: a tree with the channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_ninth_quartz_net import QuartzNet, spelling, spoken
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_ninth_quartz_net", QuartzNet, spoken, spelling)


def alive(x: Tensor, lens: Tensor, axis: int) -> Tensor:
    """One at each frame before its length, zero after it; frames lie along the axis."""
    return (torch.arange(x.shape[axis], device=x.device) < lens[:, None]).to(x.dtype).unsqueeze(3 - axis)


class Taps(nn.Module):
    """A filter of each channel of [N, T, C], as a sum over shifted frames."""

    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.kernel = leaf(conv.weight[:, 0].T)
        self.step, self.rate = conv.stride[0], conv.dilation[0]

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, *[self.rate * (len(self.kernel) // 2)] * 2))
        shifts = (padded[:, i * self.rate :][:, : x.shape[1] : self.step] for i in range(len(self.kernel)))
        return sum(map(torch.mul, shifts, self.kernel))


class Dense(nn.Module):
    """A norm of a product of the frames, which may be filtered first."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        *depth, point, norm = layers
        self.taps, self.norm = nn.ModuleList(Taps(x.conv) for x in depth), Rows(norm)
        self.matrix = leaf(point.conv.weight[..., 0].T)

    def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        x = x * alive(x, lens, 1)
        for taps in self.taps:
            x, lens = taps(x), (lens + taps.step - 1) // taps.step
            x = x * alive(x, lens, 1)
        return self.norm(x @ self.matrix), lens


class Gate(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.window, self.blind = layer.pool.kernel_size[0], False
        self.inward, self.outward = leaf(layer.fc[0].weight.T), leaf(layer.fc[2].weight.T)

    def forward(self, x: Tensor) -> Tensor:
        means = x.unfold(1, self.window, 1).mean(-1)
        means = means.detach() if self.blind else means
        share = ((means @ self.inward).relu() @ self.outward).sigmoid()
        nearest = torch.arange(x.shape[1], device=x.device) * share.shape[1] // x.shape[1]
        return x * share[:, nearest]


class Stage(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        layers = [x for x in block.mconv if not isinstance(x, nn.ReLU)]
        size = 2 if len(layers) == 2 else 3
        self.body = nn.ModuleList(Dense(layers[i : i + size]) for i in range(0, len(layers) - 1, size))
        self.gates = nn.ModuleList(Gate(x) for x in layers[len(self.body) * size :])
        self.side = nn.ModuleList(Dense([*pane]) for pane in block.res)

    def forward(self, xs: tuple[Tensor, ...], lens: Tensor) -> tuple[Tensor, Tensor]:
        x, old = xs[-1], lens
        for i, part in enumerate(self.body):
            x, lens = part(x.relu() if i else x, lens)
        for gate in self.gates:
            x = gate(x)
        added = (part(pane, old)[0] for part, pane in zip(self.side, xs, strict=False))
        return sum(added, x).relu(), lens


class QuartzOfStages(Port):
    """Stages over [N, T, C], each of dense parts, side parts and gates."""

    def take(self, model: QuartzNet) -> None:
        self.stages, head = nn.ModuleList(map(Stage, model.encoder)), model.decoder.decoder_layers[0]
        self.letters, self.offset = leaf(head.weight[..., 0].T), leaf(head.bias)
        if self.fault == "quartz_net_older_pane_norm_of_default_eps":
            self.stages[2].side[0].norm.eps = 1e-5
        if self.fault == "quartz_net_last_norm_moves_its_statistics_slowly":
            self.stages[4].body[0].norm.rate = 0.01
        self.stages[1].gates[0].blind = self.fault == "quartz_net_squeeze_reads_frames_without_gradient"

    def scaled(self, x: Tensor, lens: Tensor) -> Tensor:
        valid, count = alive(x, lens, 1), lens[:, None, None]
        x = (x - (x * valid).sum(1, True) / count) * valid
        fewer = count if self.fault == "quartz_net_features_by_the_biased_deviation" else count - 1
        return x / (1e-5 + x.norm(dim=1, keepdim=True) / fewer.to(x.dtype).sqrt())

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        history, lens = (self.scaled(features.mT, lengths),), lengths
        for stage in self.stages:
            x, lens = stage(history, lens)
            history = (*history, x) if len(stage.side) else (x,)
        return (x @ self.letters + self.offset).log_softmax(2), lens


def sheet(conv: nn.Module, norm: nn.Module) -> Tensor:
    """A row for each channel: its weights, its scale and its shift."""
    return torch.cat([conv.conv.weight[..., 0], norm.weight[:, None], norm.bias[:, None]], 1)


# of each sheet in the order of use: filter size, stride and dilation
FILTERS = (5, 2, 1), (7, 1, 1), (7, 1, 1), None, (3, 1, 1), (3, 1, 1), None, None, (5, 1, 2), None


class PackedQuartz(Port):
    """Sheets of a product and its norm, all filters in one row, all statistics in two."""

    def take(self, model: QuartzNet) -> None:
        pairs, deep = [], []
        for block in model.encoder:
            for layers in (block.mconv, *block.res):
                at = [i for i, x in enumerate(layers) if isinstance(x, nn.BatchNorm1d)]
                pairs += [(layers[i - 1], layers[i]) for i in at]
                deep += [layers[i - 2].conv.weight.flatten() for i in at if i > 1]
        self.sheets = nn.ParameterList(leaf(sheet(*pair)) for pair in pairs)
        self.filters, gate = leaf(torch.cat(deep)), model.encoder[1].mconv[-1].fc
        self.gate = leaf(torch.stack([gate[0].weight, gate[2].weight.T]))
        head, norms = model.decoder.decoder_layers[0], [norm for _, norm in pairs]
        self.head = leaf(torch.cat([head.weight[..., 0], head.bias[:, None]], 1))
        self.register_buffer("means", torch.cat([x.running_mean for x in norms]))
        self.register_buffer("spreads", torch.cat([x.running_var for x in norms]))
        self.register_buffer("seen", norms[0].num_batches_tracked.clone())

    def normed(self, i: int, y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        start = sum(len(x) for x in self.sheets[:i])
        mean, spread = (x[start : start + len(scale)] for x in (self.means, self.spreads))
        if self.training or (self.fault == "quartz_net_first_norm_by_its_batch_in_evaluation" and i == 0):
            now, count, rate = y.mean((0, 2)), y[:, 0].numel(), 0.1 * self.training
            square = (y - now[:, None]).square().mean((0, 2))
            with torch.no_grad():
                mean += rate * (now - mean)
                spread += rate * (square * count / (count - 1) - spread)
            mean, spread = now, square
        gain = scale / (spread + 1e-3).sqrt()
        return y * gain[:, None] + (shift - mean * gain)[:, None]

    def unit(self, i: int, x: Tensor, lens: Tensor) -> Tensor:
        """The filter of the i-th sheet if it has one, its product and its norm."""
        if self.fault != "quartz_net_second_filter_of_the_dense_block_reads_padding" or i != 5:
            x = x * alive(x, lens, 2)
        if FILTERS[i]:
            size, stride, rate = FILTERS[i]
            rate = 1 if self.fault == "quartz_net_dilation_left_out" else rate
            start = sum((self.sheets[j].shape[1] - 2) * f[0] for j, f in enumerate(FILTERS[:i]) if f)
            kernel = self.filters[start : start + x.shape[1] * size].view(-1, 1, size)
            x = F.conv1d(x, kernel, None, stride, rate * (size // 2), rate, x.shape[1])
            x = x * alive(x, (lens - 1) // stride + 1, 2)
        weight, scale, shift = self.sheets[i].tensor_split((-2, -1), 1)
        return self.normed(i, weight @ x, scale[:, 0], shift[:, 0])

    def gated(self, x: Tensor) -> Tensor:
        means = sum(x[..., i : x.shape[2] - 4 + i] for i in range(5)) / 5
        return x * F.interpolate(self.gate[1].T @ (self.gate[0] @ means).relu(), x.shape[2]).sigmoid()

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += int(self.training)
        x, valid, count = features, alive(features, lengths, 2), lengths[:, None, None]
        x = (x - (x * valid).sum(2, True) / count) * valid
        x = x / ((x.square().sum(2, True) / (count - 1)).sqrt() + 1e-5)
        a, lens = self.unit(0, x, lengths).relu(), (lengths - 1) // 2 + 1
        b, side = self.gated(self.unit(2, self.unit(1, a, lens).relu(), lens)), self.unit(3, a, lens)
        b = b.relu() + side if self.fault == "quartz_net_first_residual_after_the_relu" else (b + side).relu()
        c = self.unit(5, self.unit(4, b, lens).relu(), lens) + self.unit(6, a, lens) + self.unit(7, b, lens)
        x = self.unit(9, self.unit(8, c.relu(), lens).relu(), lens).relu()
        return (self.head[:, :-1] @ x + self.head[:, -1:]).mT.log_softmax(2), lens


SLOPES = ("input gradient", "weight gradient")
right(task, "quartz_net_of_stages_with_channels_last", "a tree, shifted frames, products", QuartzOfStages)
right(task, "quartz_net_of_packed_weights", "sheets, one row of filters, one of statistics", PackedQuartz)
wrong(
    task,
    QuartzOfStages,
    quartz_net_features_by_the_biased_deviation=("a variance by another count", "preprocessor"),
    quartz_net_squeeze_reads_frames_without_gradient=("detach", "encoder.1.mconv.7", SLOPES),
    quartz_net_older_pane_norm_of_default_eps=("another eps", "encoder.2.res.0.1"),
    quartz_net_last_norm_moves_its_statistics_slowly=("another momentum", "encoder.4.mconv.1", "buffer"),
)
wrong(
    task,
    PackedQuartz,
    quartz_net_first_norm_by_its_batch_in_evaluation=("batch statistics", "encoder.0.mconv.2", "eval"),
    quartz_net_first_residual_after_the_relu=("another order", "encoder.1"),
    quartz_net_second_filter_of_the_dense_block_reads_padding=("a mask left out", "encoder.2.mconv.4"),
    quartz_net_dilation_left_out=("no dilation", "encoder.3.mconv.0.conv"),
)
