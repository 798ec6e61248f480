"""A small world model after DreamerV3: images and actions of few steps, categorical latents, three heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEPTHS, HIDDEN, DETER, STOCH, DISCRETE, ACTIONS = (6, 8, 10), 20, 16, 4, 5, 3
ROWS, STEPS, SIDE, GRID, FREE = 4, 6, 16, 2, 2.0


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.3)
    elif isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.3)


class ImgChLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        for channels, depth in zip((3, *DEPTHS), DEPTHS, strict=False):
            conv = nn.Conv2d(channels, depth, 4, 2, 1, bias=False)
            layers += [conv, ImgChLayerNorm(depth, 1e-3), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, obs: Tensor) -> Tensor:
        x = self.layers((obs - 0.5).flatten(0, 1).permute(0, 3, 1, 2))
        return x.permute(0, 2, 3, 1).reshape(*obs.shape[:2], -1)


class ConvDecoder(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self._linear_layer = nn.Linear(features, GRID**2 * DEPTHS[-1])
        layers = []
        for channels, depth in zip(DEPTHS[::-1], DEPTHS[-2::-1], strict=False):
            conv = nn.ConvTranspose2d(channels, depth, 4, 2, 1, bias=False)
            layers += [conv, ImgChLayerNorm(depth, 1e-3), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(depth, 3, 4, 2, 1))

    def forward(self, features: Tensor) -> Tensor:
        x = self._linear_layer(features).reshape(-1, GRID, GRID, DEPTHS[-1])
        x = self.layers(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x.unflatten(0, features.shape[:2]) + 0.5


def dense(inputs: int, units: int) -> list[nn.Module]:
    return [nn.Linear(inputs, units, bias=False), nn.LayerNorm(units, eps=1e-3), nn.SiLU()]


def mlp(features: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*dense(features, HIDDEN), *dense(HIDDEN, HIDDEN), nn.Linear(HIDDEN, outputs))


class GRUCell(nn.Module):
    def __init__(self, inputs: int, size: int):
        super().__init__()
        self.GRU_linear = nn.Linear(inputs + size, 3 * size, bias=False)
        self.GRU_norm = nn.LayerNorm(3 * size, eps=1e-3)

    def forward(self, inputs: Tensor, state: Tensor) -> Tensor:
        parts = self.GRU_norm(self.GRU_linear(torch.cat([inputs, state], -1)))
        reset, cand, update = parts.chunk(3, -1)
        cand = torch.tanh(reset.sigmoid() * cand)
        update = torch.sigmoid(update - 1)
        return update * cand + (1 - update) * state


class UnimixLogits(nn.Linear):
    """Logarithms of probabilities [..., STOCH, DISCRETE], a hundredth of which is spread evenly."""

    def forward(self, x: Tensor) -> Tensor:
        probs = super().forward(x).unflatten(-1, (STOCH, DISCRETE)).softmax(-1)
        return (0.99 * probs + 0.01 / DISCRETE).log()


class OneHotSample(nn.Module):
    """A sample by the noise given, in eval mode or without noise the mode; gradients go straight through."""

    def forward(self, logits: Tensor, noise: Tensor | None = None) -> Tensor:
        probs = logits.softmax(-1)
        scores = logits + noise if self.training and noise is not None else logits
        hard = F.one_hot(scores.argmax(-1), DISCRETE).to(probs)
        return hard + probs - probs.detach()


class RSSM(nn.Module):
    def __init__(self, embed: int):
        super().__init__()
        self._img_in_layers = nn.Sequential(*dense(STOCH * DISCRETE + ACTIONS, HIDDEN))
        self._cell, self._img_out_layers = GRUCell(HIDDEN, DETER), nn.Sequential(*dense(DETER, HIDDEN))
        self._obs_out_layers = nn.Sequential(*dense(DETER + embed, HIDDEN))
        self._imgs_stat_layer = UnimixLogits(HIDDEN, STOCH * DISCRETE)
        self._obs_stat_layer = UnimixLogits(HIDDEN, STOCH * DISCRETE)
        self._sample = OneHotSample()
        self.W = nn.Parameter(0.7 * torch.randn(1, DETER))

    def initial(self, rows: int) -> tuple[Tensor, Tensor]:
        deter = self.W.tanh().repeat(rows, 1)
        return deter, self._sample(self._imgs_stat_layer(self._img_out_layers(deter)))

    def obs_step(self, state: tuple, action: Tensor, embed: Tensor, first: Tensor, noise: Tensor) -> tuple:
        start, first = self.initial(len(action)), first[:, None]
        action = action.masked_fill(first, 0)
        deter = torch.where(first, start[0], state[0])
        stoch = torch.where(first[..., None], start[1], state[1])
        deter = self._cell(self._img_in_layers(torch.cat([stoch.flatten(1), action], -1)), deter)
        prior = self._imgs_stat_layer(self._img_out_layers(deter))
        post = self._obs_stat_layer(self._obs_out_layers(torch.cat([deter, embed], -1)))
        return deter, self._sample(post, noise), post, prior

    def forward(self, embed: Tensor, action: Tensor, is_first: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        """What is kept, the samples, and the logits after and before the image was seen, all [B, T, ...]."""
        steps, state = [], self.initial(len(action))
        for inputs in zip(*(x.unbind(1) for x in (action, embed, is_first, noise)), strict=True):
            steps.append(self.obs_step(state, *inputs))
            state = steps[-1][:2]
        return tuple(torch.stack(values, 1) for values in zip(*steps, strict=True))


class DiscDist(nn.Module):
    """Minus the log likelihood of a number as two neighbours among the buckets of its symlog."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buckets", torch.linspace(-3.0, 3.0, 13))

    def forward(self, logits: Tensor, value: Tensor) -> Tensor:
        x, count = value.sign() * value.abs().log1p(), len(self.buckets)
        below = ((self.buckets <= x[..., None]).sum(-1) - 1).clamp(0, count - 1)
        above = (count - (self.buckets > x[..., None]).sum(-1)).clamp(0, count - 1)
        to_below = torch.where(below == above, 1, (self.buckets[below] - x).abs())
        to_above = torch.where(below == above, 1, (self.buckets[above] - x).abs())
        share = (to_below / (to_below + to_above))[..., None]
        target = F.one_hot(below, count) * (1 - share) + F.one_hot(above, count) * share
        return -(target * logits.log_softmax(-1)).sum(-1)


