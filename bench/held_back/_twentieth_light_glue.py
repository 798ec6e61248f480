"""A small LightGlue: keypoints of two pictures attend to themselves and to each other, and are matched."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS, WIDTH, HEADS, LAYERS, KEEP_ABOVE = 10, 16, 2, 3, 0.6
PAIRS, SCENE, FIRST, SECOND, GAMMA = 4, 11, 7, 9, 0.8
STRETCH = {"Wqkv": 1.5, "to_qk": 1.5, "final_proj": 0.6}


def normalize_keypoints(kpts: Tensor, size: Tensor) -> Tensor:
    """Pixels [N, L, 2] -> from the middle of the picture, in halves of its longer side."""
    shift, scale = size / 2, size.amax(-1) / 2
    return (kpts - shift[:, None]) / scale[:, None, None]


def apply_cached_rotary_emb(freqs: Tensor, t: Tensor) -> Tensor:
    return t * freqs[0] + torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2) * freqs[1]


def hide(sim: Tensor, mask: Tensor) -> Tensor:
    return sim.masked_fill(~mask, torch.finfo(sim.dtype).min)


def ffn() -> nn.Sequential:
    first, last = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    return nn.Sequential(first, nn.LayerNorm(2 * WIDTH), nn.GELU(), last)


class LearnableFourierPositionalEncoding(nn.Module):
    def __init__(self, M: int, dim: int):  # noqa: N803
        super().__init__()
        self.Wr = nn.Linear(M, dim // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.Wr(x).unsqueeze(-3).repeat_interleave(2, -1)
        return torch.stack([projected.cos(), projected.sin()])


class TokenConfidence(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())

    def forward(self, desc0: Tensor, desc1: Tensor) -> tuple[Tensor, Tensor]:
        return self.token(desc0.detach()).squeeze(-1), self.token(desc1.detach()).squeeze(-1)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhij,bhjd->bhid", hide(sim, mask).softmax(-1), v)


class SelfBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wqkv, self.inner_attn = nn.Linear(WIDTH, 3 * WIDTH), Attention()
        self.out_proj, self.ffn = nn.Linear(WIDTH, WIDTH), ffn()

    def forward(self, x: Tensor, encoding: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).unflatten(-1, (HEADS, -1, 3)).transpose(1, 2).unbind(-1)
        q, k = apply_cached_rotary_emb(encoding, q), apply_cached_rotary_emb(encoding, k)
        context = self.inner_attn(q, k, v, mask[:, None, None]).transpose(1, 2).flatten(2)
        return x + self.ffn(torch.cat([x, self.out_proj(context)], -1))


class CrossBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5
        self.to_qk, self.to_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_out, self.ffn = nn.Linear(WIDTH, WIDTH), ffn()

    def forward(self, x0: Tensor, x1: Tensor, mask0: Tensor, mask1: Tensor) -> tuple[Tensor, Tensor]:
        qk0, qk1 = (self.to_qk(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (x0, x1))
        v0, v1 = (self.to_v(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (x0, x1))
        sim = torch.einsum("bhid,bhjd->bhij", qk0 * self.scale**0.5, qk1 * self.scale**0.5)
        attn01 = hide(sim, mask1[:, None, None]).softmax(-1)
        attn10 = hide(sim.transpose(-2, -1), mask0[:, None, None]).softmax(-1)
        m0, m1 = (self.to_out((a @ v).transpose(1, 2).flatten(2)) for a, v in ((attn01, v1), (attn10, v0)))
        return x0 + self.ffn(torch.cat([x0, m0], -1)), x1 + self.ffn(torch.cat([x1, m1], -1))


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.cross_attn = SelfBlock(), CrossBlock()

    def forward(self, desc0, desc1, encoding0, encoding1, mask0, mask1) -> tuple[Tensor, Tensor]:
        desc0, desc1 = self.self_attn(desc0, encoding0, mask0), self.self_attn(desc1, encoding1, mask1)
        return self.cross_attn(desc0, desc1, mask0, mask1)


def sigmoid_log_double_softmax(sim: Tensor, z0: Tensor, z1: Tensor) -> Tensor:
    """Scores [N, L, M] and matchabilities -> logarithms [N, L + 1, M + 1], the last for no match."""
    certainties = F.logsigmoid(z0) + F.logsigmoid(z1).transpose(1, 2)
    scores = F.pad(sim.log_softmax(2) + sim.log_softmax(1) + certainties, (0, 1, 0, 1))
    scores[:, :-1, -1] = F.logsigmoid(-z0.squeeze(-1))
    scores[:, -1, :-1] = F.logsigmoid(-z1.squeeze(-1))
    return scores


class MatchAssignment(nn.Module):
    def __init__(self):
        super().__init__()
        self.matchability, self.final_proj = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, desc0: Tensor, desc1: Tensor, mask0: Tensor, mask1: Tensor) -> Tensor:
        mdesc0, mdesc1 = (self.final_proj(desc) / WIDTH**0.25 for desc in (desc0, desc1))
        sim = hide(torch.einsum("bmd,bnd->bmn", mdesc0, mdesc1), mask0[:, :, None] & mask1[:, None])
        scores = sigmoid_log_double_softmax(sim, self.matchability(desc0), self.matchability(desc1))
        real0, real1 = F.pad(mask0, (0, 1), value=True), F.pad(mask1, (0, 1), value=True)
        return scores.masked_fill(~(real0[:, :, None] & real1[:, None]), 0)

    def get_matchability(self, desc: Tensor) -> Tensor:
        return self.matchability(desc).sigmoid().squeeze(-1)


class LightGlue(nn.Module):
    """Keypoints of two pictures, padded -> at each layer the logarithms of matches, and confidences;
    in evaluation a point that is sure to have no match is left out of the next layers."""

    def __init__(self):
        super().__init__()
        self.input_proj = nn.Linear(INPUTS, WIDTH)
        self.posenc = LearnableFourierPositionalEncoding(2, WIDTH // HEADS)
        self.transformers = nn.ModuleList(TransformerLayer() for _ in range(LAYERS))
        self.log_assignment = nn.ModuleList(MatchAssignment() for _ in range(LAYERS))
        self.token_confidence = nn.ModuleList(TokenConfidence() for _ in range(LAYERS - 1))
        levels = 0.5 + 0.1 * torch.exp(-4 * torch.arange(LAYERS) / LAYERS)
        self.register_buffer("confidence_thresholds", levels)
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, STRETCH.get(name.split(".")[-1], 1.0))
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.25)
        nn.init.normal_(self.posenc.Wr.weight, std=1.5)

    def get_pruning_mask(self, confidences: Tensor, scores: Tensor, layer_index: int) -> Tensor:
        return (scores > KEEP_ABOVE) | (confidences <= self.confidence_thresholds[layer_index])

    def forward(
        self, keypoints0, keypoints1, descriptors0, descriptors1, image_size0, image_size1, mask0, mask1
    ) -> dict[str, Tensor]:
        desc0, desc1, pred = self.input_proj(descriptors0), self.input_proj(descriptors1), {}
        encoding0 = self.posenc(normalize_keypoints(keypoints0, image_size0))
        encoding1 = self.posenc(normalize_keypoints(keypoints1, image_size1))
        for i, (layer, assign) in enumerate(zip(self.transformers, self.log_assignment, strict=True)):
            desc0, desc1 = layer(desc0, desc1, encoding0, encoding1, mask0, mask1)
            pred[f"log_assignment_{i}"] = assign(desc0, desc1, mask0, mask1)
            if i < LAYERS - 1:
                token0, token1 = self.token_confidence[i](desc0, desc1)
                pred |= {f"token0_{i}": token0, f"token1_{i}": token1}
                if not self.training:
                    mask0 = mask0 & self.get_pruning_mask(token0, assign.get_matchability(desc0), i)
                    mask1 = mask1 & self.get_pruning_mask(token1, assign.get_matchability(desc1), i)
        return pred


def views() -> tuple[dict[str, Tensor], Tensor]:
    """Points of a scene that look alike in pairs, seen twice, the second time turned and farther."""
    looks = torch.randn(PAIRS, SCENE, INPUTS)
    looks[:, ::2][:, : SCENE // 2] = looks[:, 1::2]
    places, turn, given = torch.rand(PAIRS, SCENE, 2) - 0.5, torch.rand(PAIRS) - 0.5, {}
    turned = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], -1).unflatten(-1, (2, 2))
    seen, rows = [], torch.arange(PAIRS)[:, None]
    for i, (most, points) in enumerate([(FIRST, places), (SECOND, 0.7 * places @ turned)]):
        order, size = torch.rand(PAIRS, SCENE).argsort(1)[:, :most], 40 + 57 * torch.rand(PAIRS, 2)
        mask = torch.arange(most) < most - torch.randperm(PAIRS)[:, None] % 3
        given[f"keypoints{i}"] = (points[rows, order] + 0.5) * size[:, None]
        given[f"descriptors{i}"] = looks[rows, order] + 0.2 * torch.randn(PAIRS, most, INPUTS)
        given |= {f"image_size{i}": size, f"mask{i}": mask}
        seen.append(torch.where(mask, order, -1 - i))
    match = F.pad((seen[0][:, :, None] == seen[1][:, None]).float(), (0, 1, 0, 1))
    match[:, :-1, -1] = (given["mask0"] & (match[:, :-1].sum(2) == 0)).float()
    match[:, -1, :-1] = (given["mask1"] & (match[:, :, :-1].sum(1) == 0)).float()
    return given, match


def matched(pred: dict[str, Tensor], match: Tensor) -> Tensor:
    """Surprise of the true matches, later layers counted more, and of what each confidence should be."""
    match = match.to(pred["log_assignment_0"])
    met = F.pad(match[:, :-1, :-1], (0, 1, 0, 1))
    weight, loss = met / met.sum() + (match - met) / (match - met).sum(), 0
    for i in range(LAYERS):
        told = pred[f"log_assignment_{i}"] * match
        loss = loss - 0.08 * GAMMA ** (LAYERS - 1 - i) * (told * weight).sum()
        for axis in (2, 1) if i < LAYERS - 1 else ():
            found, real = told.sum(axis)[:, :-1].detach().exp(), match.sum(axis)[:, :-1]
            loss = loss + 0.05 * F.binary_cross_entropy(pred[f"token{2 - axis}_{i}"], found, weight=real)
    return loss
