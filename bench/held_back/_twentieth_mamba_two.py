"""A small Mamba-2 language model: a scan in chunks, each chunk as masked attention, states between them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, TEXTS, PAD = 23, 14, 4, 0
WIDTH, INNER, HEADS, GROUPS, STATE, KERNEL, CHUNK, LAYERS = 16, 32, 4, 2, 6, 4, 4, 3
LIMITS, EPS = (0.12, 1.0), 1e-5


def pad_tensor_by_size(x: Tensor, size: int) -> Tensor:
    """[N, T, ...] -> [N, T + size, ...], with zeros at the end."""
    return F.pad(x, (*[0, 0] * (x.ndim - 2), 0, size))


def reshape_into_chunks(x: Tensor, pad_size: int, chunk_size: int) -> Tensor:
    """[N, T, ...] -> [N, chunks, chunk, ...]."""
    return pad_tensor_by_size(x, pad_size).unflatten(1, (-1, chunk_size))


def segment_sum(x: Tensor) -> Tensor:
    """[..., T] -> [..., T, T]: the sum of what stands behind j up to i, minus infinity where j > i."""
    size = x.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=x.device).tril(-1)
    sums = x[..., None].expand(*x.shape, size).masked_fill(~below, 0).cumsum(-2)
    upto = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    return sums.masked_fill(~upto, -torch.inf)


def apply_mask_to_padding_states(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Zeros where a token is padding."""
    if attention_mask is None:
        return hidden_states
    return hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)


class Mamba2RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = EPS):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class MambaRMSNormGated(Mamba2RMSNorm):
    """The gate comes before the norm."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states * F.silu(gate))


class Mamba2Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, INNER // HEADS
        self.n_groups, self.ssm_state_size = GROUPS, STATE
        self.intermediate_size, self.conv_dim = INNER, INNER + 2 * GROUPS * STATE
        self.chunk_size, self.time_step_limit = CHUNK, LIMITS
        channels = self.conv_dim
        self.conv1d = nn.Conv1d(channels, channels, KERNEL, groups=channels, padding=KERNEL - 1)
        self.act = nn.SiLU()
        self.in_proj = nn.Linear(WIDTH, INNER + self.conv_dim + HEADS, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(HEADS))
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        self.norm = MambaRMSNormGated(INNER)
        self.D = nn.Parameter(torch.ones(HEADS))
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, input_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_states.shape[1]
        input_states = apply_mask_to_padding_states(input_states, attention_mask)
        sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, mixed_states, dt = self.in_proj(input_states).split(sizes, -1)
        convolved = self.conv1d(mixed_states.transpose(1, 2))[..., :length].transpose(1, 2)
        mixed_states = apply_mask_to_padding_states(self.act(convolved), attention_mask)
        sizes = [self.intermediate_size, *[self.n_groups * self.ssm_state_size] * 2]
        hidden_states, b, c = mixed_states.split(sizes, -1)
        dt = F.softplus(dt + self.dt_bias).clamp(*self.time_step_limit)
        hidden_states = hidden_states.unflatten(2, (self.num_heads, self.head_dim))
        b, c = (x.unflatten(2, (self.n_groups, self.ssm_state_size)) for x in (b, c))
        b, c = (x.repeat_interleave(self.num_heads // self.n_groups, 2) for x in (b, c))
        y = self.scan(hidden_states, dt, b, c) + self.D[:, None] * hidden_states
        return self.out_proj(self.norm(y.flatten(2), gate))

    def scan(self, hidden_states: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """[N, T, H, P], [N, T, H] and twice [N, T, H, S] -> [N, T, H, P]."""
        length = dt.shape[1]
        pad_size = -length % self.chunk_size
        given = hidden_states * dt[..., None], -torch.exp(self.A_log) * dt, b, c
        x, decay, b, c = (reshape_into_chunks(t, pad_size, self.chunk_size) for t in given)
        decay = decay.permute(0, 3, 1, 2)
        decay_cumsum = decay.cumsum(-1)

        scores = (c[:, :, :, None] * b[:, :, None]).sum(-1)
        masked = scores * torch.exp(segment_sum(decay)).permute(0, 2, 3, 4, 1)
        y_diag = (masked[..., None] * x[:, :, None]).sum(3)

        decay_states = torch.exp(decay_cumsum[..., -1:] - decay_cumsum).permute(0, 2, 3, 1)
        states = ((b * decay_states[..., None])[..., None, :] * x[..., None]).sum(2)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        decay_chunk = torch.exp(segment_sum(F.pad(decay_cumsum[..., -1], (1, 0)))).transpose(1, 3)
        states = (decay_chunk[..., None, None] * states[:, :, None]).sum(1)[:, :-1]

        state_decay_out = torch.exp(decay_cumsum).permute(0, 2, 3, 1)
        y_off = (c[..., None, :] * states[:, :, None]).sum(-1) * state_decay_out[..., None]
        return (y_diag + y_off).flatten(1, 2)[:, :length]


class Mamba2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer = Mamba2RMSNorm(WIDTH), Mamba2Mixer()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return hidden_states + self.mixer(self.norm(hidden_states), attention_mask)


class Mamba2Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mamba2Block() for _ in range(LAYERS))
        self.norm_f = Mamba2RMSNorm(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden_states = self.embeddings(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return self.norm_f(hidden_states)


class Mamba2ForCausalLM(nn.Module):
    """Tokens [N, T] and which of them are real -> logits [N, T, V] and the last hidden state."""

    def __init__(self):
        super().__init__()
        self.backbone, self.lm_head = Mamba2Model(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.backbone.embeddings.weight, std=0.7)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            elif isinstance(module, Mamba2RMSNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            elif isinstance(module, nn.Conv1d):
                nn.init.normal_(module.weight, std=0.5)
                nn.init.normal_(module.bias, std=0.3)
            elif isinstance(module, Mamba2Mixer):
                with torch.no_grad():
                    dt = torch.empty(HEADS).uniform_(0.2, 0.9)
                    module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
                    module.A_log.uniform_(0.8, 3.0).log_()
                    module.D.uniform_(0.4, 1.3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden_states = self.backbone(input_ids, attention_mask)
        return {"logits": self.lm_head(hidden_states), "last_hidden_state": hidden_states}


def counted() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens counted on by a step that each text keeps, a few of them misread, padded on the left."""
    start, step = torch.randint(VOCABULARY - 1, (TEXTS, 1)), torch.randint(1, 5, (TEXTS, 1))
    tokens = 1 + (start + step * torch.arange(LENGTH + 1)) % (VOCABULARY - 1)
    tokens = tokens.where(torch.rand(tokens.shape) > 0.08, torch.randint(1, VOCABULARY, tokens.shape))
    real = torch.arange(LENGTH) >= torch.randint(1, 6, (TEXTS, 1))
    given = {"input_ids": tokens[:, :-1].where(real, PAD), "attention_mask": real.long()}
    return given, tokens[:, 1:].where(real, -100)


def next_token(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy of the next token where there is one."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=-100)
