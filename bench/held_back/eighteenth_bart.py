"""Two ports of BART: time first with one memory for all writer blocks, and stacks with channels first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighteenth_bart import BartForConditionalGeneration, infilling, surprise
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("eighteenth_bart", BartForConditionalGeneration, infilling, surprise)


def fused(*linears: nn.Linear) -> tuple[nn.Parameter, nn.Parameter]:
    return leaf(torch.cat([x.weight for x in linears])), leaf(torch.cat([x.bias for x in linears]))


def closed(x: Tensor, norm: nn.Parameter) -> Tensor:
    return F.layer_norm(x, norm.shape[1:], *norm)


class Mix(nn.Module):
    """Attention, sum and norm of [T, N, C]; keys and values are made of x or ``kept`` elsewhere."""

    def __init__(self, layer: nn.Module, name: str, made: str = "qkv"):
        super().__init__()
        attention, norm = getattr(layer, name), getattr(layer, f"{name}_layer_norm")
        self.wide, self.wide_b = fused(*(getattr(attention, f"{part}_proj") for part in made))
        self.back, self.back_b = fused(attention.out_proj)
        self.heads, self.count, self.norm = attention.num_heads, len(made), pile([norm.weight, norm.bias])

    def forward(self, x: Tensor, hidden: Tensor, around: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        made = F.linear(x, self.wide, self.wide_b).chunk(self.count, -1)
        q, k, v = (z.unflatten(2, (self.heads, -1)).flatten(1, 2).transpose(0, 1) for z in (*made, *kept))
        scores = torch.bmm(q * q.shape[2] ** -0.5, k.mT).unflatten(0, (-1, self.heads))
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        y = torch.bmm(shares.flatten(0, 1), v).transpose(0, 1).reshape(x.shape)
        return closed(around + F.linear(y, self.back, self.back_b), self.norm), shares


class Think(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.rise, self.rise_b = leaf(layer.fc1.weight.T), leaf(layer.fc1.bias)
        self.fall, self.fall_b = leaf(layer.fc2.weight.T), leaf(layer.fc2.bias)
        self.norm = pile([layer.final_layer_norm.weight, layer.final_layer_norm.bias])

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(torch.addmm(self.rise_b, x.flatten(0, 1), self.rise))
        return closed(x + torch.addmm(self.fall_b, y, self.fall).view_as(x), self.norm)


class Reader(Port):
    """Ids [T, N] -> vectors [T, N, C]; the table of words is handed in."""

    def take(self, stack: nn.Module) -> None:
        words, places, norm = stack.embed_tokens, stack.embed_positions, stack.layernorm_embedding
        self.factor, self.filler, self.start = words.embed_scale, words.padding_idx, places.offset
        self.places, self.norm = leaf(places.weight), pile([norm.weight, norm.bias])
        self.mixes = nn.ModuleList(Mix(x, "self_attn") for x in stack.layers)
        self.thinks = nn.ModuleList(Think(x) for x in stack.layers)

    def begun(self, ids: Tensor, table: Tensor) -> Tensor:
        words, end = F.embedding(ids, table, self.filler) * self.factor, self.start + len(ids)
        return closed(words + self.places[self.start : end, None], self.norm)

    def forward(self, ids: Tensor, table: Tensor, real: Tensor) -> Tensor:
        x = self.begun(ids, table)
        for mix, think in zip(self.mixes, self.thinks, strict=True):
            x = think(mix(x, ~real[:, None, None], x)[0])
        if self.fault == "bart_reader_clears_its_padding_in_evaluation" and not self.training:
            x = x * real.T[:, :, None]
        return x


class Writer(Reader):
    """The keys and values that all blocks recall are made at once."""

    def take(self, stack: nn.Module) -> None:
        super().take(stack)
        late = [x.encoder_attn for x in stack.layers]
        self.memory, self.memory_b = fused(*(part for x in late for part in (x.k_proj, x.v_proj)))
        self.recalls = nn.ModuleList(Mix(x, "encoder_attn", "q") for x in stack.layers)
        if self.fault == "bart_positions_of_the_decoder_lack_their_offset":
            self.start = 0

    def forward(self, ids: Tensor, table: Tensor, real: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x, hidden, found = self.begun(ids, table), ~real[:, None, None], []
        future = torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).triu(1)
        kept = F.linear(states, self.memory, self.memory_b).chunk(2 * len(self.recalls), -1)
        for i, (mix, recall, think) in enumerate(zip(self.mixes, self.recalls, self.thinks, strict=True)):
            y, _ = mix(x, future, x)
            if i == 0 or self.fault != "bart_last_cross_attention_added_to_what_its_block_read":
                x = y
            y, shares = recall(y, hidden, x, *kept[2 * i : 2 * i + 2])
            x, found = think(y), [*found, shares]
        return x, torch.stack(found)


class TimeFirstBart(Port):
    """Time first from end to end; one table for both sides and the head."""

    def take(self, model: BartForConditionalGeneration) -> None:
        inner, config = model.model, model.config
        self.reader, self.writer = Reader(inner.encoder, self.fault), Writer(inner.decoder, self.fault)
        self.start, self.filler = config.decoder_start_token_id, config.pad_token_id
        self.table = leaf(inner.shared.weight)
        self.register_buffer("lean", model.final_logits_bias.clone())
        if self.fault == "bart_bias_of_the_final_logits_is_trained":
            self.lean = leaf(self._buffers.pop("lean"))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        real = attention_mask.bool()
        states = self.reader(input_ids.T, self.table, real)
        ids = F.pad(labels[:, :-1].where(labels[:, :-1] >= 0, self.filler), (1, 0), value=self.start)
        x, shares = self.writer(ids.T, self.table, real, states)
        logits, states = F.linear(x, self.table, self.lean[0]).transpose(0, 1), states.transpose(0, 1)
        return {"logits": logits, "encoder_last_hidden_state": states, "cross_attentions": shares}


class StackedBart(Port):
    """Vectors [N, C, T]; the weights of like parts are one stack: readers, then writers, then recalls."""

    def take(self, model: BartForConditionalGeneration) -> None:
        sides = model.model.encoder, model.model.decoder
        layers, late = [*sides[0].layers, *sides[1].layers], [*sides[1].layers]
        mixes = [*(x.self_attn for x in layers), *(x.encoder_attn for x in late)]
        norms = [*(x.layernorm_embedding for x in sides), *(x.self_attn_layer_norm for x in layers)]
        norms += [*(x.encoder_attn_layer_norm for x in late), *(x.final_layer_norm for x in layers)]
        self.places = pile(x.embed_positions.weight.T for x in sides)
        self.table, heads = leaf(model.lm_head.weight.T), mixes[0].num_heads
        parts = [(x.q_proj, x.k_proj, x.v_proj) for x in mixes]
        self.asked = pile(torch.stack([y.weight.unflatten(0, (heads, -1)) for y in x]) for x in parts)
        self.asked_b = pile(torch.stack([y.bias.view(1, heads, -1, 1) for y in x]) for x in parts)
        self.told = pile(x.out_proj.weight.unflatten(1, (heads, -1)) for x in mixes)
        self.told_b = pile(x.out_proj.bias[:, None] for x in mixes)
        self.norms = pile(torch.stack([x.weight, x.bias])[:, :, None] for x in norms)
        self.rise, self.fall = pile(x.fc1.weight for x in layers), pile(x.fc2.weight for x in layers)
        self.rise_b, self.fall_b = (pile(getattr(x, n).bias[:, None] for x in layers) for n in ("fc1", "fc2"))
        self.register_buffer("lean", model.final_logits_bias.mT.clone())

    def normed(self, i: int, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        gain, shift = self.norms[i]
        return x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain + shift

    def begun(self, side: int, ids: Tensor) -> Tensor:
        table = torch.cat([self.table[:, :1], self.table[:, 1:2].detach(), self.table[:, 2:]], 1)
        words = table[:, ids].transpose(0, 1) * len(table) ** 0.5
        places = self.places[side, :, 2 : 2 + ids.shape[1]]
        early = self.fault == "bart_source_words_normed_before_their_places" and side == 0
        return self.normed(side, words) + places if early else self.normed(side, words + places)

    def mixed(self, i: int, x: Tensor, read: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Shares [N, H, S, T]: the keys come before the queries."""
        q = torch.einsum("hcd,ndt->nhct", self.asked[i, 0], x) + self.asked_b[i, 0]
        k, v = torch.einsum("ghcd,nds->gnhcs", self.asked[i, 1:], read) + self.asked_b[i, 1:]
        wide = self.fault == "bart_first_cross_scores_scaled_by_the_whole_width" and i == 4
        scores = torch.einsum("nhcs,nhct->nhst", k, q) / (x.shape[1] if wide else q.shape[2]) ** 0.5
        added = self.fault == "bart_first_reader_adds_its_mask_of_ones_to_the_scores" and i == 0
        shares = (scores + seen if added else scores.where(seen, torch.finfo(x.dtype).min)).softmax(2)
        return torch.einsum("dhc,nhcs,nhst->ndt", self.told[i], v, shares) + self.told_b[i], shares

    def thought(self, i: int, x: Tensor) -> Tensor:
        y = F.gelu(self.rise[i] @ x + self.rise_b[i])
        return self.normed(8 + i, x + (self.fall[i] @ y + self.fall_b[i]))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, real, found = self.begun(0, input_ids), attention_mask[:, None, :, None] > 0, []
        for i in (0, 1):
            x = self.thought(i, self.normed(2 + i, x + self.mixed(i, x, x, real)[0]))
        begin = 0 if self.fault == "bart_target_begins_with_the_start_of_a_sentence" else 2
        ids = torch.cat([torch.full_like(labels[:, :1], begin), labels[:, :-1]], 1)
        y, place = self.begun(1, torch.where(ids == -100, 1, ids)), torch.arange(ids.shape[1])
        for i in (2, 3):
            y = self.normed(2 + i, y + self.mixed(i, y, y, place[:, None] <= place)[0])
            update, shares = self.mixed(2 + i, y, x, real)
            y = self.thought(i, self.normed(4 + i, y + update))
            found.append(shares.mT)
        logits = (torch.einsum("dv,ndt->nvt", self.table, y) + self.lean).mT
        return {"logits": logits, "encoder_last_hidden_state": x.mT, "cross_attentions": torch.stack(found)}


