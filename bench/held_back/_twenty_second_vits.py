"""A small VITS: a text's statistics spread over frames, a flow of a sound's latents to them, a decoder."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

LETTERS, LONGEST, HIDDEN, HEADS, DEPTH, WINDOW, SPAN, FILTERS, KERNEL = 9, 5, 12, 2, 6, 2, 5, 24, 3
BINS, LATENT, CHANNELS, SLOPE, RATE, DILATIONS = 10, 8, 16, 0.1, 2, (1, 3)


def conv(inputs: int, outputs: int, size: int = 1, rate: int = 1) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, size, padding=rate * (size - 1) // 2, dilation=rate)


class VitsAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.emb_rel_k, self.emb_rel_v = (nn.Parameter(torch.randn(1, SPAN, DEPTH) / 4) for _ in range(2))

    def _get_relative_embeddings(self, embeddings: Tensor, length: int) -> Tensor:
        """The embedding of each key's distance from each query, zero outside of the window: [S, S, D]."""
        steps = torch.arange(length, device=embeddings.device)
        distances = (steps - steps[:, None]).clamp(-WINDOW - 1, WINDOW + 1)
        return F.pad(embeddings[0], (0, 0, 1, 1))[distances + WINDOW + 1]

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        projected = self.q_proj(x) * DEPTH**-0.5, self.k_proj(x), self.v_proj(x)
        query, key, value = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in projected)
        keys = self._get_relative_embeddings(self.emb_rel_k, x.shape[1])
        values = self._get_relative_embeddings(self.emb_rel_v, x.shape[1])
        weights = query @ key.mT + torch.einsum("nhqd,qkd->nhqk", query, keys)
        probs = (weights + attention_mask).softmax(-1)
        output = probs @ value + torch.einsum("nhqk,qkd->nhqd", probs, values)
        return self.out_proj(output.transpose(1, 2).flatten(2))


class VitsFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_1, self.conv_2 = conv(HIDDEN, FILTERS, KERNEL), conv(FILTERS, HIDDEN, KERNEL)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor) -> Tensor:
        x = F.relu(self.conv_1((hidden_states * padding_mask).mT))
        return self.conv_2(x * padding_mask.mT).mT * padding_mask


class VitsEncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.layer_norm = VitsAttention(), nn.LayerNorm(HIDDEN)
        self.feed_forward, self.final_layer_norm = VitsFeedForward(), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, padding_mask: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.layer_norm(x + self.attention(x, attention_mask))
        return self.final_layer_norm(x + self.feed_forward(x, padding_mask))


class VitsTextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(LETTERS, HIDDEN, padding_idx=0)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(VitsEncoderLayer() for _ in range(2))})
        self.project = conv(HIDDEN, 2 * LATENT)

    def forward(self, input_ids: Tensor, padding_mask: Tensor) -> tuple[Tensor, ...]:
        x = self.embed_tokens(input_ids) * HIDDEN**0.5 * padding_mask
        attention_mask = (1 - padding_mask.mT)[:, None] * torch.finfo(x.dtype).min
        for layer in self.encoder["layers"]:
            x = layer(x, padding_mask, attention_mask)
        return (self.project((x * padding_mask).mT).mT * padding_mask).split(LATENT, 2)


class VitsWaveNet(nn.Module):
    def __init__(self, num_layers: int):
        super().__init__()
        rates, widths = [2**i for i in range(num_layers)], [2 * HIDDEN] * (num_layers - 1) + [HIDDEN]
        self.in_layers = nn.ModuleList(weight_norm(conv(HIDDEN, 2 * HIDDEN, KERNEL, r)) for r in rates)
        self.res_skip_layers = nn.ModuleList(weight_norm(conv(HIDDEN, width)) for width in widths)

    def forward(self, inputs: Tensor, padding_mask: Tensor) -> Tensor:
        outputs = torch.zeros_like(inputs)
        for layer, res_skip in zip(self.in_layers, self.res_skip_layers, strict=True):
            tanh, sigmoid = layer(inputs).split(HIDDEN, 1)
            *res, skip = res_skip(tanh.tanh() * sigmoid.sigmoid()).split(HIDDEN, 1)
            inputs, outputs = (inputs + res[0]) * padding_mask if res else inputs, outputs + skip
        return outputs * padding_mask


class VitsPosteriorEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_pre, self.conv_proj = conv(BINS, HIDDEN), conv(HIDDEN, 2 * LATENT)
        self.wavenet = VitsWaveNet(3)

    def forward(self, inputs: Tensor, padding_mask: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wavenet(self.conv_pre(inputs) * padding_mask, padding_mask)
        mean, log_stddev = (self.conv_proj(x) * padding_mask).split(LATENT, 1)
        return (mean + noise * log_stddev.exp()) * padding_mask, log_stddev


class VitsResidualCouplingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_pre, self.conv_post = conv(LATENT // 2, HIDDEN), conv(HIDDEN, LATENT // 2)
        self.wavenet = VitsWaveNet(2)

    def forward(self, inputs: Tensor, padding_mask: Tensor) -> Tensor:
        first_half, second_half = inputs.chunk(2, 1)
        x = self.wavenet(self.conv_pre(first_half) * padding_mask, padding_mask)
        return torch.cat([first_half, (self.conv_post(x) + second_half) * padding_mask], 1)


class VitsResidualCouplingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.flows = nn.ModuleList(VitsResidualCouplingLayer() for _ in range(2))

    def forward(self, inputs: Tensor, padding_mask: Tensor) -> Tensor:
        for flow in self.flows:
            inputs = flow(inputs, padding_mask).flip(1)
        return inputs


class HifiGanResidualBlock(nn.Module):
    def __init__(self, width: int, k: int):
        super().__init__()
        self.convs1 = nn.ModuleList(conv(width, width, k, rate) for rate in DILATIONS)
        self.convs2 = nn.ModuleList(conv(width, width, k) for _ in DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        for conv1, conv2 in zip(self.convs1, self.convs2, strict=True):
            x = x + conv2(F.leaky_relu(conv1(F.leaky_relu(x, SLOPE)), SLOPE))
        return x


class VitsHifiGan(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_pre, w = conv(LATENT, CHANNELS, 5), [CHANNELS >> i for i in range(3)]
        ups = (nn.ConvTranspose1d(w[i], w[i + 1], 2 * RATE, RATE, RATE // 2) for i in range(2))
        self.upsampler, self.conv_post = nn.ModuleList(ups), nn.Conv1d(w[2], 1, 5, padding=2, bias=False)
        self.resblocks = nn.ModuleList(HifiGanResidualBlock(w[i], k) for i, k in ((1, 3), (2, 5)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        for up, block in zip(self.upsampler, self.resblocks, strict=True):
            x = block(up(F.leaky_relu(x, SLOPE)))
        return self.conv_post(F.leaky_relu(x)).tanh().squeeze(1)


class VitsModel(nn.Module):
    """Tokens, frames [N, C, T] and their alignment [N, T, S] -> the sound again, and how far they are."""

    def __init__(self):
        super().__init__()
        self.text_encoder, self.posterior_encoder = VitsTextEncoder(), VitsPosteriorEncoder()
        self.flow, self.decoder = VitsResidualCouplingBlock(), VitsHifiGan()
        for name, weight in self.named_parameters():
            weight.data *= 0.7 if "embed" in name or "project" in name else 1.6
            if name.endswith(("bias", "original0")) or "norm" in name:
                nn.init.uniform_(weight, *((-0.4, 0.4) if name.endswith("bias") else (0.6, 1.5)))

    def forward(self, input_ids, attention_mask, spectrogram, spectrogram_mask, alignment, noise) -> tuple:
        text_mask, mask = attention_mask[..., None].to(noise), spectrogram_mask[:, None].to(noise)
        means, logs = self.text_encoder(input_ids, text_mask)
        latents, log_stddev = self.posterior_encoder(spectrogram, mask, noise)
        prior_latents, (means, logs) = self.flow(latents, mask), ((alignment @ x).mT for x in (means, logs))
        kl = logs - log_stddev - 0.5 + 0.5 * (prior_latents - means).square() * (-2 * logs).exp()
        return self.decoder(latents * mask), (kl * mask).sum() / mask.sum(), prior_latents, means, logs


def spoken() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Letters with blanks between, some frames long; each has a peak among the bins and a pitch."""
    counts, step = torch.tensor([[LONGEST], [2], [4], [3]]), torch.arange(2 * LONGEST + 1)
    text_mask = (step < 2 * counts + 1).long()
    letters = torch.randint(1, LETTERS, text_mask.shape) * (step % 2) * text_mask
    lengths = torch.randint(1, 3, text_mask.shape).maximum(2 * (counts == LONGEST)) * text_mask
    ends, time = lengths.cumsum(1)[:, None], torch.arange(4 * LONGEST + 2)[:, None]
    alignment = ((time < ends) & (time >= ends - lengths[:, None])).float()
    mask, letter = alignment.sum(2).long(), alignment @ letters[:, :, None].float()
    loud, bins, samples = (letter > 0).float(), torch.arange(BINS), torch.arange(RATE * RATE)
    peaks = loud * torch.exp(-0.5 * (bins - letter).square()) + 0.1 * torch.randn(*mask.shape, BINS)
    sound = (loud * 0.8 * torch.sin((0.2 + 0.3 * letter) * (samples + 0.5))).flatten(1)
    noise, peaks = torch.randn(len(mask), LATENT, len(time)), peaks.mT.contiguous()
    given = {"input_ids": letters, "attention_mask": text_mask, "alignment": alignment, "noise": noise}
    given |= {"spectrogram": peaks, "spectrogram_mask": mask}
    return given, {"sound": sound, "mask": mask.repeat_interleave(RATE * RATE, 1)}


def missed_and_far(outputs: tuple[Tensor, ...], target: dict[str, Tensor]) -> Tensor:
    """Squares of what the sound misses, where there is any, and some of the divergence."""
    sound, mask = target["sound"].to(outputs[0]), target["mask"].to(outputs[0])
    return 4 * ((outputs[0] - sound).square() * mask).sum() / mask.sum() + 0.1 * outputs[1]
