"""RWKV-6 (Finch) in small, with the names of RWKV-LM; the kernel is a loop over the tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, N_EMBD, N_LAYER, HEAD_SIZE, DIM_FFN, CTX = 17, 24, 3, 8, 56, 14
D_MIX_LORA, D_DECAY_LORA, HEAD_SIZE_DIVISOR = 4, 6, 8


class Shifted(nn.ZeroPad2d):
    """[batch, time, channels]: each token's predecessor; zeros before the first."""

    def __init__(self):
        super().__init__((0, 0, 1, -1))


def recurrence(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """[batch, time, channels] each and the bonus [head, key]; the state of a head is [key, value]."""
    r, k, v, decay = (z.unflatten(-1, bonus.shape) for z in (r, k, v, decay))
    state, read = 0.0, []
    for now in range(r.shape[1]):
        added = torch.einsum("bhi,bhj->bhij", k[:, now], v[:, now])
        seen = state + bonus[..., None] * added
        read.append(torch.einsum("bhi,bhij->bhj", r[:, now], seen).flatten(1))
        state = added + decay[:, now, ..., None] * state
    return torch.stack(read, 1)


class TimeMix(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        heads, place = N_EMBD // HEAD_SIZE, torch.linspace(0.1, 0.9, N_EMBD)[None, None]
        slope = 1.0 - 0.8 * number / N_LAYER
        for i, name in enumerate("xwkvrg"):
            share = 1.0 - place ** (slope * (0.5 + 0.15 * i)) + 0.1 * torch.rand(1, 1, N_EMBD)
            self.register_parameter(f"time_maa_{name}", nn.Parameter(share))
        self.time_maa_w1 = nn.Parameter(0.3 * torch.randn(N_EMBD, D_MIX_LORA * 5))
        self.time_maa_w2 = nn.Parameter(0.2 * torch.randn(5, D_MIX_LORA, N_EMBD))
        rate = -3.0 + 3.2 * place ** (0.7 + 1.3 * number / N_LAYER)
        self.time_decay = nn.Parameter(rate + 0.1 * torch.randn(1, 1, N_EMBD))
        self.time_decay_w1 = nn.Parameter(0.3 * torch.randn(N_EMBD, D_DECAY_LORA))
        self.time_decay_w2 = nn.Parameter(0.3 * torch.randn(D_DECAY_LORA, N_EMBD))
        by_three = 0.2 * ((torch.arange(N_EMBD) + 1) % 3 - 1)
        bonus = 0.7 * (1 - 0.8 * place[0, 0]) + by_three
        self.time_faaaa = nn.Parameter(bonus.view(heads, HEAD_SIZE))

        self.time_shift = Shifted()
        for name in ("receptance", "key", "value", "output", "gate"):
            setattr(self, name, nn.Linear(N_EMBD, N_EMBD, bias=False))
        self.ln_x = nn.GroupNorm(heads, N_EMBD, eps=1e-5 * HEAD_SIZE_DIVISOR**2)

    def mixed(self, x: Tensor) -> list[Tensor]:
        """Between a token and the one before it, for decay, key, value, receptance and gate."""
        change = self.time_shift(x) - x
        narrow = torch.tanh((x + change * self.time_maa_x) @ self.time_maa_w1).unflatten(-1, (5, D_MIX_LORA))
        shares = torch.einsum("btfl,flc->fbtc", narrow, self.time_maa_w2)
        own = (getattr(self, f"time_maa_{name}") for name in "wkvrg")
        return [x + change * (share + more) for share, more in zip(own, shares, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        to_decay, to_key, to_value, to_receptance, to_gate = self.mixed(x)
        speed = self.time_decay + torch.tanh(to_decay @ self.time_decay_w1) @ self.time_decay_w2
        r, k, v = self.receptance(to_receptance), self.key(to_key), self.value(to_value)
        read = recurrence(r, k, v, torch.exp(-torch.exp(speed)), self.time_faaaa)
        normed = self.ln_x(read.flatten(0, 1)).view_as(read)
        return self.output(normed * F.silu(self.gate(to_gate)))


class ChannelMix(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.time_shift = Shifted()
        place = torch.linspace(0.1, 0.9, N_EMBD)[None, None]
        share = 1.0 - place ** (1.0 - 0.8 * number / N_LAYER)
        self.time_maa_k = nn.Parameter(share + 0.1 * torch.rand(1, 1, N_EMBD))
        self.time_maa_r = nn.Parameter(share + 0.1 * torch.rand(1, 1, N_EMBD))
        self.key = nn.Linear(N_EMBD, DIM_FFN, bias=False)
        self.receptance = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.value = nn.Linear(DIM_FFN, N_EMBD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        change = self.time_shift(x) - x
        kept = self.key(x + change * self.time_maa_k).relu().square()
        let_through = self.receptance(x + change * self.time_maa_r).sigmoid()
        return let_through * self.value(kept)


class Block(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.layer_id = layer_id
        self.ln1, self.ln2 = nn.LayerNorm(N_EMBD), nn.LayerNorm(N_EMBD)
        if layer_id == 0:
            self.ln0 = nn.LayerNorm(N_EMBD)
        self.att, self.ffn = TimeMix(layer_id), ChannelMix(layer_id)

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
