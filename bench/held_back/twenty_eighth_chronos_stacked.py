"""A port of a small Chronos-Bolt: one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._twenty_eighth_chronos import (
    HEAD,
    HEADS,
    HORIZON,
    PATCH,
    QUANTILES,
    ChronosBolt,
)
from bench.held_back.twenty_eighth_chronos import task


def attention_sheet(a: nn.Module) -> Tensor:
    return torch.cat([a.q.weight, a.k.weight, a.v.weight, a.o.weight.T])


class StackedChronos(Port):
    """Stacks of all attentions, of all feed-forward layers and of all norms, and loops over them."""

    def take(self, model: ChronosBolt) -> None:
        layers = [x for s in (model.encoder, model.decoder) for block in s.block for x in block.layer]
        kinds = [next(iter(x._modules)) for x in layers]
        dense = [x.DenseReluDense for x in layers if hasattr(x, "DenseReluDense")]
        pairs = zip(layers, kinds, strict=True)
        self.a = pile(attention_sheet(getattr(x, k)) for x, k in pairs if k.endswith("Attention"))
        self.f = pile(torch.cat([x.wi.weight, x.wo.weight.T]) for x in dense)
        ends = [model.encoder.final_layer_norm, model.decoder.final_layer_norm]
        self.g = pile(x.weight for x in [*(x.layer_norm for x in layers), *ends])
        firsts = [x.block[0].layer[0].SelfAttention for x in (model.encoder, model.decoder)]
        self.table = pile(x.relative_attention_bias.weight for x in firsts)
        self.tokens = leaf(model.shared.weight)
        for name, x in (("enter", model.input_patch_embedding), ("leave", model.output_patch_embedding)):
            first = torch.cat([x.hidden_layer.weight.T, x.hidden_layer.bias[None]])
            parts = x.output_layer, x.residual_layer
            last = torch.cat([y for z in parts for y in (z.weight.T, z.bias[None])])
            (
                self.register_parameter(name + "_in", leaf(first)),
                self.register_parameter(name + "_out", leaf(last)),
            )

    def two(self, name: str, x: Tensor) -> Tensor:
        first, last = self.get_parameter(name + "_in"), self.get_parameter(name + "_out")
        x = F.pad(x, (0, 1), value=1)
        return torch.cat([F.pad((x @ first).relu(), (0, 1), value=1), x], -1) @ last

    def norm(self, i: int, x: Tensor) -> Tensor:
        if self.fault == "chronos_first_decoder_feed_forward_norm_takes_off_the_mean" and i == 6:
            x = x - x.mean(-1, True)
        eps = 1e-2 if self.fault == "chronos_last_norm_with_a_large_eps" and i == 11 else 1e-6
        return self.g[i] * x / (x.square().mean(-1, True) + eps).sqrt()

    def attend(self, i: int, x: Tensor, source: Tensor, bias: Tensor | float, seen: Tensor | None) -> Tensor:
        y, (q, k, v, o) = 0, self.a[i].chunk(4)
        for h in range(HEADS):
            rows = slice(h * HEAD, (h + 1) * HEAD)
            score = x @ (q[rows].T @ k[rows]) @ source.mT + (bias[..., h] if torch.is_tensor(bias) else 0)
            power = (score - score.detach().amax(-1, True)).exp()
            power = power if seen is None else power * seen[:, None]
            y = y + power / power.sum(-1, True) @ (source @ (v[rows].T @ o[rows]))
        return y

    def dense(self, i: int, x: Tensor) -> Tensor:
        up, down = self.f[i].chunk(2)
        return F.linear(x, up).relu() @ down

    def bias(self, count: int) -> Tensor:
        at = torch.arange(count, device=self.table.device)
        ahead = at - at[:, None]
        if self.fault == "chronos_relative_positions_counted_from_the_key":
            ahead = -ahead
        edges = torch.tensor([1, 2, 3, 4, 6], device=at.device)
        return self.table[0][torch.bucketize(ahead.abs(), edges, right=True) + 6 * (ahead > 0)]

    def forward(self, context: Tensor, target: Tensor, target_mask: Tensor) -> dict[str, Tensor]:
        seen = ~context.isnan()
        x, count = context.nan_to_num(), seen.sum(1)[:, None]
        loc = x.sum(1)[:, None] / count
        scale = ((torch.where(seen, x - loc, 0) ** 2).sum(1)[:, None] / count) ** 0.5
        pad = (-x.shape[1] % PATCH, 0)
        pad = pad[::-1] if self.fault == "chronos_short_context_filled_up_at_its_end" else pad
        x = torch.stack([torch.where(seen, x - loc, 0) / scale, seen.to(x)], 1)
        x = F.pad(x, pad).unflatten(2, (-1, PATCH)).transpose(1, 2).flatten(2)
        seen = F.pad(x[..., PATCH:].sum(2) > 0, (0, 1), value=True)
        x = torch.cat([self.two("enter", x), self.tokens[1:].expand(len(x), 1, -1)], 1)
        bias = self.bias(x.shape[1])
        for i in range(2):
            y = self.norm(2 * i, x)
            x = x + self.attend(i, y, y, bias, seen)
            x = x + self.dense(i, self.norm(2 * i + 1, x))
        memory, y = self.norm(10, x), self.tokens[:1].expand(len(x), 1, -1)
        for i in range(2):
            own = self.norm(4 + 3 * i, y)
            y = y + self.attend(2 + 2 * i, own, own, self.table[1][:1, None], None)
            y = y + self.attend(3 + 2 * i, self.norm(5 + 3 * i, y), memory, 0.0, seen)
            y = y + self.dense(2 + i, self.norm(6 + 3 * i, y))
        y = self.two("leave", self.norm(11, y)).reshape(-1, len(QUANTILES), HORIZON).mT
        miss, level = ((target - loc) / scale)[..., None] - y, torch.tensor(QUANTILES).to(y)
        loss = (miss.abs() + (2 * level - 1) * miss).mean(2) * target_mask
        return {"quantile_preds": (y * scale[..., None] + loc[..., None]).mT, "loss": loss.sum(1).mean()}


right(task, "chronos_of_stacked_weights", "packed stacks, products of weights, loops", StackedChronos)
wrong(
    task,
    StackedChronos,
    chronos_short_context_filled_up_at_its_end=("padding on the other side", "patch"),
    chronos_relative_positions_counted_from_the_key=(
        "a sign of the position",
        "encoder.block.0.layer.0.SelfAttention",
    ),
    chronos_first_decoder_feed_forward_norm_takes_off_the_mean=(
        "another norm",
        "decoder.block.0.layer.2.layer_norm",
    ),
    chronos_last_norm_with_a_large_eps=("another eps", "decoder.final_layer_norm"),
)
