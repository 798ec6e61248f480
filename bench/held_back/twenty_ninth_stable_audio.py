"""A port of a small Stable Audio: a tree with the channels last."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_ninth_stable_audio import StableAudio, chords, reconstruction_kl_and_v
from bench.held_back._twenty_ninth_stable_audio_parts import LATENT
from bench.held_back._twenty_ninth_stable_audio_rows import Look, Think, chain

task = few("twenty_ninth_stable_audio", StableAudio, chords, reconstruction_kl_and_v)


class AudioTree(Port):
    """A codec of rows and a prior of three kinds of steps, channels last."""

    def take(self, model: StableAudio) -> None:
        codec, dit, fault = model.pretransform, model.model, self.fault
        self.down, self.up = (nn.Sequential(*chain(x.layers)) for x in (codec.encoder, codec.decoder))
        if fault == "stable_audio_last_encoder_unit_dilated_by_eight":
            self.down[8][1].gap, self.down[8][1].edge = 8, 24
        if fault == "stable_audio_first_upsampling_normed_by_output_channel":
            self.up[2].axes = (0, 1)
        rates, self.steps = dit.transformer.rotary_pos_emb.inv_freq, nn.ModuleList()
        for x in dit.transformer.layers:
            looks = Look(x.pre_norm, x.self_attn, rates), Look(x.cross_attend_norm, x.cross_attn, rates)
            self.steps.append(nn.ModuleList([*looks, Think(x.ff_norm, x.ff.ff)]))
        self.steps[1][0].paired = fault == "stable_audio_second_layer_turns_neighbours_in_pairs"
        self.waves = leaf(dit.timestep_features.weight[:, 0])
        tells = (dit.to_timestep_embed, dit.to_cond_embed, dit.to_global_embed)
        self.w = nn.ParameterList(leaf(x[i].weight.T) for x in tells for i in (0, 2))
        self.b = nn.ParameterList(leaf(tells[0][i].bias) for i in (0, 2))
        ends = (dit.preprocess_conv.weight[..., 0], dit.transformer.project_in.weight)
        ends += (dit.transformer.project_out.weight, dit.postprocess_conv.weight[..., 0])
        self.ends = nn.ParameterList(leaf(x.T) for x in ends)

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
        middle, raw = self.down(audio.mT).split(LATENT, 2)
        spread = torch.logaddexp(raw, torch.zeros_like(raw)) + 1e-4
        kl = (middle**2 + spread**2 - 2 * spread.log() - 1).mean() * LATENT
        if self.fault == "stable_audio_latents_drawn_without_gradient_of_their_spread":
            spread = spread.detach()
        z, w = torch.addcmul(middle, draw.mT, spread), self.w
        a, s = (t[:, None, None] * math.pi / 2).cos(), (t[:, None, None] * math.pi / 2).sin()
        angle = math.tau * t[:, None] * self.waves
        time = F.silu(torch.cat([angle.cos(), angle.sin()], 1) @ w[0] + self.b[0]) @ w[1] + self.b[1]
        words, first = F.silu(prompt @ w[2]) @ w[3], F.silu(overall @ w[4]) @ w[5] + time
        x, (enter, into, out, leave) = a * z + s * noise.mT, self.ends
        x = torch.cat([first[:, None], (x + x @ enter) @ into], 1)
        for own, cross, think in self.steps:
            x = think(cross(own(x), words, mask))
        v = x[:, 1:] @ out
        return self.up(z).mT, kl, (v + v @ leave).mT, (a * noise.mT - s * z).mT


ENCODER, DECODER = "pretransform.encoder.layers", "pretransform.decoder.layers"
LAYERS = "model.transformer.layers"
BOTTLENECK, SLOPES, UP = (
    "pretransform.bottleneck",
    ("input gradient", "weight gradient"),
    f"{DECODER}.1.layers.1",
)
NORMED = (UP, f"{UP}.parametrizations.weight", f"{UP}.parametrizations.weight.0")
right(
    task, "stable_audio_tree_with_channels_last", "a tree, windows, complex turns, split weights", AudioTree
)
wrong(
    task,
    AudioTree,
    stable_audio_last_encoder_unit_dilated_by_eight=("a dilation", f"{ENCODER}.2.layers.2.layers.1"),
    stable_audio_first_upsampling_normed_by_output_channel=("a norm of another axis", NORMED),
    stable_audio_latents_drawn_without_gradient_of_their_spread=("detach", BOTTLENECK, SLOPES),
    stable_audio_second_layer_turns_neighbours_in_pairs=("another pairing", f"{LAYERS}.1.self_attn"),
)
