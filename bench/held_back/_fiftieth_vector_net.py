"""A small VectorNet: polylines, a graph of them, modes of the agent's future and their loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POLYLINES, VECTORS, KINDS, SCENES = 7, 5, 4, 3
HIDDEN, WIDTH, NODE, HEADS = 28, 20, 30, 4
DECODED, MODES, STEPS, FAR = 36, 3, 9, 1e9


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Points [N, ..., 2] turned by an angle [N] against the clock."""
    angle = angle.view(-1, *[1] * (x.ndim - 2))
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * x[..., 0] - sin * x[..., 1], sin * x[..., 0] + cos * x[..., 1]], -1)


class MLP(nn.Module):
    def __init__(self, in_channel: int, hidden: int, out_channel: int):
        super().__init__()
        self.linear1 = nn.Linear(in_channel, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.act1 = nn.ReLU()
        self.linear2 = nn.Linear(hidden, out_channel)
        self.norm2 = nn.LayerNorm(out_channel)
        self.act2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.norm1(self.linear1(x)))
        return self.act2(self.norm2(self.linear2(out)))


class SubGraphLayer(nn.Module):
    """Each vector beside the maximum over its polyline: [N, P, V, C] -> [N, P, V, 2 * WIDTH]."""

    def __init__(self, in_channel: int):
        super().__init__()
        self.mlp = MLP(in_channel, HIDDEN, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.mlp(x)
        pooled = x.masked_fill(~mask[..., None], -FAR).amax(2, keepdim=True)
        return torch.cat([x, pooled.expand_as(x)], -1)


class SubGraph(nn.Module):
    def __init__(self, in_channel: int, layers: int = 3):
        super().__init__()
        self.layer_seq = nn.Sequential()
        for i in range(layers):
            self.layer_seq.add_module(f"glp_{i}", SubGraphLayer(2 * WIDTH if i else in_channel))
        self.linear = nn.Linear(2 * WIDTH, NODE)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        real = mask.any(2)[..., None]
        for layer in self.layer_seq:
            x = layer(x, mask).masked_fill(~real[..., None], 0)
        x = self.linear(x).masked_fill(~mask[..., None], -FAR).amax(2)
        return F.normalize(x, dim=-1).masked_fill(~real, 0)


class SelfAttentionLayer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.q_lin, self.v_lin = nn.Linear(width, width), nn.Linear(width, width)
        self.k_lin = nn.Linear(width, width, bias=False)
        self.pos_mlp = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, HEADS, bias=False))
        self.out_lin, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, centre: Tensor, real: Tensor) -> Tensor:
        q, k, v = (
            lin(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for lin in (self.q_lin, self.k_lin, self.v_lin)
        )
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        relative = centre[:, :, None] - centre[:, None]
        scores = scores + self.pos_mlp(relative).permute(0, 3, 1, 2)
        weights = scores.masked_fill(~real[:, None, None], -FAR).softmax(-1)
        return self.norm(x + self.out_lin((weights @ v).transpose(1, 2).flatten(2)))


class GlobalGraph(nn.Module):
    def __init__(self, width: int, layers: int = 2):
        super().__init__()
        self.layers = nn.Sequential()
        for i in range(layers):
            self.layers.add_module(f"glp_{i}", SelfAttentionLayer(width))

    def forward(self, x: Tensor, centre: Tensor, real: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, centre, real)
        return x


class VectorNetBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        width = NODE + 2
        self.subgraph, self.global_graph = SubGraph(4 + KINDS), GlobalGraph(width)
        self.aux_mlp = nn.Sequential(nn.Linear(width, 26), nn.LayerNorm(26), nn.ReLU(), nn.Linear(26, NODE))

    def forward(self, vectors: Tensor, kinds: Tensor, mask: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """The agent's node, then a guess of the polyline hidden in training and its true node."""
        seen, scenes = mask[..., None], torch.arange(len(mask), device=mask.device)
        nodes = self.subgraph(torch.cat([vectors, kinds], -1), mask)
        truth = nodes[scenes, hidden]
        if self.training:
            nodes = nodes.masked_fill(F.one_hot(hidden, mask.shape[1])[..., None].bool(), 0)
        identifier = vectors[..., :2].masked_fill(~seen, FAR).amin(2).masked_fill(~mask.any(2)[..., None], 0)
        middles = (vectors[..., :2] + vectors[..., 2:]) / 2
        centre = (middles * seen).sum(2) / seen.sum(2).clamp(min=1)
        x = self.global_graph(torch.cat([nodes, identifier], -1), centre, mask.any(2))
        return x[:, 0], self.aux_mlp(x[scenes, hidden]), truth


class Decoder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = MLP(width, 44, DECODED)
        self.reg, self.cls = nn.Linear(DECODED, MODES * STEPS * 2), nn.Linear(DECODED, MODES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mlp(x)
        return self.reg(x).unflatten(1, (MODES, STEPS, 2)).cumsum(2), self.cls(x)


class WinnerLoss(nn.Module):
    """Of the mode that ends nearest: its distance and cross entropy; in training, the completion too."""

    def forward(self, paths: Tensor, logits: Tensor, future: Tensor, guess: Tensor, truth: Tensor) -> Tensor:
        with torch.no_grad():
            best = (paths[:, :, -1] - future[:, None, -1]).norm(dim=-1).argmin(1)
        chosen = paths[torch.arange(len(best), device=best.device), best]
        loss = F.smooth_l1_loss(chosen, future) + F.cross_entropy(logits, best)
        return loss + F.mse_loss(guess, truth) if self.training else loss


class VectorNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.decoder, self.criterion = VectorNetBackbone(), Decoder(NODE + 2), WinnerLoss()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.2)
                nn.init.normal_(module.bias, 0, 0.2)

    def forward(self, vectors, kinds, mask, hidden, origin, heading, future) -> dict[str, Tensor]:
        points = vectors.unflatten(-1, (2, 2)) - origin[:, None, None, None]
        points = turned(points, -heading).flatten(-2)
        agent, guess, truth = self.backbone(points, kinds, mask, hidden)
        paths, logits = self.decoder(agent)
        paths = turned(paths, heading) + origin[:, None, None]
        loss = self.criterion(paths, logits, future, guess, truth)
        return {"paths": paths, "scores": logits.softmax(-1), "loss": loss}


def roads() -> tuple[dict[str, Tensor], Tensor]:
    """Bent polylines around an agent, padded; the future goes on along the agent's bent way."""
    place, heading = torch.randn(SCENES, 2), torch.rand(SCENES) * 6 - 3
    way = heading[:, None] + torch.randn(SCENES, POLYLINES) * torch.arange(POLYLINES).clamp(max=1)
    bend = 0.2 * torch.randn(SCENES, POLYLINES)
    angle = way[..., None] + bend[..., None] * torch.arange(VECTORS)
    moves = 0.4 * torch.stack([angle.cos(), angle.sin()], -1) + 0.02 * torch.randn(
        SCENES, POLYLINES, VECTORS, 2
    )
    first = place[:, None] + torch.randn(SCENES, POLYLINES, 2)
    ends = first[:, :, None] + moves.cumsum(2)
    count = torch.randint(2, VECTORS + 1, (SCENES, POLYLINES))
    count[1:, -1] = 0
    mask = torch.arange(VECTORS) < count[..., None]
    kinds = (
        F.one_hot(torch.randint(KINDS, (SCENES, POLYLINES, 1)), KINDS)
        * torch.linspace(0.2, 1, VECTORS)[:, None]
    )
    vectors = torch.cat([ends - moves, ends], -1) * mask[..., None]
    turn = heading[:, None] + 0.1 * bend[:, :1] * torch.arange(STEPS)
    future = place[:, None] + 0.3 * torch.stack([turn.cos(), turn.sin()], -1).cumsum(1)
    inputs = {"vectors": vectors, "kinds": kinds * mask[..., None], "mask": mask}
    inputs |= {"hidden": torch.randint(1, POLYLINES - 1, (SCENES,)), "origin": place, "heading": heading}
    return inputs | {"future": future}, future


def total(outputs: dict[str, Tensor], _: Tensor) -> Tensor:
    """The loss that the network counted, by four."""
    return outputs["loss"] / 4
