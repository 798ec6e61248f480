"""Two ports of a small Deep Speech 2: a tree with the channels last, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_sixth_deep_speech import DeepSpeech, ctc, utterances
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import Gates, few

task = few("forty_sixth_deep_speech", DeepSpeech, utterances, ctc)


def inside(lengths: Tensor, size: int) -> Tensor:
    """[N, T], true where a frame is valid."""
    return torch.arange(size, device=lengths.device)[None] < lengths[:, None]


def turned(x: Tensor, lengths: Tensor) -> Tensor:
    """[N, T, C] with the valid frames backwards and the padding in its place."""
    time = torch.arange(x.shape[1], device=x.device)[None]
    back = torch.where(time < lengths[:, None], lengths[:, None] - 1 - time, time)
    return x.gather(1, back[..., None].expand_as(x))


class Levels(nn.Module):
    """Magnitudes [N, T, F] as logarithms, by each utterance's own moments."""

    padded = False

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid, count = inside(lengths, x.shape[1])[..., None], lengths * x.shape[2]
        x = torch.where(valid, (1 + x).log(), 0)
        rest = (x - (x.sum((1, 2)) / count)[:, None, None]) * valid
        count = x[0].numel() if self.padded else count
        return rest * (rest.square().sum((1, 2)) / (count - 1)).rsqrt()[:, None, None]


