"""A small xLSTM language model: blocks of a matrix memory (mLSTM) and of scalar memories (sLSTM) in turn."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, FORWARD, TAPS, BLOCK = 29, 18, 36, 26, 4, 3
M_HEADS, S_HEADS, BLOCKS, SENTENCES, LENGTH, EPS = 4, 3, 4, 5, 10, 1e-6


class LayerNorm(nn.Module):
    """Its weight is kept as a difference from one."""

    def __init__(self, ndim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ndim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, 1.0 + self.weight, None, 1e-5)


class MultiHeadLayerNorm(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        """[N, heads, T, D] -> [N, T, heads D]."""
        n, heads, length, _ = x.shape
        x = x.transpose(1, 2).reshape(n * length, -1)
        return F.group_norm(x, heads, 1.0 + self.weight, None, 1e-5).view(n, length, -1)


class CausalConv1d(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, TAPS, padding=TAPS - 1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., : 1 - TAPS].transpose(1, 2)


class LinearHeadwiseExpand(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, width // num_heads, width // num_heads))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (len(self.weight), -1))
        return torch.einsum("...hd,hod->...ho", x, self.weight).flatten(-2)


class MLSTMCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.igate, self.fgate = nn.Linear(3 * INNER, M_HEADS), nn.Linear(3 * INNER, M_HEADS)
        self.outnorm = MultiHeadLayerNorm(INNER)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gates, length = torch.cat([q, k, v], -1), q.shape[1]
        q, k, v = (x.unflatten(-1, (M_HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        log_i = self.igate(gates).transpose(1, 2)
        sums = F.logsigmoid(self.fgate(gates)).transpose(1, 2).cumsum(-1)
        causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        log_d = sums[..., :, None] - sums[..., None, :] + log_i[..., None, :]
        log_d = log_d.masked_fill(~causal, -torch.inf)
        max_log_d = log_d.amax(-1, keepdim=True)
        c = (q @ (k / math.sqrt(k.shape[-1])).transpose(-2, -1)) * (log_d - max_log_d).exp()
        normalizer = torch.maximum(c.sum(-1, keepdim=True).abs(), (-max_log_d).exp())
        return self.outnorm(c / (normalizer + EPS) @ v)


class MLSTMLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, LinearHeadwiseExpand(INNER, INNER // BLOCK))
        self.conv1d, self.conv_act_fn = CausalConv1d(INNER), nn.SiLU()
        self.mlstm_cell, self.ogate_act_fn = MLSTMCell(), nn.SiLU()
        self.learnable_skip = nn.Parameter(torch.ones(INNER))
        self.proj_down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x_mlstm, z = self.proj_up(x).chunk(2, -1)
        x_conv = self.conv_act_fn(self.conv1d(x_mlstm))
        h = self.mlstm_cell(self.q_proj(x_conv), self.k_proj(x_conv), self.v_proj(x_mlstm))
        return self.proj_down((h + self.learnable_skip * x_conv) * self.ogate_act_fn(z))


class SLSTMCell(nn.Module):
    def __init__(self):
        super().__init__()
        size = WIDTH // S_HEADS
        self._recurrent_kernel_ = nn.Parameter(torch.empty(S_HEADS, 4, size, size))
        self._bias_ = nn.Parameter(torch.empty(S_HEADS, 4, size))

    def forward(self, gates: Tensor) -> Tensor:
        """[N, T, 4, heads, D] of i, f, z and o -> [N, heads, T, D]."""
        y = c = n = m = gates.new_zeros(gates[:, 0, 0].shape)
        found = []
        for t, wx in enumerate(gates.unbind(1)):
            ry = torch.einsum("nhd,hgdo->ngho", y, self._recurrent_kernel_)
            iraw, fraw, zraw, oraw = (wx + ry + self._bias_.transpose(0, 1)).unbind(1)
            logfplusm = m + F.logsigmoid(fraw)
            mnew = iraw if t == 0 else torch.maximum(iraw, logfplusm)
            igate, fgate = (iraw - mnew).exp(), (logfplusm - mnew).exp()
            c, n, m = fgate * c + igate * zraw.tanh(), fgate * n + igate, mnew
            y = oraw.sigmoid() * c / n
            found.append(y)
        return torch.stack(found, 2)


class SLSTMLayer(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("fgate", "igate", "zgate", "ogate"):
            self.add_module(name, LinearHeadwiseExpand(WIDTH, S_HEADS))
        self.slstm_cell, self.group_norm = SLSTMCell(), MultiHeadLayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.igate(x), self.fgate(x), self.zgate(x), self.ogate(x)
        return self.group_norm(self.slstm_cell(torch.stack(gates, 2).unflatten(-1, (S_HEADS, -1))))


class GatedFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_up, self.act_fn = nn.Linear(WIDTH, 2 * FORWARD, bias=False), nn.GELU()
        self.proj_down = nn.Linear(FORWARD, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.proj_up(x).chunk(2, -1)
        return self.proj_down(self.act_fn(gate) * up)


class XLSTMBlock(nn.Module):
    def __init__(self, scalar: bool):
        super().__init__()
        self.xlstm_norm, self.xlstm = LayerNorm(WIDTH), SLSTMLayer() if scalar else MLSTMLayer()
        self.ffn_norm, self.ffn = (LayerNorm(WIDTH), GatedFeedForward()) if scalar else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.xlstm(self.xlstm_norm(x))
        return x if self.ffn is None else x + self.ffn(self.ffn_norm(x))


class XLSTMBlockStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(XLSTMBlock(i % 2 == 1) for i in range(BLOCKS))
        self.post_blocks_norm = LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.post_blocks_norm(x)


class XLSTMLMModel(nn.Module):
    """Tokens [N, T] -> logits [N, T, V]."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.xlstm_block_stack = XLSTMBlockStack()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            wide = p.ndim > 1 and not name.endswith("_bias_")
            nn.init.normal_(p, std=p.shape[-1] ** -0.5 if wide else 0.3)
            if name.endswith(("fgate.bias", "learnable_skip")):
                p.data += 1.0

    def forward(self, idx: Tensor) -> Tensor:
        return self.lm_head(self.xlstm_block_stack(self.token_embedding(idx)))


def sentences() -> tuple[Tensor, Tensor]:
    """Tokens that go on by a stride of their own, padded by zeros, and the tokens after them."""
    start, stride = torch.randint(VOCABULARY, (SENTENCES, 1)), torch.randint(1, 5, (SENTENCES, 1))
    tokens = 1 + (start + stride * torch.arange(LENGTH + 1)) % (VOCABULARY - 1)
    ends = torch.randint(LENGTH // 2, LENGTH + 2, (SENTENCES, 1))
    tokens = tokens.where(torch.arange(LENGTH + 1) < ends, 0)
    return tokens[:, :-1], tokens[:, 1:]


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of the tokens that are not padding, by four."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0) / 4
