"""A small PatchTST: channels scaled, cut in patches, encoded each by itself, and scaled back."""

import math

import torch
from torch import Tensor, nn

SERIES, CHANNELS, LENGTH, FORECAST, PATCH, STRIDE = 3, 7, 57, 14, 9, 5
WIDTH, HEADS, HIDDEN, LAYERS = 24, 4, 40, 3


class PatchTSTAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj, self.v_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.q_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_output = torch.matmul(attn_weights.softmax(dim=-1), value_states).transpose(1, 2)
        return self.out_proj(attn_output.reshape(hidden_states.shape))


class PatchTSTBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.batchnorm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.batchnorm(inputs.transpose(1, 2)).transpose(1, 2)


class PatchTSTPatchify(nn.Module):
    """[N, T, C] -> [N, C, P, length]; the last value is repeated for a stride, which makes one more patch."""

    def __init__(self):
        super().__init__()
        self.patch_length, self.patch_stride = PATCH, STRIDE
        self.num_patches = (LENGTH - PATCH) // STRIDE + 2
        self.sequence_start = (LENGTH - PATCH) % STRIDE
        self.padding_patch_layer = nn.ReplicationPad1d((0, STRIDE))

    def forward(self, past_values: Tensor) -> Tensor:
        output = self.padding_patch_layer(past_values[:, self.sequence_start :].transpose(1, 2))
        return output.unfold(dimension=-1, size=self.patch_length, step=self.patch_stride)


class PatchTSTEncoderLayer(nn.Module):
    """The pre-norm layer, without attention across the channels."""

    def __init__(self):
        super().__init__()
        self.self_attn = PatchTSTAttention(WIDTH, HEADS)
        self.dropout_path1, self.norm_sublayer1 = nn.Identity(), PatchTSTBatchNorm()
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.ff = nn.Sequential(up, nn.GELU(), nn.Identity(), down)
        self.dropout_path3, self.norm_sublayer3 = nn.Identity(), PatchTSTBatchNorm()

    def forward(self, hidden_state: Tensor) -> Tensor:
        shape = hidden_state.shape
        hidden_state = hidden_state.view(shape[0] * shape[1], *shape[2:])
        hidden_state = hidden_state + self.dropout_path1(self.self_attn(self.norm_sublayer1(hidden_state)))
        hidden_state = hidden_state + self.dropout_path3(self.ff(self.norm_sublayer3(hidden_state)))
        return hidden_state.reshape(shape)


class PatchTSTEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_embedding = nn.Linear(PATCH, WIDTH)

    def forward(self, patch_input: Tensor) -> Tensor:
        return self.input_embedding(patch_input)


class PatchTSTPositionalEncoding(nn.Module):
    """Sines and cosines, centred and brought to a deviation of a tenth; they are not trained."""

    def __init__(self, num_patches: int):
        super().__init__()
        position_enc = torch.zeros(num_patches, WIDTH)
        position = torch.arange(0, num_patches).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, WIDTH, 2) * -(math.log(10000.0) / WIDTH))
        position_enc[:, 0::2] = torch.sin(position * div_term)
        position_enc[:, 1::2] = torch.cos(position * div_term)
        position_enc = position_enc - position_enc.mean()
        self.position_enc = nn.Parameter(position_enc / (position_enc.std() * 10), requires_grad=False)
        self.positional_dropout = nn.Identity()

    def forward(self, patch_input: Tensor) -> Tensor:
        return self.positional_dropout(patch_input + self.position_enc)


class PatchTSTEncoder(nn.Module):
    def __init__(self, num_patches: int):
        super().__init__()
        self.embedder = PatchTSTEmbedding()
        self.positional_encoder = PatchTSTPositionalEncoding(num_patches)
        self.layers = nn.ModuleList(PatchTSTEncoderLayer() for _ in range(LAYERS))

    def forward(self, patch_input: Tensor) -> Tensor:
        hidden_state = self.positional_encoder(self.embedder(patch_input))
        for encoder_layer in self.layers:
            hidden_state = encoder_layer(hidden_state)
        return hidden_state


