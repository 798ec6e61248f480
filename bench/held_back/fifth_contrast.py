"""Two towers that learn by contrast: a teacher and a queue of its keys in buffers, the loss inside."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_contrast import KEYS, QUEUE, WIDTH, Compare, Contrast
from bench.held_back._fifth_tables import SAME, fault, right, turned
from bench.held_back._fourth_ports import Port, Rows, leaf
from bench.tasks import _task

SHAPES = ((10, WIDTH), (WIDTH, WIDTH), (WIDTH, KEYS))


class OneBuffer(Port):
    """The teacher's weights in one vector, the queue by columns and written by rolling its whole."""

    def take(self, model: Contrast) -> None:
        tower = model.tower
        self.w = nn.ParameterList(turned(fc) for fc in (tower.fc1, tower.fc2, tower.fc3))
        self.b = nn.ParameterList(leaf(fc.bias) for fc in (tower.fc1, tower.fc2, tower.fc3))
        self.norms = nn.ModuleList([Rows(tower.norm1), Rows(tower.norm2)])
        statistics = [(norm.running_mean, norm.running_var) for norm in (tower.norm1, tower.norm2)]
        self.register_buffer("seen", torch.stack([torch.stack(two) for two in statistics]))
        self.register_buffer("slow", self.fast())
        self.register_buffer("columns", model.queue.rows.T.clone())
        self.register_buffer("place", model.queue.place.clone())
        self.scale = leaf(model.compare.scale)

    def fast(self) -> Tensor:
        """Everything that the teacher follows, one after the other."""
        norms = [part for norm in self.norms for part in (norm.scale, norm.shift)]
        return torch.cat([part.detach().flatten() for part in [*self.w, *self.b, *norms]])

    def slow_parts(self) -> list[Tensor]:
        shapes = [*SHAPES, (WIDTH,), (WIDTH,), (KEYS,), *[(WIDTH,)] * 4]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        return [part.view(shape) for part, shape in zip(self.slow.split(sizes), shapes, strict=True)]

    def slow_normed(self, at: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, 0, correction=0)
        if self.training:
            new = torch.stack([center, spread * len(x) / (len(x) - 1)])
            self.seen[at] = 0.9 * self.seen[at] + 0.1 * new
        elif at == 0 or self.fault != "teacher_norms_by_batch_in_eval":
            center, spread = self.seen[at]
        return (x - center) / (spread + 1e-5).sqrt()

    @torch.no_grad()
    def keys(self, x: Tensor) -> Tensor:
        parts = self.slow_parts()
        for at in range(2):
            x = self.slow_normed(at, x @ parts[at] + parts[3 + at])
            x = (x * parts[6 + 2 * at] + parts[7 + 2 * at]).relu()
        return F.normalize(x @ parts[2] + parts[5], dim=-1)

    @torch.no_grad()
    def follow(self) -> None:
        fast = self.fast()
        if self.fault == "last_bias_not_followed":
            start = sum(torch.Size(shape).numel() for shape in SHAPES) + 2 * WIDTH
            fast[start : start + KEYS] = self.slow[start : start + KEYS]
        self.slow.copy_(0.9 * self.slow + 0.1 * fast)

    @torch.no_grad()
    def push(self, keys: Tensor) -> None:
        count, at = len(keys), int(self.place)
        turned_round = torch.cat([keys.T, self.columns.roll(-at, 1)[:, count:]], 1)
        self.columns.copy_(turned_round.roll(at, 1))
        self.place.copy_((self.place + count) % QUEUE)

    def queried(self, x: Tensor) -> Tensor:
        for at, norm in enumerate(self.norms):
            x = norm(x @ self.w[at] + self.b[at]).relu()
        x = x @ self.w[2] + self.b[2]
        return x * x.square().sum(1, keepdim=True).clamp(min=1e-24).rsqrt()

    def forward(self, view: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        query = self.queried(view)
        if self.training:
            self.follow()
        keys, columns = self.keys(other), self.columns.clone()
        if self.training:
            self.push(keys)
        if self.fault == "queue_read_after_it_is_written":
            columns = self.columns.clone()
        scale = self.scale.exp()
        own = torch.einsum("nd,nd->n", query, keys) * scale
        others = torch.logsumexp(query @ columns * scale, 1)
        return query, F.softplus(others - own)


def _views() -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randn(20, 10)
    return {"view": x + 0.3 * torch.randn(20, 10), "other": x + 0.3 * torch.randn(20, 10)}, torch.zeros(20)


def _mean_loss(outputs: dict | tuple, targets: Tensor) -> Tensor:
    return (outputs["losses"] if isinstance(outputs, dict) else outputs[1]).mean()


contrast = _task("fifth_contrast", Contrast, _views, _mean_loss)


SLOW = {"optimizer": partial(torch.optim.SGD, lr=0.02, momentum=0.9)}


@method_of("compare", SAME, "another formula", contrast, **SLOW)
def own_key_last(self: Compare, query: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """The losses by the logarithm of the softmax, with the own key after those of the queue."""
    logits = torch.cat([rows, keys]) @ query.T * self.scale.exp()
    others, own = logits[: len(rows)], logits[len(rows) :].diagonal()
    return torch.logaddexp(others.logsumexp(0), own) - own


right(contrast, OneBuffer, "teacher_in_one_buffer", "port, flat teacher", **SLOW)
wrong = partial(fault, contrast, OneBuffer, **SLOW)
wrong("queue_read_after_it_is_written", "order of two steps", "queue")
wrong("last_bias_not_followed", "a part not updated", "teacher", ("buffer", "forward"), step=1)
wrong("teacher_norms_by_batch_in_eval", "norm in the wrong mode", "teacher", "eval")
