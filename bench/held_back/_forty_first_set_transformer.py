"""a small Set Transformer: masked sets of points -> the parameters of a mixture of Gaussians for each."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SETS, POINTS, HELD, DIM = 6, 17, 11, 2
WIDTH, HEADS, INDUCING, SEEDS = 32, 4, 9, 3


class MAB(nn.Module):
    """Multihead attention of Q to K, heads in the batch; keys outside the mask are not seen."""

    def __init__(self, dim_q: int, dim_k: int, dim_v: int, num_heads: int):
        super().__init__()
        self.dim_V, self.num_heads = dim_v, num_heads
        self.fc_q = nn.Linear(dim_q, dim_v)
        self.fc_k = nn.Linear(dim_k, dim_v)
        self.fc_v = nn.Linear(dim_k, dim_v)
        self.ln0 = nn.LayerNorm(dim_v)
        self.ln1 = nn.LayerNorm(dim_v)
        self.fc_o = nn.Linear(dim_v, dim_v)

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.fc_q(q)
        k, v = self.fc_k(k), self.fc_v(k)
        dim_split = self.dim_V // self.num_heads
        q_ = torch.cat(q.split(dim_split, 2), 0)
        k_ = torch.cat(k.split(dim_split, 2), 0)
        v_ = torch.cat(v.split(dim_split, 2), 0)
        scores = q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.dim_V)
        if mask is not None:
            scores = scores.masked_fill(~mask.repeat(self.num_heads, 1)[:, None], -math.inf)
        a = torch.softmax(scores, 2)
        out = torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2)
        out = self.ln0(out)
        out = out + F.relu(self.fc_o(out))
        return self.ln1(out)


class SAB(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, num_heads: int):
        super().__init__()
        self.mab = MAB(dim_in, dim_in, dim_out, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.mab(x, x)


class ISAB(nn.Module):
    """Inducing points attend to the set, and the set to them."""

    def __init__(self, dim_in: int, dim_out: int, num_heads: int, num_inds: int):
        super().__init__()
        self.I = nn.Parameter(torch.randn(1, num_inds, dim_out))
        self.mab0 = MAB(dim_out, dim_in, dim_out, num_heads)
        self.mab1 = MAB(dim_in, dim_out, dim_out, num_heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.mab0(self.I.repeat(x.size(0), 1, 1), x, mask)
        return self.mab1(x, h)


class PMA(nn.Module):
    """Seeds attend to the set."""

    def __init__(self, dim: int, num_heads: int, num_seeds: int):
        super().__init__()
        self.S = nn.Parameter(torch.randn(1, num_seeds, dim))
        self.mab = MAB(dim, dim, dim, num_heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.mab(self.S.repeat(x.size(0), 1, 1), x, mask)


class SetTransformer(nn.Module):
    """Padded sets and which points are there -> a logit, a mean and a raw deviation for each component."""

    def __init__(self):
        super().__init__()
        self.enc = nn.ModuleList(
            [ISAB(DIM, WIDTH, HEADS, INDUCING), ISAB(WIDTH, WIDTH, HEADS, INDUCING)],
        )
        self.dec = nn.ModuleList(
            [
                PMA(WIDTH, HEADS, SEEDS),
                SAB(WIDTH, WIDTH, HEADS),
                SAB(WIDTH, WIDTH, HEADS),
                nn.Linear(WIDTH, 1 + 2 * DIM),
            ]
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.2 / math.sqrt(module.in_features))
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.2), nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(self.dec[3].weight, std=0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.enc:
            x = layer(x, mask)
        x = self.dec[0](x, mask)
        for layer in self.dec[1:]:
            x = layer(x)
        return x


def clusters() -> tuple[dict[str, Tensor], Tensor]:
    """Sets of different size from mixtures of three Gaussians, and held-out points of the same mixtures."""
    centers = 1.5 * torch.randn(SETS, SEEDS, DIM)
    which = torch.randint(SEEDS, (SETS, POINTS + HELD, 1)).expand(-1, -1, DIM)
    points = centers.gather(1, which) + 0.3 * torch.randn(SETS, POINTS + HELD, DIM)
    x, held = points.split([POINTS, HELD], 1)
    count = torch.randint(POINTS // 3, POINTS, (SETS, 1))
    mask = torch.arange(POINTS) < count
    return {"x": x * mask[:, :, None], "mask": mask}, held


def mixture_loss(params: Tensor, held: Tensor) -> Tensor:
    """a quarter of the mean negative log-likelihood of the held-out points."""
    logit, mean, raw = params[:, None].split([1, DIM, DIM], -1)
    scale = F.softplus(raw) + 0.2
    x = (held[:, :, None] - mean) / scale
    each = -(x**2 / 2 + scale.log() + math.log(2 * math.pi) / 2).sum(-1)
    return -torch.logsumexp(logit[..., 0].log_softmax(-1) + each, -1).mean() / 4
