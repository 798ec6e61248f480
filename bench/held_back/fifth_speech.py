"""A Conformer trained by CTC, rewritten with channels last and one dict of weights for each block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.case import method_of
from bench.held_back._fifth_ports import SAME, centred, flattened, pairs, shares
from bench.held_back._fourth_ports import Port, Rows, parts, wrong
from bench.tasks import _task


class FeedForward(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.SiLU()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


class Attention(nn.Module):
    """Each distance up to five has a bias of its own for each head."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.near = nn.Parameter(0.3 * torch.randn(heads, 11))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        steps = torch.arange(x.shape[1])
        near = self.near[:, (steps - steps[:, None]).clamp(-5, 5) + 5]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.enter, self.glu = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1), nn.GLU(1)
        self.depthwise = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.batch_norm, self.act, self.leave = nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.glu(self.enter(self.norm(x).mT)))
        return self.leave(self.act(self.batch_norm(x))).mT


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.before, self.attention = FeedForward(width), Attention(width, 2)
        self.conv, self.after, self.norm = Convolution(width), FeedForward(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        x = x + self.attention(x)
        x = x + self.conv(x)
        return self.norm(x + 0.5 * self.after(x))


class Conformer(nn.Module):
    """[N, T, 8] -> log-probabilities [N, T / 2, 7] and what the first block made."""

    def __init__(self):
        super().__init__()
        self.sample, self.act = nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.early, self.head = nn.Linear(16, 7), nn.Linear(16, 7)

    def forward(self, sound: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[0](self.act(self.sample(sound.mT)).mT)
        early = self.early(x).log_softmax(2)
        return self.head(self.blocks[1](x)).log_softmax(2), early


class Rowwise(Port):
    """Channels last; depthwise convolutions as sums of shifted rows."""

    def take(self, model: Conformer) -> None:
        self.ends = nn.ModuleList(flattened(m) for m in (model.sample, model.early, model.head))
        self.layers = nn.ModuleList(flattened(block) for block in model.blocks)
        for w in self.layers:
            del w["conv_batch_norm_weight"], w["conv_batch_norm_bias"]
        self.rows = nn.ModuleList(Rows(block.conv.batch_norm) for block in model.blocks)
        self.rows[1].own = self.fault == "statistics_of_the_batch_in_eval"

    def feed(self, i: int, name: str, x: Tensor) -> Tensor:
        w = {k.removeprefix(name + "_"): p for k, p in self.layers[i].items() if k.startswith(name)}
        h = centred(x, w["norm_weight"], w["norm_bias"]) @ w["up_weight"].T + w["up_bias"]
        step = 1.0 if self.fault == "last_half_step_taken_whole" and (i, name) == (1, "after") else 0.5
        return x + step * F.linear(h * h.sigmoid(), w["down_weight"], w["down_bias"])

    def attend(self, i: int, x: Tensor) -> Tensor:
        w, t = self.layers[i], x.shape[1]
        h = centred(x, w["attention_norm_weight"], w["attention_norm_bias"])
        h = F.linear(h, w["attention_qkv_weight"], w["attention_qkv_bias"])
        q, k, v = (y.unflatten(2, (2, 8)) for y in h.chunk(3, 2))
        distance = torch.arange(t) - torch.arange(t)[:, None]
        near = w["attention_near"][:, distance.clamp(-5, 5) + 5]
        scores = torch.einsum("nthd,nshd->nhts", q, k) * 8**-0.5 + near
        mixed = torch.einsum("nhts,nshd->nthd", shares(scores), v).flatten(2)
        return x + F.linear(mixed, w["attention_out_weight"], w["attention_out_bias"])

    def convolve(self, i: int, x: Tensor) -> Tensor:
        w, t = self.layers[i], x.shape[1]
        h = centred(x, w["conv_norm_weight"], w["conv_norm_bias"])
        h = F.linear(h, w["conv_enter_weight"][..., 0], w["conv_enter_bias"])
        h = h[..., :16] * h[..., 16:].sigmoid()
        left = 4 if self.fault == "depthwise_padded_at_one_end" and i == 0 else 2
        h = F.pad(h, (0, 0, left, 4 - left))
        taps = w["conv_depthwise_weight"][:, 0].T
        h = sum(h[:, j : j + t] * tap for j, tap in enumerate(taps)) + w["conv_depthwise_bias"]
        h = F.silu(self.rows[i](h))
        return x + F.linear(h, w["conv_leave_weight"][..., 0], w["conv_leave_bias"])

    def block(self, i: int, x: Tensor) -> Tensor:
        w = self.layers[i]
        x = self.convolve(i, self.attend(i, self.feed(i, "before", x)))
        return centred(self.feed(i, "after", x), w["norm_weight"], w["norm_bias"])

    def forward(self, sound: Tensor) -> dict[str, Tensor]:
        sample, early, head = self.ends
        windows = F.pad(sound, (0, 0, 1, 1)).unfold(1, 3, 2)
        x = torch.einsum("ntcj,dcj->ntd", windows, sample["weight"]) + sample["bias"]
        first = self.block(0, x.relu())
        last = self.block(1, first)
        made = {"last": F.linear(last, head["weight"], head["bias"])}
        made["early"] = F.linear(first, early["weight"], early["bias"])
        return {name: y - y.logsumexp(2, keepdim=True) for name, y in made.items()}


def _read(outputs: tuple | dict, targets: Tensor) -> Tensor:
    """CTC of the last outputs and, weighed less, of the early ones."""
    losses = []
    for y in parts(outputs):
        lengths = [torch.full((len(y),), length) for length in (y.shape[1], targets.shape[1])]
        losses.append(F.ctc_loss(y.transpose(0, 1), targets, *lengths))
    return losses[0] + 0.3 * losses[1]


conformer = _task(
    "fifth_conformer", Conformer, lambda: (torch.randn(6, 16, 8), torch.randint(1, 7, (6, 3))), _read
)
pairs(SAME, conformer, Rowwise, conformer_channels_last="another layout, shifted sums")
wrong(
    conformer,
    Rowwise,
    last_half_step_taken_whole=("missing factor of a residual", "blocks.1"),
    depthwise_padded_at_one_end=("padding side", "blocks.0.conv.depthwise"),
    statistics_of_the_batch_in_eval=("wrong mode of a norm", "blocks.1.conv.batch_norm", "eval"),
)


@method_of("blocks.0.after", SAME, "computed again in the backward pass", conformer)
def second_step_checkpointed(self: FeedForward, x: Tensor) -> Tensor:
    return checkpoint(lambda y: FeedForward.forward(self, y), x, use_reentrant=False)


@method_of(
    "blocks.1.conv",
    "bug",
    "statistics followed twice",
    conformer,
    module="blocks.1.conv.batch_norm",
    passes="buffer",
)
def convolution_checkpointed(self: Convolution, x: Tensor) -> Tensor:
    return checkpoint(lambda y: Convolution.forward(self, y), x, use_reentrant=False)
