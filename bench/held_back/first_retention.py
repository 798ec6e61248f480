"""Retention: step by step against chunks and the parallel form; ALiBi's attention by distance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import both, later, leaf, pile
from bench.held_back._first_shell import W, ported, shell

KEPT = (0.875, 0.9375)


class Retention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(W, W, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(2, W)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (2, 8)) for f in (self.q, self.k, self.v))
        kept = x.new_tensor(KEPT)[:, None, None]
        state, mixed = x.new_zeros(len(x), 2, 8, 8), []
        for t in range(x.shape[1]):
            state = kept * state + k[:, t, :, :, None] * v[:, t, :, None]
            mixed.append((q[:, t, :, None] @ state).flatten(1) * 8**-0.5)
        y = self.norm(torch.stack(mixed, 1).flatten(0, 1)).view_as(x)
        return self.out(F.silu(self.gate(x)) * y)


retention = shell("first_retention", Retention)


class Chunks(nn.Module):
    """Four steps at once, one state between the chunks; fused projections."""

    def __init__(self, r: Retention, wrong: bool):
        super().__init__()
        self.fused = leaf(torch.cat([f.weight for f in (r.gate, r.v, r.k, r.q)]))
        self.ln, self.o, self.late = (
            nn.ParameterList([leaf(r.norm.weight), leaf(r.norm.bias)]),
            r.out,
            int(not wrong),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, *vkq = F.linear(x, self.fused).chunk(4, 2)
        v, k, q = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in vkq)
        kept, state, mixed = x.new_tensor(KEPT)[:, None, None], 0.0, []
        for vs, ks, qs in zip(*(t.split(4, 2) for t in (v, k, q)), strict=True):
            n = torch.arange(vs.shape[2], device=x.device).to(x.dtype)[:, None]
            inside = torch.where(n >= n.T, kept ** (n - n.T), 0.0)
            mixed.append(
                (qs @ ks.mT * inside) @ vs + kept ** (n + self.late) * (qs @ state if len(mixed) else 0.0)
            )
            state = kept ** len(n) * state + (ks * kept ** (len(n) - 1 - n)).mT @ vs
        y = F.layer_norm(torch.cat(mixed, 2) * 8**-0.5, (8,)).transpose(1, 2).flatten(2)
        return self.o(torch.addcmul(self.ln[1], y, self.ln[0]) * gate * gate.sigmoid())


class Parallel(nn.Module):
    """All steps at once, time first, with a tensor of projections by head."""

    def __init__(self, r: Retention, wrong: bool):
        super().__init__()
        self.maps = pile(f.weight.view(2, 8, W) for f in (r.q, r.k, r.v, r.gate))
        self.back, self.groups = leaf(r.out.weight.view(W, 2, 8)), nn.GroupNorm(1 if wrong else 2, W)
        self.groups.load_state_dict(r.norm.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = torch.einsum("tnd,chkd->cnhtk", x, self.maps)
        t = torch.arange(len(x), device=x.device)
        far = (t[:, None] - t).clamp(min=0).to(x.dtype)
        decay = x.new_tensor(KEPT)[:, None, None] ** far * ~later(len(x), x.device)
        y = (torch.einsum("nhtk,nhsk->nhts", q, k) * decay) @ v * 8**-0.5
        y = self.groups(y.permute(0, 2, 1, 3).reshape(-1, W)).view(-1, len(x), 2, 8)
        return torch.einsum("nthk,nhtk,dhk->tnd", y, F.silu(gate), self.back)


class Alibi(nn.Module):
    """Causal attention that decays with distance, steeper in the first head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def slope(self, x: Tensor) -> Tensor:
        return 2.0 ** (-4 * torch.arange(1, 3, device=x.device).to(x.dtype))[:, None, None]

    def bias(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1], device=x.device)
        return -self.slope(x) * (t[:, None] - t)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        bias = self.bias(x).masked_fill(later(x.shape[1], x.device), -torch.inf)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class AlibiByKey(Alibi):
    """The bias from the key's place alone: softmax takes off what all keys share."""

    wrong = False

    def bias(self, x: Tensor) -> Tensor:
        slope = self.slope(x) * (16 if self.wrong else 1)
        return slope * torch.arange(x.shape[1], device=x.device).expand(x.shape[1], -1)


class OneByOne(nn.Module):
    """Time first; one query after the other over its past alone, without a mask."""

    def __init__(self, m: Alibi, wrong: bool):
        super().__init__()
        self.maps, self.shifts = pile(m.qkv.weight.chunk(3)), pile(m.qkv.bias.chunk(3))
        self.out, self.slope, self.reach = m.out, m.slope, 8 if wrong else 99

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("tnd,ced->ctne", x, self.maps) + self.shifts[:, None, None]).unflatten(
            3, (2, 8)
        )
        mixed = []
        for t in range(len(x)):
            first = max(0, t + 1 - self.reach)
            far = t - torch.arange(first, t + 1, device=x.device)
            scores = torch.einsum("nhk,snhk->hns", q[t] * 8**-0.5, k[first : t + 1]) - self.slope(x) * far
            mixed.append(torch.einsum("hns,snhk->nhk", scores.softmax(2), v[first : t + 1]).flatten(1))
        return self.out(torch.stack(mixed))


both(retention, ported(Chunks), "retention_in_chunks", "state_of_a_chunk_decays_late", "layers.0.mixer")
both(retention, ported(Parallel, True), "all_steps_at_once", "heads_normed_together", "layers.0.mixer.norm")
alibi = shell("first_alibi", Alibi)
both(alibi, AlibiByKey, "slopes_by_key_alone", "slopes_start_at_the_zeroth_power", "layers.0.mixer")
both(alibi, ported(OneByOne, True), "one_query_at_a_time", "window_of_eight_keys", "layers.0.mixer")
