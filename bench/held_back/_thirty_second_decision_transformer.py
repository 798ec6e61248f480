"""A small Decision Transformer: returns, states and actions of padded trajectories under a GPT-2."""

import math

import torch
from torch import Tensor, nn

STATE, ACTION, HIDDEN, INNER, HEADS, LAYERS = 11, 5, 24, 56, 4, 3
EPISODE, POSITIONS, LENGTH, BATCH, EPS = 40, 30, 7, 8, 1e-5


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.8 / math.sqrt(nx))
        self.bias = nn.Parameter(0.1 * torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(size_out)


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class DecisionTransformerGPT2Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.c_attn = Conv1D(3 * HIDDEN, HIDDEN)
        self.c_proj = Conv1D(HIDDEN, HIDDEN)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        parts = self.c_attn(hidden_states).split(HIDDEN, dim=2)
        query, key, value = (x.view(shape).transpose(1, 2) for x in parts)
        weights = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_dim)
        weights = torch.softmax(weights + attention_mask, dim=-1)
        output = torch.matmul(weights, value).transpose(1, 2)
        return self.c_proj(output.reshape(hidden_states.shape))


class DecisionTransformerGPT2MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = Conv1D(INNER, HIDDEN)
        self.c_proj = Conv1D(HIDDEN, INNER)
        self.act = NewGELUActivation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(hidden_states)))


class DecisionTransformerGPT2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN, eps=EPS)
        self.attn = DecisionTransformerGPT2Attention()
        self.ln_2 = nn.LayerNorm(HIDDEN, eps=EPS)
        self.mlp = DecisionTransformerGPT2MLP()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.attn(self.ln_1(hidden_states), attention_mask) + hidden_states
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class DecisionTransformerGPT2Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(POSITIONS, HIDDEN)
        self.h = nn.ModuleList([DecisionTransformerGPT2Block() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        length = inputs_embeds.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=inputs_embeds.device).tril()
        allowed = causal & attention_mask.bool()[:, None, None, :]
        mask = torch.zeros(allowed.shape).to(inputs_embeds)
        mask = mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)
        hidden_states = inputs_embeds + self.wpe(position_ids)
        for block in self.h:
            hidden_states = block(hidden_states, mask)
        return self.ln_f(hidden_states)


class DecisionTransformerModel(nn.Module):
    """Predictions of the states [N, T, 11], actions [N, T, 5] and returns [N, T, 1]."""

    def __init__(self):
        super().__init__()
        self.encoder = DecisionTransformerGPT2Model()
        self.embed_timestep = nn.Embedding(EPISODE, HIDDEN)
        self.embed_return = nn.Linear(1, HIDDEN)
        self.embed_state = nn.Linear(STATE, HIDDEN)
        self.embed_action = nn.Linear(ACTION, HIDDEN)
        self.embed_ln = nn.LayerNorm(HIDDEN)
        self.predict_state = nn.Linear(HIDDEN, STATE)
        self.predict_action = nn.Sequential(nn.Linear(HIDDEN, ACTION), nn.Tanh())
        self.predict_return = nn.Linear(HIDDEN, 1)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.2)
                nn.init.normal_(module.bias, 0.0, 0.1)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.4)

    def forward(
        self,
        states: Tensor,
        actions: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        attention_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch_size, seq_length = states.shape[:2]
        time_embeddings = self.embed_timestep(timesteps)
        state_embeddings = self.embed_state(states) + time_embeddings
        action_embeddings = self.embed_action(actions) + time_embeddings
        returns_embeddings = self.embed_return(returns_to_go) + time_embeddings
        stacked_inputs = torch.stack((returns_embeddings, state_embeddings, action_embeddings), dim=1)
        stacked_inputs = stacked_inputs.permute(0, 2, 1, 3).reshape(batch_size, 3 * seq_length, HIDDEN)
        stacked_inputs = self.embed_ln(stacked_inputs)
        stacked_mask = torch.stack((attention_mask, attention_mask, attention_mask), dim=1)
        stacked_mask = stacked_mask.permute(0, 2, 1).reshape(batch_size, 3 * seq_length)
        x = self.encoder(stacked_inputs, stacked_mask, torch.zeros_like(stacked_mask))
        x = x.reshape(batch_size, seq_length, 3, HIDDEN).permute(0, 2, 1, 3)
        return_preds = self.predict_return(x[:, 2])
        state_preds = self.predict_state(x[:, 2])
        action_preds = self.predict_action(x[:, 1])
        return state_preds, action_preds, return_preds


def trajectories() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Windows of swinging states; the early ones begin at time zero and are padded at the left."""
    length = torch.randint(3, LENGTH + 1, (BATCH, 1))
    length[0], length[1] = LENGTH, 4
    start = torch.where(length < LENGTH, 0, torch.randint(0, EPISODE - LENGTH, (BATCH, 1)))
    place = torch.arange(LENGTH) - (LENGTH - length)
    mask = (place >= 0).long()
    time = (start + place) * mask
    later = torch.cat([time, time[:, -1:] + 1], 1)[..., None]
    states = torch.sin(later * (0.2 + torch.rand(BATCH, 1, STATE)) + 6 * torch.rand(BATCH, 1, STATE))
    states = states + 0.1 * torch.randn(states.shape)
    actions = torch.tanh(states[:, :-1] @ torch.randn(STATE, ACTION) / 3)
    returns = (EPISODE - later) / EPISODE * (0.5 + torch.rand(BATCH, 1, 1))
    kept = mask[..., None]
    inputs = (states[:, :-1] * kept, actions * kept, returns[:, :-1] * kept, time, mask)
    return inputs, (states[:, 1:], actions, returns[:, 1:], mask)


def masked_errors(outputs: tuple[Tensor, ...], target: tuple[Tensor, ...]) -> Tensor:
    """The mean squared errors of states, actions and returns where the mask is one, by three."""
    *wanted, mask = target
    kept = mask > 0
    errors = [(x[kept] - y[kept]).square().mean() for x, y in zip(outputs, wanted, strict=True)]
    return sum(errors) / 3
