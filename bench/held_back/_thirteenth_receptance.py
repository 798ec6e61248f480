"""RWKV-6 (Finch) in small, with the names of RWKV-LM; the kernel is a loop over the tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, N_EMBD, N_LAYER, HEAD_SIZE, DIM_FFN, CTX = 17, 24, 3, 8, 56, 14
D_MIX_LORA, D_DECAY_LORA, HEAD_SIZE_DIVISOR = 4, 6, 8


def RUN_RWKV6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """[B, T, C] each and the bonus [H, N] -> [B, T, C]; the state of a head is [key, value]."""
    B, T, C = r.shape
    H, N = u.shape
    r, k, v, w = (z.view(B, T, H, N) for z in (r, k, v, torch.exp(-torch.exp(w))))
    state = r.new_zeros(B, H, N, N)
    out = []
    for t in range(T):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((r[:, t, :, None, :] @ (state + u[:, :, None] * kv)).flatten(1))
        state = w[:, t, :, :, None] * state + kv
    return torch.stack(out, 1)


class RWKV_Tmix_x060(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.n_head = N_EMBD // HEAD_SIZE
        ddd = torch.linspace(0.1, 0.9, N_EMBD)[None, None]
        ratio = 1.0 - 0.8 * layer_id / N_LAYER
        for i, name in enumerate("xwkvrg"):
            maa = 1.0 - ddd ** (ratio * (0.5 + 0.15 * i)) + 0.1 * torch.rand(1, 1, N_EMBD)
            setattr(self, f"time_maa_{name}", nn.Parameter(maa))
        self.time_maa_w1 = nn.Parameter(0.3 * torch.randn(N_EMBD, D_MIX_LORA * 5))
        self.time_maa_w2 = nn.Parameter(0.2 * torch.randn(5, D_MIX_LORA, N_EMBD))
        decay_speed = -3.0 + 3.2 * ddd ** (0.7 + 1.3 * layer_id / N_LAYER)
        self.time_decay = nn.Parameter(decay_speed + 0.1 * torch.randn(1, 1, N_EMBD))
        self.time_decay_w1 = nn.Parameter(0.3 * torch.randn(N_EMBD, D_DECAY_LORA))
        self.time_decay_w2 = nn.Parameter(0.3 * torch.randn(D_DECAY_LORA, N_EMBD))
        zigzag = 0.2 * ((torch.arange(N_EMBD) + 1) % 3 - 1)
        tmp = 0.7 * (1 - 0.8 * ddd[0, 0]) + zigzag
        self.time_faaaa = nn.Parameter(tmp.view(self.n_head, HEAD_SIZE))

        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.receptance = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.key = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.value = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.output = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.gate = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.ln_x = nn.GroupNorm(self.n_head, N_EMBD, eps=1e-5 * HEAD_SIZE_DIVISOR**2)

    def jit_func(self, x: Tensor) -> tuple[Tensor, ...]:
        B, T, C = x.size()
        xx = self.time_shift(x) - x
        xxx = x + xx * self.time_maa_x
        xxx = torch.tanh(xxx @ self.time_maa_w1).view(B * T, 5, -1).transpose(0, 1)
        xxx = torch.bmm(xxx, self.time_maa_w2).view(5, B, T, -1)
        mw, mk, mv, mr, mg = xxx.unbind(dim=0)

        xw = x + xx * (self.time_maa_w + mw)
        xk = x + xx * (self.time_maa_k + mk)
        xv = x + xx * (self.time_maa_v + mv)
        xr = x + xx * (self.time_maa_r + mr)
        xg = x + xx * (self.time_maa_g + mg)

        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        g = F.silu(self.gate(xg))
        ww = torch.tanh(xw @ self.time_decay_w1) @ self.time_decay_w2
        return r, k, v, g, self.time_decay + ww

    def jit_func_2(self, x: Tensor, g: Tensor) -> Tensor:
        B, T, C = x.size()
        x = self.ln_x(x.view(B * T, C)).view(B, T, C)
        return self.output(x * g)

    def forward(self, x: Tensor) -> Tensor:
        r, k, v, g, w = self.jit_func(x)
        x = RUN_RWKV6(r, k, v, w, u=self.time_faaaa)
        return self.jit_func_2(x, g)


class RWKV_CMix_x060(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        ddd = torch.linspace(0.1, 0.9, N_EMBD)[None, None]
        maa = 1.0 - ddd ** (1.0 - 0.8 * layer_id / N_LAYER)
        self.time_maa_k = nn.Parameter(maa + 0.1 * torch.rand(1, 1, N_EMBD))
        self.time_maa_r = nn.Parameter(maa + 0.1 * torch.rand(1, 1, N_EMBD))
        self.key = nn.Linear(N_EMBD, DIM_FFN, bias=False)
        self.receptance = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.value = nn.Linear(DIM_FFN, N_EMBD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        xx = self.time_shift(x) - x
        xk = x + xx * self.time_maa_k
        xr = x + xx * self.time_maa_r
        k = torch.relu(self.key(xk)) ** 2
        return torch.sigmoid(self.receptance(xr)) * self.value(k)


class Block(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.layer_id = layer_id
        self.ln1, self.ln2 = nn.LayerNorm(N_EMBD), nn.LayerNorm(N_EMBD)
        if layer_id == 0:
            self.ln0 = nn.LayerNorm(N_EMBD)
        self.att, self.ffn = RWKV_Tmix_x060(layer_id), RWKV_CMix_x060(layer_id)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer_id == 0:
            x = self.ln0(x)
        x = x + self.att(self.ln1(x))
        return x + self.ffn(self.ln2(x))


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.8 * module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.7)


class RWKV(nn.Module):
    """Tokens [B, T] -> scores of the next token [B, T, VOCAB]."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, N_EMBD)
        self.blocks = nn.ModuleList([Block(i) for i in range(N_LAYER)])
        self.ln_out = nn.LayerNorm(N_EMBD)
        self.head = nn.Linear(N_EMBD, VOCAB, bias=False)
        self.apply(varied)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.emb(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_out(x))


def strides() -> tuple[Tensor, Tensor]:
    """Three rows that count around the vocabulary by a step of their own; some tokens are noise."""
    first, step = torch.randint(VOCAB, (3, 1)), torch.randint(1, 5, (3, 1))
    tokens = (first + step * torch.arange(CTX + 1)) % VOCAB
    noise = torch.randint(VOCAB, tokens.shape)
    tokens = torch.where(torch.rand(tokens.shape) < 0.15, noise, tokens)
    return tokens[:, :-1], tokens[:, 1:]


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
