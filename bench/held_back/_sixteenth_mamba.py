"""A small Mamba: a stream of tokens through gated mixers whose state decays as each token asks for."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

END, IGNORED, STEPS = 0, -100, 14


@dataclass(frozen=True)
class MambaConfig:
    vocab_size: int = 32
    hidden_size: int = 16
    state_size: int = 5
    num_hidden_layers: int = 3
    conv_kernel: int = 4
    expand: int = 2
    time_step_rank: int = 3
    layer_norm_epsilon: float = 1e-5

    @property
    def intermediate_size(self) -> int:
        return self.expand * self.hidden_size


class MambaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).uniform_(0.6, 1.4))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        power = x.square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(power + self.variance_epsilon))


class MambaMixer(nn.Module):
    """A causal convolution, then a linear recurrence whose rate, input and output depend on the token."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        inner, states, rank = config.intermediate_size, config.state_size, config.time_step_rank
        self.sizes, kernel = (rank, states, states), config.conv_kernel
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.act = nn.SiLU()
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log() + 0.2 * torch.randn(inner, states))
        self.D = nn.Parameter(torch.empty(inner).uniform_(0.5, 1.5))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.start()

    def start(self) -> None:
        for linear in (self.in_proj, self.x_proj, self.dt_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.conv1d.weight, std=0.5)
        nn.init.normal_(self.conv1d.bias, std=0.3)
        steps = torch.empty_like(self.dt_proj.bias).uniform_(-3, -0.5).exp()
        with torch.no_grad():
            self.dt_proj.bias.copy_(steps.expm1().log())

    def scan(self, x: Tensor, steps: Tensor, given: Tensor, read: Tensor) -> Tensor:
        """The state [N, C, S] over time; all of ``x`` and ``steps`` is [N, C, T], the others [N, T, S]."""
        rates = -torch.exp(self.A_log)
        kept = torch.exp(steps[..., None] * rates[:, None])
        fed = steps[..., None] * given[:, None] * x[..., None]
        state, outputs = torch.zeros_like(fed[:, :, 0]), []
        for t in range(x.shape[2]):
            state = kept[:, :, t] * state + fed[:, :, t]
            outputs.append((state @ read[:, t, :, None])[..., 0])
        return torch.stack(outputs, 2)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x, gate = self.in_proj(x).transpose(1, 2).chunk(2, 1)
        mask = attention_mask[:, None]
        x = self.conv1d(x * mask)[..., : x.shape[2]]
        x = self.act(x) * mask
        low, given, read = self.x_proj(x.transpose(1, 2)).split(self.sizes, -1)
        steps = F.softplus(self.dt_proj(low)).transpose(1, 2)
        y = self.scan(x, steps, given, read) + x * self.D[:, None]
        y = y * self.act(gate)
        return self.out_proj(y.transpose(1, 2))


class MambaBlock(nn.Module):
    def __init__(self, config: MambaConfig):
        super().__init__()
        self.norm = MambaRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MambaMixer(config)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x), attention_mask)


class MambaModel(nn.Module):
    def __init__(self, config: MambaConfig):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm_f = MambaRMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.norm_f(x)


class MambaForCausalLM(nn.Module):
    """Token ids and their mask [N, T] -> logits [N, T, vocabulary], by the table of the embeddings."""

    def __init__(self, config: MambaConfig | None = None):
        super().__init__()
        self.config = config = config or MambaConfig()
        self.backbone = MambaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.backbone.embeddings.weight, std=0.4)
        self.lm_head.weight = self.backbone.embeddings.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.backbone(input_ids, attention_mask))


def prompts() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of two sentences, each ended by the token that also fills up the shorter rows on the left."""
    ids = [torch.randint(2, 32, (3,))]
    for _ in range(STEPS - 1):
        ids.append((7 * ids[-1] + torch.randint(3, (3,))) % 30 + 2)
    ids = torch.stack(ids, 1).scatter(1, torch.randint(7, 11, (3, 1)), END)
    mask = torch.arange(STEPS) >= torch.tensor([0, 3, 5])[torch.randperm(3), None]
    batch = {"input_ids": ids.masked_fill(~mask, END), "attention_mask": mask.long()}
    return batch, ids.masked_fill(~mask, IGNORED)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