right(task, "bart_of_time_first_sublayers", "time first, one memory for all blocks", TimeFirstBart)
right(task, "bart_in_stacks_of_channels_first", "channels first, stacked weights, einsum", StackedBart)
encoder, decoder, trained = "model.encoder", "model.decoder", ("update", "buffer", "weight gradient")
masked, embedded = (f"{encoder}.layers.0.self_attn", encoder), (encoder, f"{encoder}.layernorm_embedding")
places, cleared = f"{decoder}.embed_positions", (encoder, f"{encoder}.layers.1")
wrong(
    task,
    TimeFirstBart,
    bart_positions_of_the_decoder_lack_their_offset=("positions without their offset", places),
    bart_last_cross_attention_added_to_what_its_block_read=("an old way around", f"{decoder}.layers.1"),
    bart_reader_clears_its_padding_in_evaluation=("padding cleared", cleared, "eval"),
    bart_bias_of_the_final_logits_is_trained=("a buffer as a weight", ("", "lm_head"), trained),
)
wrong(
    task,
    StackedBart,
    bart_target_begins_with_the_start_of_a_sentence=("another start token", ""),
    bart_first_cross_scores_scaled_by_the_whole_width=("another scale", f"{decoder}.layers.0.encoder_attn"),
    bart_source_words_normed_before_their_places=("another order", embedded),
    bart_first_reader_adds_its_mask_of_ones_to_the_scores=("a mask added as it is", masked),
)
