"""Two ports of a small ECAPA-TDNN: a tree with the channels last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fifth_ecapa_tdnn import SPEAKERS, SpeakerBrain, speaker_loss, utterances

task = few("thirty_fifth_ecapa_tdnn", SpeakerBrain, utterances, speaker_loss)


def pointwise(layer: nn.Module) -> nn.Linear:
    dense = nn.Linear(*layer.conv.weight.shape[1::-1])
    dense.weight, dense.bias = leaf(layer.conv.weight.flatten(1)), leaf(layer.conv.bias)
    return dense


class Frames(nn.Module):
    """A dilated layer of [B, T, C] that gathers the frames of each tap."""

    def __init__(self, layer: nn.Module, blank: bool = False):
        super().__init__()
        conv = layer.conv.conv
        self.weight, self.bias = leaf(conv.weight.permute(2, 1, 0)), leaf(conv.bias)
        self.rate, self.rows, self.blank = conv.dilation[0], Rows(layer.norm.norm), blank

    def forward(self, x: Tensor) -> Tensor:
        taps, end = torch.arange(len(self.weight)) - len(self.weight) // 2, x.shape[1] - 1
        at = torch.arange(end + 1)[:, None] + self.rate * taps
        mirrored = end - (end - at.abs()).abs()
        windows = x[:, mirrored.to(x.device)]
        if self.blank:
            windows = windows * (at == mirrored)[:, :, None].to(x)
        return self.rows(F.relu(torch.einsum("btkc,kco->bto", windows, self.weight) + self.bias))


class Body(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.enter, self.leave = Frames(block.tdnn1), Frames(block.tdnn2)
        self.chain, se = nn.ModuleList(map(Frames, block.res2net_block.blocks)), block.se_block
        self.gate = nn.Sequential(pointwise(se.conv1), nn.ReLU(), pointwise(se.conv2), nn.Sigmoid())

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        first, *rest = self.enter(x).tensor_split(len(self.chain) + 1, -1)
        done, carried = [first], 0
        for part, link in zip(rest, self.chain, strict=True):
            carried = link(part + carried)
            done.append(carried)
        y = self.leave(torch.cat(done, -1))
        return torch.addcmul(x, y, self.gate(share.mT @ y))


def moments(x: Tensor, share: Tensor, time: int = 1, side: int = 2) -> Tensor:
    """Means and deviations over time, under weights that sum to one, side by side."""
    mean = (share * x).sum(time, True)
    return torch.cat([mean, (share * (x - mean).square()).sum(time, True).clamp(min=1e-12).sqrt()], side)


class Pool(nn.Module):
    def __init__(self, asp: nn.Module, fixed: bool):
        super().__init__()
        self.read, self.score, self.fixed = Frames(asp.tdnn), pointwise(asp.conv), fixed

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        whole = moments(x, share)
        whole = (whole.detach() if self.fixed else whole).expand(-1, x.shape[1], -1)
        power = self.score(self.read(torch.cat([x, whole], -1)).tanh()).exp() * (share > 0)
        return moments(x, power / power.sum(1, keepdim=True)).squeeze(1)


class EcapaTree(Port):
    """Channels last; one share of each frame for all that is pooled; the margin is added to the angle."""

    def take(self, model: SpeakerBrain) -> None:
        net, fault = model.embedding_model, self.fault
        self.stem = Frames(net.blocks[0], fault == "ecapa_tdnn_first_layer_padded_with_zeros")
        self.bodies, self.blend = nn.ModuleList(map(Body, net.blocks[1:])), Frames(net.mfa)
        if fault == "ecapa_tdnn_second_block_leaves_by_a_norm_of_large_epsilon":
            self.bodies[1].leave.rows.eps = 1e-3
        self.pool = Pool(net.asp, fault == "ecapa_tdnn_global_context_without_gradient")
        self.level, self.embed = Rows(net.asp_bn.norm), pointwise(net.fc)
        self.level.own = fault == "ecapa_tdnn_pooled_norm_by_batch_statistics_in_evaluation"
        self.voices = leaf(model.classifier.weight.T)

    def forward(self, feats: Tensor, lengths: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
        (count, each, frames), found = feats.shape[:3], []
        inside = torch.arange(frames, device=feats.device) < lengths.view(-1, 1) * frames
        share = (inside.to(feats) / inside.sum(1, keepdim=True))[:, :, None]
        x = self.stem(feats.flatten(0, 1))
        for body in self.bodies:
            x = body(x, share)
            found.append(x)
        y = self.embed(self.level(self.pool(self.blend(torch.cat(found, -1)), share)))
        near = (y / y.norm(dim=-1, keepdim=True)) @ (self.voices / self.voices.norm(dim=0))
        angle = near.clamp(-1 + 1e-7, 1 - 1e-7).acos()
        own = torch.arange(SPEAKERS, device=y.device) == speaker.repeat_interleave(each)[:, None]
        logits = 10 * torch.where(own, angle + 0.2, angle).cos()
        return y.unflatten(0, (count, each)), logits.unflatten(0, (count, each))


def plate(conv: nn.Conv1d) -> Tensor:
    """[O, C + 1], a pointwise kernel and its bias."""
    return torch.cat([conv.weight.flatten(1), conv.bias[:, None]], 1)


class PackedEcapa(Port):
    """[C, B, T]; kernels of a kind in one stack, all biases and norms in rows of one table."""

    def take(self, model: SpeakerBrain) -> None:
        net, norm = model.embedding_model, model.embedding_model.asp_bn.norm
        layers = [x for x in net.modules() if isinstance(x, type(net.mfa))]
        rows = [torch.stack([x.conv.conv.bias, x.norm.norm.weight, x.norm.norm.bias]) for x in layers]
        norms = [*(x.norm.norm for x in layers), norm]
        held = [torch.stack([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("held", torch.cat(held, 1))
        self.register_buffer("seen", norm.num_batches_tracked.clone())
        kernels = [x.conv.conv.weight.permute(2, 0, 1) for x in layers]
        self.first, self.join, self.attend = (leaf(kernels[i]) for i in (0, -2, -1))
        self.square, self.small = (pile(k for k in kernels[1:-2] if len(k) == size) for size in (1, 3))
        self.squeeze = pile(plate(b.se_block.conv1.conv) for b in net.blocks[1:])
        self.excite = pile(plate(b.se_block.conv2.conv) for b in net.blocks[1:])
        self.rows = leaf(torch.cat(rows, 1))
        self.score, self.embed = leaf(plate(net.asp.conv.conv)), leaf(plate(net.fc.conv))
        self.ends, self.voices = pile([norm.weight, norm.bias]), leaf(model.classifier.weight)

    def norm(self, y: Tensor, at: int, scale: Tensor, shift: Tensor) -> Tensor:
        held = self.held[:, at : at + len(y)]
        return F.batch_norm(y.transpose(0, 1), *held, scale, shift, self.training).transpose(0, 1)

    def layer(self, x: Tensor, kernel: Tensor, rate: int = 1) -> Tensor:
        width, frames, at = kernel.shape[1], x.shape[2], self.at
        (bias, scale, shift), self.at = self.rows[:, at : at + width], at + width
        x = F.pad(x, [rate * (len(kernel) // 2)] * 2, mode="reflect")
        taps = (torch.tensordot(k, x[..., i * rate : i * rate + frames], 1) for i, k in enumerate(kernel))
        return self.norm((sum(taps) + bias[:, None, None]).relu(), at, scale, shift)

    def block(self, i: int, x: Tensor, inside: Tensor) -> Tensor:
        slices = self.layer(x, self.square[2 * i]).chunk(4)
        done = [slices[0], self.layer(slices[1], self.small[3 * i], i + 2)]
        early = self.fault == "ecapa_tdnn_third_block_adds_a_slice_before_its_layer" and i == 2
        for j in (2, 3):
            before = slices[2] if early and j == 3 else done[-1]
            done.append(self.layer(slices[j] + before, self.small[3 * i + j - 1], i + 2))
        y = self.layer(torch.cat(done), self.square[2 * i + 1])
        blind = self.fault == "ecapa_tdnn_first_squeeze_divides_by_all_frames" and i == 0
        s = (y * inside).sum(2) / (inside.shape[1] if blind else inside.sum(1))
        s = (self.squeeze[i, :, :-1] @ s + self.squeeze[i, :, -1:]).relu()
        s = self.excite[i, :, :-1] @ s + self.excite[i, :, -1:]
        return x + y / (1 + torch.exp(-s))[:, :, None]

    def forward(self, feats: Tensor, lengths: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
        self.at, shape = 0, feats.shape[:2]
        self.seen += self.training
        inside = (torch.arange(feats.shape[2]).to(lengths) < lengths.view(-1, 1) * feats.shape[2]).to(feats)
        found = [self.layer(feats.flatten(0, 1).permute(2, 0, 1), self.first)]
        for i in range(3):
            found.append(self.block(i, found[-1], inside))
        late = self.fault != "ecapa_tdnn_aggregation_takes_the_first_layer_for_the_last"
        x = self.layer(torch.cat(found[1:] if late else found[:-1]), self.join)
        whole = moments(x, inside / inside.sum(1, True), 2, 0).expand(-1, -1, x.shape[2])
        y = self.layer(torch.cat([x, whole]), self.attend).tanh()
        score = torch.tensordot(self.score[:, :-1], y, 1) + self.score[:, -1, None, None]
        share = torch.where(inside > 0, score, -math.inf).log_softmax(2).exp()
        y = self.norm(moments(x, share, 2, 0)[:, :, 0], self.at, *self.ends)
        y = (self.embed[:, :-1] @ y + self.embed[:, -1:]).T
        cosine = F.cosine_similarity(y[:, None], self.voices, dim=-1).clamp(-1 + 1e-7, 1 - 1e-7)
        turned = math.cos(0.2) * cosine - math.sin(0.2) * ((1 - cosine) * (1 + cosine)).sqrt()
        if self.fault == "ecapa_tdnn_margin_taken_off_the_cosine":
            turned = cosine - 0.2
        mine = F.one_hot(speaker, SPEAKERS).repeat_interleave(shape[1], 0)
        return y.view(*shape, -1), (10 * (cosine + mine * (turned - cosine))).view(*shape, -1)


NET, SLOPES = "embedding_model", ("input gradient", "weight gradient")
LEAVING = f"{NET}.blocks.2.tdnn2.norm.norm", f"{NET}.blocks.2.tdnn2.norm"
POOLED = f"{NET}.asp_bn.norm", f"{NET}.asp_bn"
right(task, "ecapa_tdnn_tree_with_channels_last", "a tree, gathered taps, shares, angles", EcapaTree)
right(task, "ecapa_tdnn_of_packed_weights", "packed weights, products by tap, own norms", PackedEcapa)
wrong(
    task,
    EcapaTree,
    ecapa_tdnn_first_layer_padded_with_zeros=("zero padding", f"{NET}.blocks.0.conv"),
    ecapa_tdnn_second_block_leaves_by_a_norm_of_large_epsilon=("another epsilon", LEAVING),
    ecapa_tdnn_global_context_without_gradient=("detach", f"{NET}.asp", SLOPES),
    ecapa_tdnn_pooled_norm_by_batch_statistics_in_evaluation=("batch statistics", POOLED, "eval"),
)
wrong(
    task,
    PackedEcapa,
    ecapa_tdnn_first_squeeze_divides_by_all_frames=("a mean over padding", f"{NET}.blocks.1.se_block"),
    ecapa_tdnn_third_block_adds_a_slice_before_its_layer=("another operand", f"{NET}.blocks.3.res2net_block"),
    ecapa_tdnn_aggregation_takes_the_first_layer_for_the_last=("a list cut at the other end", NET),
    ecapa_tdnn_margin_taken_off_the_cosine=("another margin", "loss_fn"),
)
