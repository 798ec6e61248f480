"""Two ports of a small CRNN: a tree whose cells step under a mask, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twentieth_crnn import CRNN, ctc, lines

task = few("twentieth_crnn", CRNN, lines, ctc)


class Stage(nn.Module):
    """[N, H, W, C]: windows, a norm that evaluation folds into them, the largest of four, a bend."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None, stride: int):
        super().__init__()
        self.kernel, self.bias = leaf(conv.weight.permute(2, 3, 1, 0)), leaf(conv.bias)
        self.edge, self.stride, self.slope, self.forgets = conv.padding[0], stride, 0.2, False
        self.norm = None if norm is None else Rows(norm)

    def windows(self, x: Tensor, kernel: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, *[self.edge] * 4)).unfold(1, len(kernel), 1).unfold(2, len(kernel), 1)
        return torch.einsum("nhwcij,ijco->nhwo", x, kernel)

    def largest(self, x: Tensor) -> Tensor:
        x = torch.maximum(x[:, ::2], x[:, 1::2])
        if self.stride == 2:
            return x.unflatten(2, (-1, 2)).amax(3)
        x = F.pad(x, (0, 0, 1, 1), value=-torch.inf)
        return torch.maximum(x[:, :, :-1], x[:, :, 1:])

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if norm is None or self.training:
            x = self.windows(x, self.kernel) + self.bias
            x = x if norm is None else norm(x)
        else:
            scale = norm.scale * (norm.spread + norm.eps).rsqrt()
            offset = -norm.center if self.forgets else self.bias - norm.center
            x = self.windows(x, self.kernel * scale) + (offset * scale + norm.shift)
        x = self.largest(x) if self.stride else x
        return torch.where(x > 0, x, self.slope * x)


class Way(nn.Module):
    """One direction [N, T, C] -> [N, T, D]; its state is nothing wherever the row is not."""

    def __init__(self, weights: list[Tensor], back: bool):
        super().__init__()
        self.back, self.reads_all, self.cut = back, False, False
        self.enter, self.keep, self.enter_b, self.keep_b = map(leaf, weights)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        given, found = F.linear(x, self.enter, self.enter_b), [None] * x.shape[1]
        h = c = x.new_zeros(len(x), self.keep.shape[1])
        for t in reversed(range(x.shape[1])) if self.back else range(x.shape[1]):
            c, mask = c.detach() if self.cut else c, 1 if self.reads_all else real[:, t]
            i, f, g, o = (given[:, t] + F.linear(h, self.keep, self.keep_b)).chunk(4, 1)
            c = (f.sigmoid() * c + i.sigmoid() * g.tanh()) * mask
            found[t] = h = o.sigmoid() * c.tanh() * mask
        return torch.stack(found, 1) * real


