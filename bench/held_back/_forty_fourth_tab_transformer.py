"""A small TabTransformer with SAINT's attention over rows: tables of rows of categories and numbers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CATEGORIES, CONTINUOUS, TABLES, ROWS = (5, 7, 3, 9, 4), 6, 3, 8
DIM, SHARED, HEADS, DIM_HEAD, DEPTH, ROW_BLOCK = 16, 4, 2, 6, 3, 1
ROW_HEADS, ROW_DIM_HEAD, ROW_HIDDEN, HIDDEN = 3, 5, 14, (20, 11)


class GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


def feed_forward(dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * hidden), GEGLU(), nn.Linear(hidden, dim))


class Attention(nn.Module):
    """Attention over the axis before the last; what is not in the mask is not looked at."""

    def __init__(self, dim: int, heads: int, dim_head: int):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        sim = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        out = sim.softmax(dim=-1) @ v
        return self.to_out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention over the columns of each row."""

    def __init__(self):
        super().__init__()
        self.attn = Attention(DIM, HEADS, DIM_HEAD)
        self.ff = feed_forward(DIM, 2 * DIM)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = self.attn(x) + x
        return self.ff(x) + x


class RowColBlock(Block):
    """The same, and then attention over the rows of each table, a row's columns side by side."""

    def __init__(self):
        super().__init__()
        dim = DIM * len(CATEGORIES)
        self.row_attn = Attention(dim, ROW_HEADS, ROW_DIM_HEAD)
        self.row_ff = feed_forward(dim, ROW_HIDDEN)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = super().forward(x, valid)
        rows = x.reshape(*valid.shape, -1)
        rows = self.row_attn(rows, mask=valid) + rows
        rows = self.row_ff(rows) + rows
        return rows.reshape(x.shape)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(RowColBlock() if i == ROW_BLOCK else Block() for i in range(DEPTH))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, valid)
        return x


class MLP(nn.Module):
    def __init__(self, dim_in: int, hidden: tuple[int, int], dim_out: int):
        super().__init__()
        first = nn.Linear(dim_in, hidden[0]), nn.BatchNorm1d(hidden[0]), nn.SELU()
        second = nn.Linear(hidden[0], hidden[1]), nn.BatchNorm1d(hidden[1]), nn.ReLU()
        self.mlp = nn.Sequential(*first, *second, nn.Linear(hidden[1], dim_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class TabTransformer(nn.Module):
    """Categories (zero: missing), numbers and which rows are valid -> a logit and a value of each row."""

    def __init__(self):
        super().__init__()
        columns, total = len(CATEGORIES), sum(CATEGORIES) + 1
        self.register_buffer("categories_offset", torch.tensor((0, *CATEGORIES[:-1])).cumsum(0))
        self.category_embed = nn.Embedding(total, DIM - SHARED)
        self.shared_category_embed = nn.Parameter(torch.empty(columns, SHARED))
        self.register_buffer(
            "continuous_mean_std",
            torch.stack([0.3 * torch.randn(CONTINUOUS), 0.5 + torch.rand(CONTINUOUS)], -1),
        )
        self.norm = nn.LayerNorm(CONTINUOUS)
        self.transformer = Transformer()
        self.mlp = MLP(DIM * columns + CONTINUOUS, HIDDEN, 2)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.7 if "embed" in name else weight.shape[1] ** -0.5)
            else:
                nn.init.normal_(weight, name.endswith("weight"), 0.2)
        for name, buffer in self.mlp.named_buffers():
            if "running" in name:
                buffer.add_(0.3 * torch.rand(buffer.shape))

    def forward(self, x_categ: Tensor, x_cont: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        x_categ = torch.where(x_categ > 0, x_categ + self.categories_offset, 0).flatten(0, 1)
        x = self.category_embed(x_categ)
        shared = self.shared_category_embed.expand(len(x), -1, -1)
        x = self.transformer(torch.cat([x, shared], dim=-1), valid)
        mean, std = self.continuous_mean_std.unbind(dim=-1)
        normed = self.norm((x_cont - mean) / std).flatten(0, 1)
        out = self.mlp(torch.cat([x.flatten(1), normed], dim=-1))
        logit, value = out.unflatten(0, valid.shape).unbind(dim=-1)
        return logit, value


def tables() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows of which a hidden number tells the categories, numbers and targets; the last are padding."""
    hidden = torch.randn(TABLES, ROWS, 1)
    sizes, turns = torch.tensor(CATEGORIES), torch.arange(len(CATEGORIES))
    share = torch.sigmoid(hidden * torch.cos(turns) + 0.7 * torch.randn(TABLES, ROWS, len(CATEGORIES)))
    x_categ = 1 + (share * sizes).long().clamp(max=sizes - 1)
    x_categ[torch.rand(x_categ.shape) < 0.15] = 0
    x_cont = torch.sin(hidden + torch.arange(CONTINUOUS)) + 0.4 * torch.randn(TABLES, ROWS, CONTINUOUS)
    valid = torch.arange(ROWS) < torch.randint(ROWS // 2, ROWS, (TABLES, 1))
    x_categ, x_cont = x_categ * valid[..., None], x_cont * valid[..., None]
    target = {"label": (hidden[..., 0] > 0).to(x_cont), "value": hidden[..., 0].tanh(), "valid": valid}
    return {"x_categ": x_categ, "x_cont": x_cont, "valid": valid}, target


def both_tasks(outputs: tuple[Tensor, Tensor], target: dict[str, Tensor]) -> Tensor:
    """The cross entropy of the label and the squared error of the value over valid rows, by four."""
    logit, value = outputs
    binary = F.binary_cross_entropy_with_logits(logit, target["label"], reduction="none")
    each = binary + 0.5 * (value - target["value"]) ** 2
    return each[target["valid"]].mean() / 4