class PatchTSTStdScaler(nn.Module):
    """Scales each channel of each series by the mean and the deviation of what was observed of it."""

    def __init__(self):
        super().__init__()
        self.dim, self.keepdim, self.minimum_scale = 1, True, 1e-5

    def forward(self, data: Tensor, observed_indicator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        denominator = observed_indicator.sum(self.dim, keepdim=self.keepdim).clamp_min(1.0)
        loc = (data * observed_indicator).sum(self.dim, keepdim=self.keepdim) / denominator
        variance = (((data - loc) * observed_indicator) ** 2).sum(self.dim, keepdim=self.keepdim)
        scale = torch.sqrt(variance / denominator + self.minimum_scale)
        return (data - loc) / scale, loc, scale


class PatchTSTScaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaler = PatchTSTStdScaler()

    def forward(self, data: Tensor, observed_indicator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.scaler(data, observed_indicator)


class PatchTSTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaler, self.patchifier = PatchTSTScaler(), PatchTSTPatchify()
        self.masking, self.encoder = nn.Identity(), PatchTSTEncoder(self.patchifier.num_patches)

    def forward(self, past_values: Tensor, past_observed_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled_past_values, loc, scale = self.scaler(past_values, past_observed_mask)
        return self.encoder(self.masking(self.patchifier(scaled_past_values))), loc, scale


class PatchTSTPredictionHead(nn.Module):
    """One projection for all the channels, of all the patches of one."""

    def __init__(self, num_patches: int):
        super().__init__()
        self.flatten, self.dropout = nn.Flatten(start_dim=2), nn.Identity()
        self.projection = nn.Linear(WIDTH * num_patches, FORECAST)

    def forward(self, embedding: Tensor) -> Tensor:
        return self.projection(self.dropout(self.flatten(embedding))).transpose(2, 1)


class PatchTSTForPrediction(nn.Module):
    """Values and which of them were observed, [N, T, C] -> forecasts, and the channels' means and scales."""

    def __init__(self):
        super().__init__()
        self.model = PatchTSTModel()
        self.head = PatchTSTPredictionHead(self.model.patchifier.num_patches)
        self.apply(draw)

    def forward(self, past_values: Tensor, past_observed_mask: Tensor) -> dict[str, Tensor]:
        last_hidden_state, loc, scale = self.model(past_values, past_observed_mask)
        y_hat = self.head(last_hidden_state)
        return {"prediction_outputs": y_hat * scale + loc, "loc": loc, "scale": scale}


def draw(module: nn.Module) -> None:
    """All that is trained or kept is drawn."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.8 / math.sqrt(module.in_features))
        nn.init.normal_(module.bias, std=0.1)
    elif isinstance(module, nn.BatchNorm1d):
        nn.init.normal_(module.weight, 1, 0.2), nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(module.running_mean, std=0.2), nn.init.uniform_(module.running_var, 0.5, 1.5)


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Seasons and trends with gaps, some of which begin late; the future with which of it was observed."""
    shape, time = (SERIES, 1, CHANNELS), torch.arange(LENGTH + FORECAST)[:, None]
    day, week = (torch.sin(math.tau * (time / p + torch.rand(shape))) for p in (12, 29))
    values = 2 * torch.randn(shape) + (0.5 + torch.rand(shape)) * (day + 0.6 * week)
    values = values + torch.randn(shape) * (time / LENGTH - 0.5) + 0.1 * torch.randn_like(values)
    seen = (torch.rand_like(values) > 0.1) & (time >= torch.randint(-20, 15, shape))
    past = (values * seen)[:, :LENGTH].requires_grad_()  # theirs is asked for
    inputs = {"past_values": past, "past_observed_mask": seen[:, :LENGTH]}
    return inputs, torch.stack([values * seen, seen.to(values)], 3)[:, LENGTH:]


def observed_error(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The mean square of the errors of what was observed."""
    values, seen = target.unbind(3)
    return (seen * (outputs["prediction_outputs"] - values) ** 2).sum() / seen.sum().clamp(min=1)
