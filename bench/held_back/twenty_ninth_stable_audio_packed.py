"""A port of a small Stable Audio: one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._twenty_ninth_stable_audio import StableAudio
from bench.held_back._twenty_ninth_stable_audio_parts import HEAD, LATENT
from bench.held_back._twenty_ninth_stable_audio_rows import normed
from bench.held_back.twenty_ninth_stable_audio import BOTTLENECK, DECODER, LAYERS, task


class StackedAudio(Port):
    """Weights by kind, piled over the layers; the codec is a list of moves read from flat weights."""

    def take(self, model: StableAudio) -> None:
        codec, dit = model.pretransform, model.model
        self.p, self.moves = nn.ParameterList(), {}
        for name, part in (("down", codec.encoder), ("up", codec.decoder)):
            self.moves[name] = self.read(part.layers)
        layers, sides = dit.transformer.layers, ("self_attn", "cross_attn")
        norms = [(x.pre_norm, x.cross_attend_norm, x.ff_norm) for x in layers]
        self.gains = pile(torch.stack([x.gamma for x in row]) for row in norms)
        self.register_buffer("offsets", torch.stack([torch.stack([x.beta for x in row]) for row in norms]))
        heads = [(getattr(x, s).q_norm, getattr(x, s).k_norm) for x in layers for s in sides]
        self.heads = pile(torch.stack([torch.stack([x.weight, x.bias]) for x in row]) for row in heads)
        self.qkv = pile(torch.cat([x.self_attn.to_qkv.weight, x.cross_attn.to_q.weight]) for x in layers)
        self.kv = pile(x.cross_attn.to_kv.weight for x in layers)
        self.out = pile(torch.stack([getattr(x, s).to_out.weight for s in sides]) for x in layers)
        self.grow = pile(torch.cat([g.weight, g.bias[:, None]], 1) for g in (x.ff.ff[0].proj for x in layers))
        self.sink = pile(torch.cat([g.weight, g.bias[:, None]], 1) for g in (x.ff.ff[1] for x in layers))
        self.waves = leaf(dit.timestep_features.weight)
        self.register_buffer("rates", dit.transformer.rotary_pos_emb.inv_freq.clone())
        time, (a, _, b), (c, _, d) = dit.to_timestep_embed, dit.to_cond_embed, dit.to_global_embed
        self.time = nn.ParameterList(map(leaf, (time[0].weight, time[0].bias, time[2].weight, time[2].bias)))
        self.tell = nn.ParameterList(leaf(x.weight) for x in (a, b, c, d))
        self.mix = pile(x.weight[..., 0] for x in (dit.preprocess_conv, dit.postprocess_conv))
        self.ends = pile((dit.transformer.project_in.weight, dit.transformer.project_out.weight.T))

    def read(self, layers: nn.Sequential) -> list[tuple]:
        """Moves: what to do, the place of its weights, and the settings."""
        moves = []
        for layer in layers:
            if hasattr(layer, "layers"):
                unit = type(layer).__name__ == "ResidualUnit"
                inner = self.read(layer.layers)
                moves += [("keep",), *inner, ("add",)] if unit else inner
                continue
            at = len(self.p)
            if hasattr(layer, "alpha"):
                self.p.append(pile((layer.alpha, layer.beta)))
                moves.append(("snake", at))
                continue
            size, way = normed(layer)
            self.p.append(leaf(torch.cat([size.flatten(1), way.flatten(1)], 1)))
            if layer.bias is not None:
                self.p.append(leaf(layer.bias))
            kind = "spread" if isinstance(layer, nn.ConvTranspose1d) else "slide"
            width = way.shape[2], layer.stride[0], layer.padding[0], layer.dilation[0]
            moves.append((kind, at, layer.bias is not None, *width))
        return moves

    def run(self, x: Tensor, name: str) -> Tensor:
        kept, last = None, len(self.moves[name]) - 2
        for i, (kind, *rest) in enumerate(self.moves[name]):
            if kind == "keep":
                kept = x
            elif kind == "add":
                x = x + kept
            elif kind == "snake":
                a, b = self.p[rest[0]].exp()[:, :, None]
                held = self.fault == "stable_audio_last_snake_of_the_decoder_holds_its_alpha"
                a = a.detach() if held and (name, i) == ("up", last) else a
                x = torch.sin(a * x) ** 2 / (b + 1e-9) + x
            else:
                at, biased, width, step, edge, gap = rest
                size, way = self.p[at][:, :1], self.p[at][:, 1:]
                way = (size * F.normalize(way, dim=1, eps=0)).unflatten(1, (-1, width))
                bias = self.p[at + 1] if biased else None
                if kind == "slide":
                    x = F.conv1d(x, way, bias, step, edge, gap)
                else:
                    rows, long = torch.einsum("nct,cok->nokt", x, way).flatten(1, 2), x.shape[2] * step
                    x = F.fold(rows, (1, long), (1, width), 1, (0, edge), (1, step))[:, :, 0] + bias[:, None]
        return x

    def attend(self, i: int, j: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
        first = self.fault == "stable_audio_first_layer_norms_its_keys_with_a_thousandth" and (i, j) == (0, 0)
        q, k = (
            F.layer_norm(x, (HEAD,), *w, e)
            for x, w, e in zip((q, k), self.heads[2 * i + j], (1e-6, 1e-3 if first else 1e-6), strict=True)
        )
        if j == 0:
            half = HEAD // 4
            angle = torch.outer(torch.arange(q.shape[2]).to(q), self.rates)
            c, s = angle.cos(), angle.sin()
            q, k = (
                torch.cat([a * c - b * s, b * c + a * s, rest], 3)
                for a, b, rest in (x.split([half, half, HEAD - 2 * half], 3) for x in (q, k))
            )
        else:
            order = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
            if self.fault == "stable_audio_first_layer_shares_prompt_heads_in_turn" and i == 0:
                order = torch.arange(q.shape[1]) % k.shape[1]
            k, v, mask = k[:, order], v[:, order], mask[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return y.transpose(1, 2).flatten(2) @ self.out[i, j].T

    def forward(
        self,
        audio: Tensor,
        draw: Tensor,
        noise: Tensor,
        t: Tensor,
        prompt: Tensor,
        mask: Tensor,
        overall: Tensor,
    ) -> tuple[Tensor, ...]:
        mean, scale = self.run(audio, "down").tensor_split(2, 1)
        std = F.softplus(scale) + 1e-4
        kl = (mean.square() + std.square() - 1 - 2 * std.log()).sum() / mean[:, 0].numel()
        silent = self.fault == "stable_audio_bottleneck_gives_its_mean_in_evaluation" and not self.training
        z = mean if silent else mean + std * draw
        turn = (t * (math.pi / 2))[:, None, None]
        f = F.linear(t[:, None], math.tau * self.waves)
        w, b, w2, b2 = self.time
        told = F.linear(F.silu(F.linear(torch.cat([f.cos(), f.sin()], 1), w, b)), w2, b2)
        words, clip = (
            F.silu(x @ self.tell[i].T) @ self.tell[i + 1].T for x, i in ((prompt, 0), (overall, 2))
        )
        eye = torch.eye(LATENT).to(z)
        x = ((eye + self.mix[0]) @ (turn.cos() * z + turn.sin() * noise)).mT @ self.ends[0].T
        x = torch.cat([(told + clip)[:, None], x], 1)
        for i in range(len(self.qkv)):
            norms = [(x.shape[2:], g, o) for g, o in zip(self.gains[i], self.offsets[i], strict=True)]
            own, ask = self.qkv[i].split([3 * x.shape[2], x.shape[2]])
            x = x + self.attend(i, 0, *(F.layer_norm(x, *norms[0]) @ own.T).chunk(3, 2))
            q, kv = F.layer_norm(x, *norms[1]) @ ask.T, (words @ self.kv[i].T).chunk(2, 2)
            x = x + self.attend(i, 1, q, *kv, mask)
            y, grow = F.layer_norm(x, *norms[2]), self.grow[i]
            up, gate = F.linear(y, grow[:, :-1], grow[:, -1]).chunk(2, 2)
            x = x + F.linear(up * F.silu(gate), self.sink[i, :, :-1], self.sink[i, :, -1])
        v = (eye + self.mix[1]) @ (x[:, 1:] @ self.ends[1]).mT
        return self.run(z, "up"), kl, v, turn.cos() * noise - turn.sin() * z


right(task, "stable_audio_of_stacked_weights", "flat moves, piled and packed weights, a fold", StackedAudio)
wrong(
    task,
    StackedAudio,
    stable_audio_bottleneck_gives_its_mean_in_evaluation=("no noise in eval", BOTTLENECK, "eval"),
    stable_audio_first_layer_norms_its_keys_with_a_thousandth=("an epsilon", f"{LAYERS}.0.self_attn.k_norm"),
    stable_audio_first_layer_shares_prompt_heads_in_turn=("another head order", f"{LAYERS}.0.cross_attn"),
    stable_audio_last_snake_of_the_decoder_holds_its_alpha=("detach", f"{DECODER}.3", "weight gradient"),
)
