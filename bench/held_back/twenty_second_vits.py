"""Two ports of a small VITS: a tree of few kinds of modules, and one class of stacks over rows of time."""

import re
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_second_vits import HEADS, HIDDEN, SLOPE, VitsModel, missed_and_far, spoken

task = few("twenty_second_vits", VitsModel, spoken, missed_and_far)


class Reading(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        old, self.ask = layer.attention, nn.ParameterList()
        for part in ("weight", "bias"):
            self.ask.append(leaf(torch.cat([getattr(old.get_submodule(f"{x}_proj"), part) for x in "qkv"])))
        self.near, self.back = pile([old.emb_rel_k[0], old.emb_rel_v[0]]), deepcopy(old.out_proj)
        self.first, self.second = deepcopy(layer.layer_norm), deepcopy(layer.final_layer_norm)
        self.wide, self.narrow = deepcopy(layer.feed_forward).children()

    def forward(self, x: Tensor, real: Tensor, apart: Tensor) -> Tensor:
        q, k, v = F.linear(x, *self.ask).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT + torch.einsum("nhiw,ijw->nhij", q @ self.near[0].T, apart)
        share = (scores / q.shape[-1] ** 0.5).masked_fill(real[:, None] == 0, -torch.inf).softmax(-1)
        mixed = share @ v + torch.einsum("nhij,ijw->nhiw", share, apart) @ self.near[1]
        x = self.first(x + self.back(mixed.transpose(1, 2).flatten(2)))
        return self.second(x + (real * self.narrow(real * self.wide(real * x.mT).relu())).mT)


class Waves(nn.Module):
    def __init__(self, pre: nn.Module, net: nn.Module, post: nn.Module):
        super().__init__()
        self.pre, self.post, layers = deepcopy(pre), deepcopy(post), [*net.in_layers, *net.res_skip_layers]
        pairs = zip(*([*x.parametrizations.weight.parameters(), x.bias] for x in layers), strict=True)
        self.length, self.turn, self.shift = (nn.ParameterList(map(leaf, group)) for group in pairs)

    def map(self, x: Tensor, i: int, rate: int = 1) -> Tensor:
        scale = self.length[i][:, 0] / self.turn[i].flatten(1).norm(dim=1)[:, None]
        return F.conv1d(x, self.turn[i], padding="same", dilation=rate) * scale + self.shift[i][:, None]

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x, total, count = self.pre(x) * real, 0, len(self.turn) // 2
        for i in range(count):
            wave, gate = self.map(x, i, 2**i).chunk(2, 1)
            y = self.map(wave.tanh() * gate.sigmoid(), i + count)
            x, total = x if i == count - 1 else (x + y[:, :HIDDEN]) * real, total + y[:, -HIDDEN:]
        return self.post(total * real) * real


class Added(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class TreeOfWaves(Port):
    def take(self, model: VitsModel) -> None:
        text, ear, voice = model.text_encoder, model.posterior_encoder, model.decoder
        self.table, self.project = leaf(text.embed_tokens.weight), deepcopy(text.project)
        self.readings = nn.ModuleList(map(Reading, text.encoder["layers"]))
        self.ear = Waves(ear.conv_pre, ear.wavenet, ear.conv_proj)
        self.bridges = nn.ModuleList(Waves(x.conv_pre, x.wavenet, x.conv_post) for x in model.flow.flows)
        leak, line = nn.LeakyReLU(SLOPE), [voice.conv_pre]
        for up, block in zip(voice.upsampler, voice.resblocks, strict=True):
            pairs = zip(block.convs1, block.convs2, strict=True)
            line += [leak, up, *(Added(leak, first, leak, second) for first, second in pairs)]
        self.voice = deepcopy(nn.Sequential(*line, nn.LeakyReLU(), voice.conv_post, nn.Tanh()))

    def forward(self, input_ids, attention_mask, spectrogram, spectrogram_mask, alignment, noise) -> tuple:
        read, real = (x.unsqueeze(1).to(noise) for x in (attention_mask, spectrogram_mask))
        blank = None if self.fault == "vits_blank_token_learns" else 0
        told = F.embedding(input_ids, self.table, blank) * HIDDEN**0.5 * read.mT
        steps = torch.arange(read.shape[2]).to(input_ids)
        apart = (steps - steps[:, None])[:, :, None] == torch.arange(-2, 3).to(steps)
        for reading in self.readings:
            told = reading(told, read, apart.to(told))
        means, logs = (self.project(told.mT * read) * read @ alignment.mT).chunk(2, 1)
        mean, spread = self.ear(spectrogram, real).chunk(2, 1)
        quiet = self.fault == "vits_posterior_takes_its_mean_in_evaluation" and not self.training
        z = sound = mean if quiet else torch.addcmul(mean, noise * real, spread.exp())
        for bridge in self.bridges:
            kept, moved = z.chunk(2, 1)
            z = torch.cat([(moved + bridge(kept, real)).flip(1), kept.flip(1)], 1)
        far = logs - spread + 0.5 * ((z - means) / logs.exp()).square() - 0.5
        everywhere = self.fault == "vits_kl_averages_over_padded_frames_too"
        kl = far.sum(1).mean() if everywhere else (far * real).sum() / real.sum()
        return self.voice(sound).squeeze(1), kl, z, means, logs


def taps(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0, rate: int = 1) -> Tensor:
    """A convolution of rows [N, T, C]: neighbours side by side, times one matrix."""
    padded = F.pad(x, (0, 0, *[rate * (len(weight) // 2)] * 2))
    beside = [padded[:, i * rate : i * rate + x.shape[1]] for i in range(len(weight))]
    return torch.cat(beside, 2) @ weight.flatten(0, 1) + bias


class TurnedStacks(Port):
    """All in [N, T, C]; the ends of the second coupling are reversed, so that nothing is to be flipped."""

    def take(self, model: VitsModel) -> None:
        stacks, parts = {}, r"(?<!ks)(?<!er)\.\d|(text_)?(en|de)coder\.|_?layers|wavenet\.|param\w+\."
        for name, x in model.named_parameters():
            key = re.sub(parts, "", name).strip(".").replace(".", "_").replace("conv_proj", "conv_post")
            x = x.permute(*range(x.dim())[::-1])
            *kept, sent = x.split(HIDDEN, -1) if "res_skip" in key else [x]
            stacks.setdefault(key, []).append(sent[None] if x.dim() == 2 else sent)
            stacks.setdefault(key.replace("res_skip", "kept"), []).extend(kept)
        for name, axis in (("pre_weight", 1), ("post_weight", 2), ("post_bias", 0)):
            stacks["flow_flows_conv_" + name][1] = stacks["flow_flows_conv_" + name][1].flip(axis)
        self.w = nn.ParameterDict({key: pile(group) for key, group in stacks.items()})

    def conv(self, x: Tensor, name: str, i: int = 0, rate: int = 1) -> Tensor:
        weight, bias = self.w.get(name + "_weight"), self.w[name + "_bias"][i]
        if weight is not None:
            return taps(x, weight[i], bias, rate)
        size, turn = self.w[name + "_weight_original0"][i], self.w[name + "_weight_original1"][i]
        cut = name + str(i) == "posterior_in1" and self.fault == "vits_posterior_detaches_a_weight_norm"
        length = (turn.detach() if cut else turn).square().sum((0, 1)).sqrt()
        return taps(x, turn * (size / length), bias, rate)

    def norm(self, x: Tensor, name: str, i: int) -> Tensor:
        return F.layer_norm(x, x.shape[2:], self.w[name + "_weight"][i], self.w[name + "_bias"][i])

    def read(self, x: Tensor, i: int, real: Tensor) -> Tensor:
        """A layer of the text's, with a key and a value of its own for each pair [N, T, T, H, C]."""
        each, room, w = {}, [x.shape[1] - 3] * 2, self.w
        for name in "kv":
            clamps = self.fault == "vits_last_attention_clamps_distant_values" and (name, i) == ("v", 1)
            near, how = w["attention_emb_rel_" + name][i, ..., 0], "replicate" if clamps else "constant"
            near = F.pad(near, room, how).unfold(1, x.shape[1], 1).flip(1).permute(1, 2, 0).unsqueeze(2)
            each[name] = self.conv(x, f"attention_{name}_proj", i).unflatten(2, (HEADS, -1))[:, None] + near
        q = self.conv(x, "attention_q_proj", i).unflatten(2, (HEADS, -1)) / near.shape[3] ** 0.5
        scores = torch.einsum("nihc,nijhc->nhij", q, each["k"])
        share = (scores - scores.amax(-1, keepdim=True)).exp() * real.mT[:, None]
        mixed = torch.einsum("nhij,nijhc->nihc", share / share.sum(-1, keepdim=True), each["v"]).flatten(2)
        x = self.norm(x + self.conv(mixed, "attention_out_proj", i), "layer_norm", i)
        y = self.conv(x * real, "feed_forward_conv_1", i).relu() * real
        return self.norm(x + self.conv(y, "feed_forward_conv_2", i) * real, "final_layer_norm", i)

    def waves(self, x: Tensor, real: Tensor, name: str, i: int, start: int, stop: int) -> Tensor:
        leaks = name + str(i) == "flow_flows0" and self.fault == "vits_first_coupling_unmasks_its_input"
        x, total = self.conv(x, name + "_conv_pre", i) * (1 if leaks else real), 0
        for at in range(start, stop):
            wave, gate = self.conv(x, name + "_in", at, 2 ** (at - start)).chunk(2, 2)
            y = (2 * (2 * wave).sigmoid() - 1) * gate.sigmoid()
            total = total + self.conv(y, name + "_res_skip", at)
            if at < stop - 1:
                x = (x + self.conv(y, name + "_kept", at - i)) * real
        return self.conv(total * real, name + "_conv_post", i) * real

    def forward(self, input_ids, attention_mask, spectrogram, spectrogram_mask, alignment, noise) -> tuple:
        read, real = (x.unsqueeze(2).to(noise) for x in (attention_mask, spectrogram_mask))
        blank, rest = self.w["embed_tokens_weight"][0, 0].T.split([1, 8])
        told = torch.cat([blank.detach(), rest])[input_ids] * HIDDEN**0.5 * read
        for i in range(2):
            told = self.read(told, i, read)
        means, logs = (alignment @ (self.conv(told * read, "project") * read)).chunk(2, 2)
        mean, spread = self.waves(spectrogram.mT, real, "posterior", 0, 0, 3).chunk(2, 2)
        sound = (mean + noise.mT * spread.exp()) * real
        upper, lower = sound.chunk(2, 2)
        lower = lower + self.waves(upper, real, "flow_flows", 0, 0, 2)
        cut = self.fault == "vits_last_coupling_detaches_the_half_it_keeps"
        upper = upper + self.waves(lower.detach() if cut else lower, real, "flow_flows", 1, 2, 4)
        z = torch.cat([upper, lower], 2)
        far = logs - spread + 0.5 * (z - means).square() * (-2 * logs).exp() - 0.5
        x, kl = self.conv(sound, "conv_pre"), (far * real).sum() / real.sum()
        for i, up in enumerate(("upsampler_0", "upsampler_1")):
            x = torch.stack([F.leaky_relu(x, SLOPE), torch.zeros_like(x)], 2).flatten(1, 2)
            x = taps(x, self.w[up + "_weight"][0].mT.flip(0), self.w[up + "_bias"])
            for j in range(2):
                y = self.conv(F.leaky_relu(x, SLOPE), f"resblocks_{i}_convs1", j, 1 + 2 * j)
                x = x + self.conv(F.leaky_relu(y, SLOPE), f"resblocks_{i}_convs2", j)
        x = F.leaky_relu(x, SLOPE if self.fault == "vits_last_activation_leaks_like_the_others" else 0.01)
        return taps(x, self.w["conv_post_weight"][0]).tanh().squeeze(2), kl, z.mT, means.mT, logs.mT


attention, scale = "text_encoder.encoder.layers.1.attention", "posterior_encoder.wavenet.in_layers.1"
scales = scale, scale + ".parametrizations.weight", scale + ".parametrizations.weight.0"
last, both = ("flow.flows.1", "flow.flows.1.conv_pre"), ("input gradient", "weight gradient")
right(task, "vits_of_waves_in_one_class", "one class for ear and couplings, fused weights", TreeOfWaves)
right(task, "vits_in_stacks_without_a_flip", "stacks, reversed weights, a key for each pair", TurnedStacks)
wrong(task, TreeOfWaves, vits_blank_token_learns=("a row not frozen", "text_encoder.embed_tokens", both[1]))
wrong(task, TreeOfWaves, vits_posterior_takes_its_mean_in_evaluation=("mean", "posterior_encoder", "eval"))
wrong(task, TreeOfWaves, vits_kl_averages_over_padded_frames_too=("padding in a mean", ""))
wrong(task, TurnedStacks, vits_last_attention_clamps_distant_values=("beyond a window", attention))
wrong(task, TurnedStacks, vits_posterior_detaches_a_weight_norm=("a norm held constant", scales, both[1]))
wrong(task, TurnedStacks, vits_first_coupling_unmasks_its_input=("a mask forgotten", "flow.flows.0"))
wrong(task, TurnedStacks, vits_last_coupling_detaches_the_half_it_keeps=("a detach", last, both))
wrong(task, TurnedStacks, vits_last_activation_leaks_like_the_others=("another slope", "decoder"))