class KLLoss(nn.Module):
    def forward(self, post: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        def divergence(p: Tensor, q: Tensor) -> Tensor:
            kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum((-2, -1))
            return kl.clamp(min=FREE)

        return divergence(post.detach(), prior), divergence(post, prior.detach())


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.dynamics = ConvEncoder(), RSSM(GRID**2 * DEPTHS[-1])
        size = STOCH * DISCRETE + DETER
        heads = {"decoder": ConvDecoder(size), "reward": mlp(size, 13), "cont": mlp(size, 1)}
        self.heads = nn.ModuleDict(heads)
        self.reward_dist, self.kl_loss = DiscDist(), KLLoss()
        self.apply(varied)

    def forward(self, image, action, is_first, noise, reward, is_terminal) -> dict[str, Tensor]:
        """The decoded images and the other losses of each step."""
        deter, stoch, post, prior = self.dynamics(self.encoder(image), action, is_first, noise)
        features = torch.cat([stoch.flatten(2), deter], -1)
        dyn, rep = self.kl_loss(post, prior)
        cont, goes_on = self.heads["cont"](features)[..., 0], (~is_terminal).to(features)
        return {
            "image": self.heads["decoder"](features),
            "reward": self.reward_dist(self.heads["reward"](features), reward),
            "cont": F.binary_cross_entropy_with_logits(cont, goes_on, reduction="none"),
            "dyn": dyn,
            "rep": rep,
        }


def episodes() -> tuple[dict[str, Tensor], Tensor]:
    """Smooth images; episodes may start at any step and end before the next one starts."""
    image = F.interpolate(torch.rand(ROWS * STEPS, 3, 5, 5), (SIDE, SIDE), mode="bilinear")
    image = image.unflatten(0, (ROWS, STEPS)).permute(0, 1, 3, 4, 2).contiguous()
    first = torch.rand(ROWS, STEPS) < 0.15
    first[0, 0] = first[1, 2] = first[2, 4] = True
    size = 1.7 * torch.randn(ROWS, STEPS)
    batch = {
        "image": image,
        "action": torch.randn(ROWS, STEPS, ACTIONS).tanh(),
        "is_first": first,
        "noise": -torch.empty(ROWS, STEPS, STOCH, DISCRETE).exponential_().log(),
        "reward": size.sign() * size.abs().expm1(),
        "is_terminal": F.pad(first[:, 1:], (0, 1)) & (torch.rand(ROWS, STEPS) < 0.7),
    }
    return batch, image


def scaled(outputs: dict[str, Tensor], image: Tensor) -> Tensor:
    """The sum of the losses, each a mean over the steps, those of the divergence scaled."""
    decoded = (outputs["image"] - image.to(outputs["image"])).square().sum((2, 3, 4)).mean()
    means = {name: values.mean() for name, values in outputs.items() if name != "image"}
    return decoded + means["reward"] + means["cont"] + 0.5 * means["dyn"] + 0.1 * means["rep"]