class Ear(nn.Module):
    """A convolution of [N, T, F, C] by windows, its norm and its clip, on the valid frames."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d):
        super().__init__()
        self.weight, self.bias = leaf(conv.weight.transpose(2, 3)), leaf(conv.bias)
        self.steps, self.edges = conv.stride[::-1], conv.padding[::-1]
        self.norm, self.through = Rows(norm), False

    def shorten(self, lengths: Tensor) -> Tensor:
        return (lengths + 2 * self.edges[0] - self.weight.shape[2] + self.steps[0]) // self.steps[0]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        (wide, high), (long, tall) = self.edges, self.weight.shape[2:]
        x = F.pad(x, (0, 0, high, high, wide, wide))
        x = x.unfold(1, long, self.steps[0]).unfold(2, tall, self.steps[1])
        x = torch.einsum("ntfcij,ocij->ntfo", x, self.weight) + self.bias
        valid = inside(lengths, x.shape[1])[..., None, None]
        x = self.norm(x * valid) * valid
        clipped = x.clamp(0, 20)
        return x + (clipped - x).detach() if self.through else clipped


class Both(nn.Module):
    """A norm, if any, and two recurrent cells, one of which reads the frames backwards."""

    def __init__(self, layer: nn.Module, channels: int = 0):
        super().__init__()
        w = dict(layer.rnn.named_parameters())
        if channels:
            names = [name for name in w if "weight_ih" in name]
            w |= {name: w[name].unflatten(1, (channels, -1)).transpose(1, 2).flatten(1) for name in names}
        self.norm = nn.Identity() if layer.batch_norm is None else Rows(layer.batch_norm.module)
        self.ahead, self.back, self.blind = Gates(w, end="_l0"), Gates(w, end="_l0_reverse"), False

    def run(self, cell: Gates, x: Tensor) -> Tensor:
        h, states = x.new_zeros(len(x), len(cell.u)), []
        for frame in x.unbind(1):
            states.append(h := cell(frame, h))
        return torch.stack(states, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.norm(x)
        span = torch.full_like(lengths, x.shape[1]) if self.blind else lengths
        back = turned(self.run(self.back, turned(x, span)), span)
        return (self.run(self.ahead, x) + back) * inside(lengths, x.shape[1])[..., None]


class SpeechOfEars(Port):
    """Ears, then layers that read both ways, then a product; channels last and the batch first."""

    def take(self, model: DeepSpeech) -> None:
        parts, rnns, (norm, last) = model.conv.seq_module, model.rnns, model.fc[0].module
        self.levels = Levels()
        self.ears = nn.ModuleList([Ear(*parts[:2]), Ear(*parts[3:5])])
        self.layers = nn.ModuleList([Both(rnns[0], len(parts[3].weight)), *map(Both, rnns[1:])])
        self.norm, self.out = Rows(norm), leaf(last.weight.T)
        self.levels.padded = self.fault == "deep_speech_spectrogram_deviation_counts_the_padding"
        self.ears[0].through = self.fault == "deep_speech_first_clip_passes_every_gradient"
        self.layers[1].blind = self.fault == "deep_speech_second_layer_reads_the_padding_backwards"
        self.norm.own = self.fault == "deep_speech_last_norm_by_the_batch_in_evaluation"

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.levels(x[:, 0].transpose(1, 2), lengths)[..., None]
        lengths = self.ears[1].shorten(self.ears[0].shorten(lengths))
        x = self.ears[1](self.ears[0](x, lengths), lengths).flatten(2)
        for layer in self.layers:
            x = layer(x, lengths)
        x = self.norm(x) @ self.out
        return x - x.logsumexp(-1, keepdim=True), lengths


class StackedSpeech(Port):
    """Norms of rows in a stack, both directions in one product of matrices, products of patches."""

    def take(self, model: DeepSpeech) -> None:
        parts, (last, out) = model.conv.seq_module, model.fc[0].module
        norms = [parts[1], parts[4], *(x.batch_norm.module for x in model.rnns[1:]), last]
        self.norms = nn.ParameterList(pile([x.weight, x.bias]) for x in norms)
        for i, norm in enumerate(norms):
            self.register_buffer(f"kept_{i}", torch.stack([norm.running_mean, norm.running_var]))
        kernels = (torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in parts[::3])
        self.kernels = nn.ParameterList(map(leaf, kernels))
        ways = ([[*x.rnn.parameters()][i : i + 4] for i in (0, 4)] for x in model.rnns)
        cells = ([torch.cat([a, b, c[:, None], d[:, None]], 1) for a, b, c, d in way] for way in ways)
        self.cells = nn.ParameterList(map(pile, cells))
        self.out = leaf(out.weight)

    def norm(self, i: int, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """Of the last axis; the statistics of the rows that are counted."""
        mean, square = self.get_buffer(f"kept_{i}")
        if self.training:
            rows = x.flatten(0, -2) if counted is None else x[counted]
            mean, square = rows.mean(0), rows.var(0, correction=0)
            moved = torch.stack([mean, square * len(rows) / (len(rows) - 1)])
            self.get_buffer(f"kept_{i}").lerp_(moved.detach(), 0.1)
        gain, shift = self.norms[i]
        gain = gain / (square + 1e-5).sqrt()
        return x * gain + (shift - mean * gain)

    def hear(self, i: int, x: Tensor, valid: Tensor, size: tuple, stride: tuple) -> Tensor:
        """[N, C, F, T] -> the same, by patches."""
        edges, high = (size[0] // 2, size[1] // 2), (x.shape[2] - 1) // stride[0] + 1
        y = self.kernels[i][:, :-1] @ F.unfold(x, size, padding=edges, stride=stride)
        y = (y + self.kernels[i][:, -1:]).unflatten(2, (high, -1)) * valid[:, None, None]
        y = self.norm(i, y.movedim(1, 3)).movedim(3, 1)
        if self.fault != "deep_speech_padding_not_masked_after_the_first_norm" or i:
            y = y * valid[:, None, None]
        return y.relu().clamp(max=20)

    def read(self, i: int, x: Tensor, lengths: Tensor, valid: Tensor) -> Tensor:
        """[N, T, C] -> [N, T, H], both directions at once."""
        size = self.cells[i].shape[1] // 3
        w, u, b, c = self.cells[i].split([x.shape[2], size, 1, 1], 2)
        ways = torch.stack([x, turned(x, lengths)]).flatten(1, 2)
        given = (ways @ w.mT + b.mT).unflatten(1, x.shape[:2])
        h, states = x.new_zeros(2, len(x), size), []
        swap = i == 0 and self.fault == "deep_speech_first_backward_update_gate_inverted"
        for t in range(x.shape[1]):
            if self.fault == "deep_speech_second_layer_state_cut_between_frames" and i == 1:
                h = h.detach()
            r, z, n = given[:, :, t].chunk(3, 2)
            hr, hz, hn = (h @ u.mT + c.mT).chunk(3, 2)
            n, z = torch.tanh(n + torch.sigmoid(r + hr) * hn), torch.sigmoid(z + hz)
            z = torch.stack([z[0], 1 - z[1]]) if swap else z
            states.append(h := z * h + (1 - z) * n)
        states = torch.stack(states, 2)
        return (states[0] + turned(states[1], lengths)) * valid[..., None]

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        loud = [one[..., :size].log1p() for one, size in zip(x, lengths.tolist(), strict=True)]
        x = torch.stack([F.pad((y - y.mean()) / y.std(), (0, x.shape[3] - y.shape[2])) for y in loud])
        lengths = (lengths + 1) // 2
        valid = inside(lengths, (x.shape[3] + 1) // 2)
        x = self.hear(1, self.hear(0, x, valid, (7, 5), (2, 2)), valid, (5, 3), (2, 1))
        x = self.norm(2, self.read(0, x.flatten(1, 2).mT, lengths, valid))
        x = self.read(1, x, lengths, valid)
        kept = valid if self.fault == "deep_speech_third_layer_norm_counts_valid_frames_only" else None
        x = self.read(2, self.norm(3, x, kept), lengths, valid)
        return (self.norm(4, x) @ self.out.T).log_softmax(2), lengths


SLOPES, NORM = ("input gradient", "weight gradient"), "rnns.2.batch_norm"
right(task, "deep_speech_of_ears_with_channels_last", "a tree, windows, cells by hand", SpeechOfEars)
right(task, "deep_speech_of_stacked_weights", "packed stacks, patches, both ways at once", StackedSpeech)
wrong(
    task,
    SpeechOfEars,
    deep_speech_spectrogram_deviation_counts_the_padding=("another count", "normalizer"),
    deep_speech_first_clip_passes_every_gradient=("a straight-through clip", "conv.seq_module.2", SLOPES),
    deep_speech_second_layer_reads_the_padding_backwards=("padding first", ("rnns.1", "rnns.1.rnn")),
    deep_speech_last_norm_by_the_batch_in_evaluation=("batch statistics", "fc.0.module.0", "eval"),
)
wrong(
    task,
    StackedSpeech,
    deep_speech_padding_not_masked_after_the_first_norm=("a mask left out", "conv"),
    deep_speech_first_backward_update_gate_inverted=("a gate inverted", "rnns.0.rnn"),
    deep_speech_second_layer_state_cut_between_frames=("detach", "rnns.1.rnn", SLOPES),
    deep_speech_third_layer_norm_counts_valid_frames_only=("other rows", (NORM, NORM + ".module")),
)
