"""Optical flow: a correlation of features, a first flow, the second features moved by it, a better flow."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_vision import SAME, right, tapped
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.tasks import _task


class Correlate(nn.Module):
    """[N, C, H, W] twice -> [N, 25, H, W]: the mean product for each displacement of up to two pixels."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        high, wide = a.shape[2:]
        b = F.pad(b, (2, 2, 2, 2))
        shifted = [b[:, :, i : i + high, j : j + wide] for i in range(5) for j in range(5)]
        return torch.stack([(a * other).mean(1) for other in shifted], 1)


class Warp(nn.Module):
    """What lies at x + flow(x), between pixels by bilinear interpolation, zero outside."""

    def forward(self, x: Tensor, flow: Tensor) -> Tensor:
        high, wide = x.shape[2:]
        rows, columns = torch.arange(high, device=x.device), torch.arange(wide, device=x.device)
        across = 2 * (columns + flow[:, 0]) / (wide - 1) - 1
        down = 2 * (rows[:, None] + flow[:, 1]) / (high - 1) - 1
        return F.grid_sample(x, torch.stack([across, down], 3), padding_mode="zeros", align_corners=True)


def decoder(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, 16, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(16, 2, 3, padding=1)
    )


class Flow(nn.Module):
    """Two images [N, 3, 14, 14] -> the flow [N, 2, 14, 14] and its first draft at half the size."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(8, 12, 3, padding=1), nn.LeakyReLU(0.1)
        )
        self.correlate, self.warp = Correlate(), Warp()
        self.draft, self.refine = decoder(25 + 12), decoder(25 + 12 + 2)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.encode(first), self.encode(second)
        draft = self.draft(torch.cat([self.correlate(first, second), first], 1))
        moved = self.warp(second, draft)
        flow = draft + self.refine(torch.cat([self.correlate(first, moved), first, draft], 1))
        return 2 * F.interpolate(flow, scale_factor=2, mode="bilinear", align_corners=False), draft


def _moved() -> tuple[dict[str, Tensor], Tensor]:
    """Smooth images and what they are after a whole number of pixels."""
    first = 3 * F.avg_pool2d(torch.randn(6, 3, 22, 22), 5, 1)
    shifts = torch.randint(-2, 3, (6, 2))
    second = [image.roll((int(y), int(x)), (1, 2)) for image, (x, y) in zip(first, shifts, strict=True)]
    images = {"first": first[..., 2:16, 2:16], "second": torch.stack(second)[..., 2:16, 2:16]}
    return images, shifts[..., None, None].float().expand(-1, -1, 14, 14)


def _error(outputs: tuple | dict, targets: Tensor) -> Tensor:
    flow, draft = outputs.values() if isinstance(outputs, dict) else outputs
    short = targets[..., ::2, ::2] / 2
    return 0.2 * F.mse_loss(flow, targets) + 0.2 * F.mse_loss(draft, short)


flow = _task("fifth_flow", Flow, _moved, _error)


class PixelFlow(Port):
    """Both images in one batch of [N, H, W, C]; features moved by indices."""

    def take(self, model: Flow) -> None:
        convs = [*model.encode, *model.draft, *model.refine]
        convs = [conv for conv in convs if isinstance(conv, nn.Conv2d)]
        self.kernels = nn.ParameterList(leaf(conv.weight.movedim(1, -1)) for conv in convs)
        self.biases = nn.ParameterList(leaf(conv.bias) for conv in convs)

    def conv(self, index: int, x: Tensor, stride: int = 1) -> Tensor:
        return tapped(x, self.kernels[index].movedim(-1, 1), stride) + self.biases[index]

    def volume(self, a: Tensor, b: Tensor) -> Tensor:
        windows = F.pad(b, (0, 0, 2, 2, 2, 2)).unfold(1, 5, 1).unfold(2, 5, 1)
        return torch.einsum("nhwc,nhwcij->nhwij", a, windows).flatten(3) / a.shape[3]

    def moved(self, x: Tensor, flow: Tensor) -> Tensor:
        if self.fault == "moved_by_a_flow_that_is_held":
            flow = flow.detach()
        count, high, wide, _ = x.shape
        rows = torch.arange(high, device=x.device)[:, None] + flow[..., 1]
        columns = torch.arange(wide, device=x.device) + flow[..., 0]
        if self.fault == "edges_of_the_grid_at_outer_borders":
            rows, columns = rows * high / (high - 1) - 0.5, columns * wide / (wide - 1) - 0.5
        framed, total = F.pad(x, (0, 0, 1, 1, 1, 1)), 0
        batch = torch.arange(count, device=x.device)[:, None, None]
        top, left = rows.detach().floor(), columns.detach().floor()
        for i in (0, 1):
            for j in (0, 1):
                weight = (1 - (rows - top - i).abs()) * (1 - (columns - left - j).abs())
                row = (top + i + 1).clamp(0, high + 1).long()
                column = (left + j + 1).clamp(0, wide + 1).long()
                total = total + weight[..., None] * framed[batch, row, column]
        return total

    def decode(self, start: int, *maps: Tensor) -> Tensor:
        x = self.conv(start, torch.cat(maps, -1))
        return self.conv(start + 1, torch.maximum(x, 0.1 * x))

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        x = F.leaky_relu(self.conv(0, torch.cat([first, second]).movedim(1, -1), 2), 0.1)
        a, b = F.leaky_relu(self.conv(1, x), 0.1).chunk(2)
        draft = self.decode(2, self.volume(a, b), a)
        flow = draft + self.decode(4, self.volume(a, self.moved(b, draft)), a, draft)
        flow, draft = flow.permute(0, 3, 1, 2), draft.permute(0, 3, 1, 2)
        size = [2 * length for length in flow.shape[2:]]
        return {"flow": F.interpolate(2 * flow, size, mode="bilinear"), "draft": draft}


right(flow, "flow_with_both_images_in_one_batch", "port to channels last", PixelFlow)
wrong(
    flow,
    PixelFlow,
    edges_of_the_grid_at_outer_borders=("corner alignment", "warp"),
    moved_by_a_flow_that_is_held=("a detach too many", "warp", "input gradient"),
)


class Products(torch.autograd.Function):
    """The correlation with a backward pass of its own; ``sign`` is that of the way back."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, sign: int) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.sign = sign
        return torch.stack([(a * part).mean(1) for part in shifts(b)], 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        a, b = ctx.saved_tensors
        grad = grad / a.shape[1]
        pairs = zip(grad.unbind(1), shifts(b), strict=True)
        to_a = sum(part[:, None] * other for part, other in pairs)
        back = [shifts(part[:, None] * a, ctx.sign)[index] for index, part in enumerate(grad.unbind(1))]
        return to_a, sum(back), None


def shifts(x: Tensor, sign: int = 1) -> list[Tensor]:
    """The map at each of the 25 displacements, or at their opposites."""
    high, wide = x.shape[2:]
    x = F.pad(x, (2, 2, 2, 2))
    places = [(sign * (i - 2) + 2, sign * (j - 2) + 2) for i in range(5) for j in range(5)]
    return [x[:, :, i : i + high, j : j + wide] for i, j in places]


@method_of("correlate", SAME, "a backward pass of its own", flow)
def correlation_with_its_own_backward(self, a: Tensor, b: Tensor) -> Tensor:
    return Products.apply(a, b, -1)


@method_of("correlate", "bug", "a backward pass that is wrong", flow, passes="input gradient")
def correlation_sent_back_to_the_same_side(self, a: Tensor, b: Tensor) -> Tensor:
    return Products.apply(a, b, 1)
