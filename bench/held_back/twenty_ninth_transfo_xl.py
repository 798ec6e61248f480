"""Two ports of a small Transformer-XL: a tree with the batch first, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_ninth_transfo_xl as xl
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_ninth_transfo_xl import CUTOFFS, D_EMBED, D_HEAD, D_MODEL, MEM_LEN, N_HEAD

task = few("twenty_ninth_transfo_xl", xl.TransfoXLLMHeadModel, xl.segments, xl.mean_loss)
SIZES = (CUTOFFS[0], CUTOFFS[1] - CUTOFFS[0], xl.TOKENS - CUTOFFS[1])


class Band(nn.Module):
    def __init__(self, layer: nn.Linear, lift: Tensor, first: int):
        super().__init__()
        self.table, self.lift, self.offset = leaf(layer.weight), leaf(lift.T), leaf(layer.bias)
        self.first, self.past = first, first + len(self.table)

    def forward(self, tokens: Tensor) -> Tensor:
        mine = (tokens >= self.first) & (tokens < self.past)
        rows = (self.table @ self.lift)[(tokens - self.first).clamp(0, len(self.table) - 1)]
        return rows * mine[..., None]


class Softmax(nn.Module):
    def __init__(self, crit: nn.Module):
        super().__init__()
        self.project, self.offset = leaf(crit.out_projs[0]), leaf(crit.cluster_bias)
        self.clusters = leaf(crit.cluster_weight.T)

    def forward(self, x: Tensor, bands: nn.ModuleList) -> Tensor:
        y = x @ self.project
        common = y @ bands[0].table.T + bands[0].offset
        head = torch.cat([common, y @ self.clusters + self.offset], -1).log_softmax(-1)
        found, rest = [head[..., : SIZES[0]]], head[..., SIZES[0] :].unbind(-1)
        for band, gate in zip(bands[1:], rest, strict=True):
            found.append(gate[..., None] + (x @ band.lift.T @ band.table.T + band.offset).log_softmax(-1))
        return torch.cat(found, -1)


class Heads(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        weights = attention.qkv_net.weight.unflatten(0, (3, N_HEAD, D_HEAD)).transpose(2, 3)
        self.ask, self.key, self.value = map(leaf, weights)
        self.place = leaf(attention.r_net.weight.unflatten(0, (N_HEAD, D_HEAD)).transpose(1, 2))
        self.out = leaf(attention.o_net.weight.unflatten(1, (N_HEAD, D_HEAD)).permute(1, 2, 0))
        self.content, self.position = leaf(attention.r_w_bias[:, None]), leaf(attention.r_r_bias[:, None])
        self.late, self.stopped = 0, False

    def forward(self, x: Tensor, memory: Tensor, waves: Tensor) -> Tensor:
        seen = torch.cat([memory, x], 1)
        seen = seen.detach() if self.stopped else seen
        q, k, v = x[:, None] @ self.ask, seen[:, None] @ self.key, seen[:, None] @ self.value
        steps, ahead = torch.arange(seen.shape[1], device=x.device), memory.shape[1]
        distance = steps[ahead:, None] - steps
        near = (q + self.position) @ (waves @ self.place).transpose(1, 2)
        index = (distance + self.late).clamp(0, len(steps) - 1).expand(*near.shape[:2], -1, -1)
        score = ((q + self.content) @ k.transpose(2, 3) + near.gather(3, index)) / math.sqrt(D_HEAD)
        return (score.masked_fill(distance < 0, -math.inf).softmax(-1) @ v @ self.out).sum(1)


class Stage(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.heads = Heads(layer.dec_attn)
        self.norms = nn.ModuleList([layer.dec_attn.layer_norm, layer.pos_ff.layer_norm])
        up, _, down = layer.pos_ff.CoreNet
        self.up, self.up_offset = leaf(up.weight.T), leaf(up.bias)
        self.down, self.down_offset = leaf(down.weight.T), leaf(down.bias)

    def forward(self, x: Tensor, memory: Tensor, waves: Tensor) -> Tensor:
        x = self.norms[0](x + self.heads(x, memory, waves))
        inner = (x @ self.up + self.up_offset).clamp(min=0)
        return self.norms[1](x + inner @ self.down + self.down_offset)


class ReaderOfSegments(Port):
    """Bands of tokens that read and write, and stages with the batch first and a weight for each head."""

    def take(self, model: xl.TransfoXLLMHeadModel) -> None:
        body, crit, firsts = model.transformer, model.crit, (0, *CUTOFFS)
        bands = zip(crit.out_layers, body.word_emb.emb_projs, firsts, strict=True)
        self.bands = nn.ModuleList(Band(*band) for band in bands)
        self.stages, self.softmax = nn.ModuleList(map(Stage, body.layers)), Softmax(crit)
        self.register_buffer("rates", body.pos_emb.inv_freq.clone())
        wide = self.fault == "transfo_xl_embedding_scaled_by_the_root_of_its_own_width"
        near = self.fault == "transfo_xl_distances_clamped_to_the_memory_in_evaluation"
        self.width, self.far = D_EMBED if wide else D_MODEL, xl.CLAMP_LEN
        self.far_later = MEM_LEN if near else self.far
        self.stages[1].heads.late = int(self.fault == "transfo_xl_second_relative_shift_off_by_one")
        self.stages[2].heads.stopped = self.fault == "transfo_xl_third_layer_detaches_segment_with_memory"

    def forward(self, input_ids: Tensor, mems: Tensor, labels: Tensor) -> dict[str, Tensor]:
        far, later = self.far if self.training else self.far_later, []
        x = math.sqrt(self.width) * sum(band(input_ids) for band in self.bands)
        angles = (
            torch.arange(x.shape[1] + mems.shape[2], device=x.device).clamp(max=far)[:, None] * self.rates
        )
        waves = torch.cat([angles.sin(), (angles + math.pi / 2).sin()], 1)
        for stage, memory in zip(self.stages, mems.detach().unbind(1), strict=True):
            later.append(torch.cat([memory, x.detach()], 1)[:, -MEM_LEN:])
            x = stage(x, memory, waves)
        logs, wanted = self.softmax(x[:, :-1], self.bands), labels[:, 1:]
        losses = F.nll_loss(logs.transpose(1, 2), wanted, ignore_index=xl.IGNORED, reduction="none")
        return {"losses": losses, "mems": torch.stack(later, 1)}


class PackedTransfoXL(Port):
    """A weight for all layers of each kind, one for all tables; a loop over queries slides the positions."""

    def take(self, model: xl.TransfoXLLMHeadModel) -> None:
        body, crit = model.transformer, model.crit
        attentions, ends = [x.dec_attn for x in body.layers], [x.pos_ff for x in body.layers]
        self.qkvr = pile(torch.cat([x.qkv_net.weight, x.r_net.weight]).T for x in attentions)
        self.o = pile(x.o_net.weight for x in attentions)
        self.biases = pile(torch.stack([x.r_w_bias, x.r_r_bias]) for x in attentions)
        norms = [x.layer_norm for pair in zip(attentions, ends, strict=True) for x in pair]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.up = pile(torch.cat([x.CoreNet[0].weight, x.CoreNet[0].bias[:, None]], 1) for x in ends)
        self.down = pile(torch.cat([x.CoreNet[2].weight.T, x.CoreNet[2].bias[None]]) for x in ends)
        self.book = leaf(torch.cat([x.weight.flatten() for x in body.word_emb.emb_layers]))
        self.lifts = leaf(torch.cat([*body.word_emb.emb_projs, crit.out_projs[0]], 1))
        self.gates = leaf(torch.cat([crit.cluster_weight, crit.cluster_bias[:, None]], 1))
        self.shifts = leaf(torch.cat([x.bias for x in crit.out_layers]))
        self.register_buffer("rates", body.pos_emb.inv_freq.clone())

    def norm(self, x: Tensor, i: int) -> Tensor:
        eps = 1e-3 if self.fault == "transfo_xl_second_end_norm_epsilon" and i == 3 else 1e-5
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.norms[i, 0] + self.norms[i, 1]

    def layer(self, i: int, x: Tensor, memory: Tensor, waves: Tensor) -> Tensor:
        (length, before), wide = (x.shape[0], memory.shape[0]), N_HEAD * D_HEAD
        hidden = torch.cat([memory, x]) @ self.qkvr[i, :, : 3 * wide]
        q, k, v = hidden.unflatten(2, (3, N_HEAD, D_HEAD)).unbind(2)
        r = (waves @ self.qkvr[i, :, 3 * wide :]).unflatten(1, (N_HEAD, D_HEAD))
        own, place = self.biases[i]
        if self.fault == "transfo_xl_first_layer_swaps_its_two_biases" and i == 0:
            own, place = place, own
        rows = []
        for t in range(length):
            asked, past = q[before + t], before + t + 1
            score = ((asked + own) * k[:past]).sum(-1) + ((asked + place) * r[length - 1 - t :, None]).sum(-1)
            share = (score * D_HEAD**-0.5).softmax(0)
            rows.append((share[..., None] * v[:past]).sum(0).flatten(1))
        x = self.norm(x + torch.stack(rows) @ self.o[i].T, 2 * i)
        inner = torch.relu(x @ self.up[i, :, :-1].T + self.up[i, :, -1])
        return self.norm(x + inner @ self.down[i, :-1] + self.down[i, -1], 2 * i + 1)

    def forward(self, input_ids: Tensor, mems: Tensor, labels: Tensor) -> dict[str, Tensor]:
        widths = [D_EMBED >> i for i in range(len(SIZES))]
        pages = self.book.split([n * d for n, d in zip(SIZES, widths, strict=True)])
        tables = [page.view(n, -1) for page, n in zip(pages, SIZES, strict=True)]
        *lifts, first = self.lifts.split([*widths, D_EMBED], 1)
        words = torch.cat([table @ lift.T for table, lift in zip(tables, lifts, strict=True)])
        x, memory = words[input_ids.T] * D_MODEL**0.5, mems.detach().permute(1, 2, 0, 3)
        reach = torch.arange(len(x) + memory.shape[1], device=x.device).flip(0).clamp(max=xl.CLAMP_LEN)
        angles, kept = reach[:, None] * self.rates, []
        for i in range(xl.N_LAYER):
            kept.append(torch.cat([memory[i], x.detach()])[-MEM_LEN:])
            j = 1 if self.fault == "transfo_xl_third_layer_reads_the_memory_of_the_second" and i == 2 else i
            x = self.layer(i, x, memory[j], torch.cat([angles.sin(), angles.cos()], 1))
        x, wanted, shifts = x[:-1].transpose(0, 1), labels[:, 1:], self.shifts.split(SIZES)
        rows = torch.cat([tables[0], self.gates[:, :-1]])
        head = (x @ first @ rows.T + torch.cat([shifts[0], self.gates[:, -1]])).log_softmax(-1)
        logs = [head[..., : SIZES[0]]]
        for i in (1, 2):
            cut = self.fault == "transfo_xl_last_tail_gives_no_gradient_to_the_states" and i == 2
            y = (x.detach() if cut else x) @ (lifts[i] @ tables[i].T) + shifts[i]
            logs.append(head[..., SIZES[0] + i - 1, None] + y - y.logsumexp(-1, keepdim=True))
        losses = -torch.cat(logs, -1).gather(2, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
        return {"losses": losses, "mems": torch.stack(kept).permute(2, 0, 1, 3)}


SLOPES = ("input gradient", "weight gradient")
right(task, "transfo_xl_reader_of_segments", "a tree, batch first, distances by index", ReaderOfSegments)
right(task, "transfo_xl_of_packed_weights", "packed stacks, a loop over queries", PackedTransfoXL)
wrong(
    task,
    ReaderOfSegments,
    transfo_xl_embedding_scaled_by_the_root_of_its_own_width=("another width", "transformer.word_emb"),
    transfo_xl_second_relative_shift_off_by_one=("off by one", "transformer.layers.1.dec_attn"),
    transfo_xl_third_layer_detaches_segment_with_memory=("detach", "transformer.layers.2.dec_attn", SLOPES),
    transfo_xl_distances_clamped_to_the_memory_in_evaluation=("a clamp in eval", "transformer", "eval"),
)
wrong(
    task,
    PackedTransfoXL,
    transfo_xl_first_layer_swaps_its_two_biases=("swapped biases", "transformer.layers.0.dec_attn"),
    transfo_xl_second_end_norm_epsilon=("another epsilon", "transformer.layers.1.pos_ff.layer_norm"),
    transfo_xl_third_layer_reads_the_memory_of_the_second=("another layer's memory", "transformer"),
    transfo_xl_last_tail_gives_no_gradient_to_the_states=("detach", "crit", SLOPES),
)