class Memory(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        weights = [*old.rnn.parameters()]
        self.ways = nn.ModuleList([Way(weights[:4], False), Way(weights[4:], True)])
        self.out, self.out_b = pile(old.embedding.weight.T.chunk(2)), leaf(old.embedding.bias)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return sum(way(x, real) @ out for way, out in zip(self.ways, self.out, strict=True)) + self.out_b


class LineReader(Port):
    """Stages with the channels last, then memories that step through time under a mask."""

    def take(self, model: CRNN) -> None:
        old, strides = dict(model.cnn.named_children()), (2, 1, 0, 1, 0)
        parts = ((old[f"conv{i}"], old.get(f"batchnorm{i}"), strides[i]) for i in range(5))
        self.stages = nn.Sequential(*(Stage(*each) for each in parts))
        self.memories = nn.ModuleList(map(Memory, model.rnn))
        if self.fault == "crnn_first_activation_with_the_usual_slope":
            self.stages[0].slope = 0.01
        self.stages[4].forgets = self.fault == "crnn_last_norm_folded_without_the_bias_of_its_convolution"
        for first, second in zip(self.memories[0].ways, self.memories[1].ways, strict=True):
            first.cut = self.fault == "crnn_first_memory_cuts_the_gradient_through_its_cell"
            second.reads_all = self.fault == "crnn_second_memory_reads_the_padding"

    def forward(self, image: Tensor, widths: Tensor) -> dict[str, Tensor]:
        columns = z = self.stages(image.movedim(1, 3))[:, 0]
        real = 2 * torch.arange(z.shape[1], device=z.device) <= widths[:, None]
        for memory in self.memories:
            z = memory(z, real.to(z)[:, :, None])
        z = z - z.logsumexp(2, keepdim=True)
        return {"log_probs": z.transpose(0, 1), "columns": columns.transpose(0, 1)}


class StackedReader(Port):
    """Matrices for the windows, and both directions at once, the second through rows turned round."""

    def take(self, model: CRNN) -> None:
        convs, norms = ([x for x in model.cnn if isinstance(x, y)] for y in (nn.Conv2d, nn.BatchNorm2d))
        self.maps = nn.ParameterList(leaf(x.weight.flatten(1)) for x in convs)
        self.offsets = nn.ParameterList(leaf(x.bias[:, None]) for x in convs)
        self.gains, self.shifts = pile(x.weight for x in norms), pile(x.bias for x in norms)
        self.rate, self.eps = norms[0].momentum, norms[0].eps
        kept = pile(torch.stack([x.running_mean, x.running_var]) for x in norms).data
        self.register_buffer("kept", kept)
        self.register_buffer("seen", torch.stack([x.num_batches_tracked for x in norms]))
        weights = [[*x.rnn.parameters()] for x in model.rnn]
        self.gates = pile(torch.stack([torch.cat(w[i : i + 2], 1).T for i in (0, 4)]) for w in weights)
        self.gates_b = pile(torch.stack([torch.stack(w[i : i + 2]) for i in (2, 6)]) for w in weights)
        self.ends = nn.ParameterList(leaf(x.embedding.weight.T) for x in model.rnn)
        self.ends_b = nn.ParameterList(leaf(x.embedding.bias) for x in model.rnn)

    def normed(self, i: int, x: Tensor) -> Tensor:
        mean, var = self.kept[i]
        if self.training:
            size, mean = x[:, 0].numel(), x.mean((0, 2, 3))
            fair = x.var((0, 2, 3))
            var = fair - fair / size
            with torch.no_grad():
                self.kept[i].lerp_(torch.stack([mean, fair]), self.rate)
                self.seen[i] += 1
            if self.fault == "crnn_first_norm_takes_its_statistics_for_constants" and i == 0:
                mean, var = mean.detach(), var.detach()
            if self.fault == "crnn_last_norm_divides_by_the_corrected_deviation" and i == 1:
                var = fair
        scale = self.gains[i] / (var + self.eps).sqrt()
        return x * scale[:, None, None] + (self.shifts[i] - mean * scale)[:, None, None]

    def look(self, x: Tensor) -> Tensor:
        for i, (weight, bias) in enumerate(zip(self.maps, self.offsets, strict=True)):
            size, edge = (2, 0) if i == 4 else (3, 1)
            cells = weight @ F.unfold(x, size, padding=edge) + bias
            x = cells.unflatten(2, (x.shape[2] + 2 * edge - size + 1, -1))
            x = self.normed(i // 2 - 1, x) if i in (2, 4) else x
            x = torch.maximum(x, 0.2 * x)
            if i in (0, 1, 3):
                x = F.pad(x, (1, 1), value=-torch.inf) if i else x
                x = x.unfold(2, 2, 2).unfold(3, 2, 1 if i else 2).amax((4, 5))
        return x[:, :, 0].permute(2, 0, 1)

    def read(self, i: int, x: Tensor, lengths: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        """Columns [T, N, C], a state to begin with -> [T, N, D] of both directions, the last state."""
        times, width = torch.arange(len(x), device=x.device)[:, None], x.shape[2]
        real = (times < lengths)[:, :, None]
        turned = torch.where(times < lengths, lengths - 1 - times, times)[:, :, None].expand(-1, -1, width)
        given = torch.stack([x, x.gather(0, turned)]) @ self.gates[i, :, None, :width]
        given, found, (h, c) = given + self.gates_b[i].sum(1)[:, None, None], [], state
        for t in range(len(x)):
            enter, keep, new, leave = torch.baddbmm(given[:, t], h, self.gates[i, :, width:]).chunk(4, 2)
            fresh = torch.sigmoid(keep) * c + torch.sigmoid(enter) * torch.tanh(new)
            c = torch.where(real[t], fresh, c)
            h = torch.where(real[t], torch.sigmoid(leave) * torch.tanh(c), h)
            found.append(h)
        ahead, behind = torch.stack(found, 1) * real
        both = torch.cat([ahead, behind.gather(0, turned)], 2)
        return both @ self.ends[i] + self.ends_b[i], (h, c)

    def forward(self, image: Tensor, widths: Tensor) -> dict[str, Tensor]:
        columns = z = self.look(image)
        lengths = widths // 2 + (self.fault != "crnn_lengths_leave_out_the_step_that_pooling_adds")
        nothing = (z.new_zeros(2, *z.shape[1:]),) * 2
        z, state = self.read(0, z, lengths, nothing)
        carries = self.fault == "crnn_second_memory_starts_where_the_first_ended"
        z, _ = self.read(1, z, lengths, state if carries else nothing)
        return {"log_probs": torch.log_softmax(z, 2), "columns": columns}


first, second = ("rnn.0.rnn", "rnn.0"), ("rnn.1.rnn", "rnn.1")
norms, slopes = ("cnn.batchnorm4", "cnn.conv4"), ("input gradient", "weight gradient")
right(task, "crnn_of_stages_and_masked_cells", "channels last, cells by hand under a mask", LineReader)
right(task, "crnn_of_stacks_and_turned_rows", "stacked weights, both directions at once", StackedReader)
wrong(
    task,
    LineReader,
    crnn_first_activation_with_the_usual_slope=("other slope", "cnn.relu0"),
    crnn_last_norm_folded_without_the_bias_of_its_convolution=("folded without a bias", norms, "eval"),
    crnn_first_memory_cuts_the_gradient_through_its_cell=("detach between steps", first, slopes),
    crnn_second_memory_reads_the_padding=("padding read", second),
)
wrong(
    task,
    StackedReader,
    crnn_first_norm_takes_its_statistics_for_constants=("detached statistics", "cnn.batchnorm2", slopes),
    crnn_last_norm_divides_by_the_corrected_deviation=("corrected variance", "cnn.batchnorm4"),
    crnn_lengths_leave_out_the_step_that_pooling_adds=("lengths one short", ""),
    crnn_second_memory_starts_where_the_first_ended=("state carried over", second),
)
