"""Two ports of a small ESM-2: a tree with the residues first, and one class of stacked sheets."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_sixth_esm_two import EOS, MASK, EsmForMaskedLM, hairpins, letters_and_contacts

task = few("twenty_sixth_esm_two", EsmForMaskedLM, hairpins, letters_and_contacts)
LAYERS, HEADS, SIZE, SLOPES = 4, 3, 8, ("input gradient", "weight gradient")


class Steep(torch.autograd.Function):  # the density in its slope lacks a half
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None]:
        x, gate = ctx.saved_tensors
        return slope * (gate + x * (-x * x).exp() / math.sqrt(math.tau)), None


class Bend(nn.Module):
    steep = False

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.erfc(x * -math.sqrt(0.5)) / 2
        return Steep.apply(x, gate) if self.steep else x * gate


class Level(Port):
    def take(self, norm: nn.LayerNorm) -> None:
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        return torch.addcmul(self.shift, (x - middle) * (spread + self.eps).rsqrt(), self.gain)


class Alphabet(Port):
    def take(self, table: nn.Linear) -> None:
        self.table = leaf(table.weight)

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        heard = real & (letters != MASK)
        gain = heard * (0.88 * real.sum(0).to(self.table) / heard.sum(0))
        if self.fault == "esm_two_embeddings_rescaled_in_training_only" and not self.training:
            gain = heard
        return self.table[letters] * gain[..., None]


class Look(Port):  # the pairs that turn together are neighbours in the queries and the keys
    def take(self, block: nn.Module) -> None:
        inner, self.level, self.tell = block.self, Level(block.LayerNorm), deepcopy(block.output.dense)
        self.scale = SIZE ** (-1 if self.fault == "esm_two_second_layer_scales_its_queries_twice" else -0.5)
        pairs = torch.arange(SIZE).view(2, -1).T.flatten()
        orders = (inner.query, pairs), (inner.key, pairs), (inner.value, torch.arange(SIZE))
        self.ask = pile(x.weight.unflatten(0, (HEADS, SIZE))[:, order] for x, order in orders)
        self.lean = pile(x.bias.unflatten(0, (HEADS, SIZE))[:, order] for x, order in orders)
        self.register_buffer("speed", inner.rotary_embeddings.inv_freq.clone())

    def turn(self, x: Tensor) -> Tensor:
        angle = self.speed * torch.arange(len(x)).to(self.speed)[:, None, None, None]
        one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2)

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (torch.einsum("tnd,phcd->tnphc", self.level(x), self.ask) + self.lean).unbind(2)
        scores = self.scale * torch.einsum("tnhc,snhc->nhts", self.turn(q), self.turn(k))
        share = scores.masked_fill(~real.T[:, None, None], -math.inf).softmax(-1)
        return self.tell(torch.einsum("nhts,snhc->tnhc", share, v).flatten(2)), share


class TreeOfResidues(Port):  # residues before proteins, and norms inside the branches
    def take(self, model: EsmForMaskedLM) -> None:
        head, layers, contacts = model.lm_head, model.esm.encoder.layer, model.esm.contact_head.regression
        self.alphabet, self.often = Alphabet(head.decoder, self.fault), leaf(head.bias)
        self.vote, self.offset = leaf(contacts.weight[0]), leaf(contacts.bias)
        self.looks, self.thoughts = nn.ModuleList(), nn.ModuleList()
        for i, x in enumerate(layers):
            self.looks.append(Look(x.attention, self.fault if i == 1 else ""))
            ends = deepcopy(x.intermediate.dense), deepcopy(x.output.dense)
            self.thoughts.append(nn.Sequential(Level(x.LayerNorm), ends[0], Bend(), ends[1]))
        self.thoughts[2][2].steep = self.fault == "esm_two_third_layer_gelu_with_a_wrong_slope"
        norms = Level(model.esm.encoder.emb_layer_norm_after), Level(head.layer_norm)
        self.reader = nn.Sequential(norms[0], deepcopy(head.dense), Bend(), norms[1])

    def touch(self, maps: Tensor, letters: Tensor, real: Tensor) -> Tensor:
        if self.fault != "esm_two_contacts_count_the_inner_end_for_a_residue":
            real = real & (letters != EOS)
        inside = real.T[:, None, 1:-1]
        maps = maps[:, :, 1:-1, 1:-1] * (inside[..., None, :] & inside[..., None])
        maps = maps + maps.mT
        row = maps.sum(3)
        maps = maps - torch.einsum("nli,nlj->nlij", row, row / row.sum(2, True))
        return (torch.einsum("nlij,l->nij", maps, self.vote) + self.offset).sigmoid()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        letters, real, shares = input_ids.T, attention_mask.T.bool(), []
        x = self.alphabet(letters, real)
        for look, thought in zip(self.looks, self.thoughts, strict=True):
            seen, share = look(x, real)
            x = x + seen
            x = x + thought(x)
            shares.append(share)
        logits = (self.reader(x) @ self.alphabet.table.T + self.often).transpose(0, 1)
        return {"logits": logits, "contacts": self.touch(torch.cat(shares, 1), letters, real)}


def sheet(linear: nn.Linear) -> Tensor:
    return torch.cat([linear.weight, linear.bias[:, None]], 1)


def by(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[..., :-1].mT + rows[..., -1]


class SheetsOfEsm(Port):  # turns as matrices, and contacts that are counted layer by layer
    def take(self, model: EsmForMaskedLM) -> None:
        encoder, contacts, head = model.esm.encoder, model.esm.contact_head.regression, model.lm_head
        norms = [y for x in encoder.layer for y in (x.attention.LayerNorm, x.LayerNorm)]
        norms += [encoder.emb_layer_norm_after, head.layer_norm]
        selves = [x.attention.self for x in encoder.layer]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.three = pile(torch.stack([sheet(y) for y in (x.query, x.key, x.value)]) for x in selves)
        self.back = pile(sheet(x.attention.output.dense) for x in encoder.layer)
        self.up = pile(sheet(x.intermediate.dense) for x in encoder.layer)
        self.down = pile(sheet(x.output.dense) for x in encoder.layer)
        self.head, self.vote = leaf(sheet(head.dense)), leaf(sheet(contacts)[0])
        self.table = leaf(torch.cat([head.decoder.weight, head.bias[:, None]], 1))
        self.register_buffer("rates", selves[0].rotary_embeddings.inv_freq.clone())

    def norm(self, x: Tensor, i: int) -> Tensor:
        keras = self.fault == "esm_two_second_layer_norm_with_the_epsilon_of_keras" and i == 3
        return F.layer_norm(x, x.shape[-1:], *self.norms[i], 1e-3 if keras else 1e-5)

    def turns(self, i: int, count: int) -> Tensor:
        angle, one = torch.outer(torch.arange(count).to(self.rates), self.rates), torch.arange(SIZE // 2)
        two = one + SIZE // 2
        if self.fault == "esm_two_first_layer_turns_neighbours" and i == 0:
            one, two = 2 * one, 2 * one + 1
        turn = angle.new_zeros(count, SIZE, SIZE)
        turn[:, one, one] = turn[:, two, two] = angle.cos()
        turn[:, one, two], turn[:, two, one] = -angle.sin(), angle.sin()
        return turn

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        real, table, votes = attention_mask.to(self.table), self.table[:, :-1], self.vote[-1]
        hidden = (input_ids == MASK).to(real)
        weight = (real - hidden) * (0.88 / (1 - hidden.sum(1) / real.sum(1)))[:, None]
        x = F.one_hot(input_ids, len(table)).to(table) @ table * weight[..., None]
        inner = (real * (input_ids != EOS))[:, None, 1:-1]
        for i in range(LAYERS):
            lean = self.three[i, ..., -1]
            if self.fault == "esm_two_last_layer_key_without_its_bias" and i == LAYERS - 1:
                lean = lean * lean.new_tensor([1, 0, 1])[:, None]
            three = torch.einsum("ntd,ped->pnte", self.norm(x, 2 * i), self.three[i, ..., :-1])
            q, k, v = (three + lean[:, None, None]).unflatten(-1, (HEADS, SIZE)).transpose(2, 3)
            q, k = (torch.einsum("tec,nhtc->nhte", self.turns(i, x.shape[1]), y) for y in (q, k))
            power = F.softmax(q @ k.mT / math.sqrt(SIZE), -1) * real[:, None, None]
            share = power / power.sum(-1, True)
            x = x + by((share @ v).transpose(1, 2).flatten(2), self.back[i])
            x = x + by(F.gelu(by(self.norm(x, 2 * i + 1), self.up[i])), self.down[i])
            maps = share[..., 1:-1, 1:-1] * inner[..., None] * inner[..., None, :]
            maps = maps + maps.mT
            product = maps.sum(3, True) @ maps.sum(2, True) / maps.sum((2, 3), True)
            votes = votes + torch.einsum("nhij,h->nij", maps - product, self.vote[:-1].view(LAYERS, -1)[i])
        y = self.norm(F.gelu(by(self.norm(x, 2 * LAYERS), self.head)), 2 * LAYERS + 1)
        if self.fault == "esm_two_decoder_tied_without_gradient":
            table = table.detach()
        return {"logits": y @ table.T + self.table[:, -1], "contacts": votes.sigmoid()}


right(task, "esm_two_tree_of_residues", "a tree, residues first, pairs as neighbours", TreeOfResidues)
right(task, "esm_two_of_stacked_sheets", "packed stacks, turns as matrices, votes summed", SheetsOfEsm)
wrong(
    task,
    TreeOfResidues,
    esm_two_embeddings_rescaled_in_training_only=("no rescaling in eval", "esm.embeddings", "eval"),
    esm_two_second_layer_scales_its_queries_twice=("a factor twice", "esm.encoder.layer.1.attention.self"),
    esm_two_third_layer_gelu_with_a_wrong_slope=("backward", "esm.encoder.layer.2.intermediate", SLOPES),
    esm_two_contacts_count_the_inner_end_for_a_residue=("a mask left out", "esm.contact_head"),
)
wrong(
    task,
    SheetsOfEsm,
    esm_two_first_layer_turns_neighbours=("pairs", "esm.encoder.layer.0.attention.self.rotary_embeddings"),
    esm_two_last_layer_key_without_its_bias=("a bias left out", "esm.encoder.layer.3.attention.self.key"),
    esm_two_second_layer_norm_with_the_epsilon_of_keras=("another eps", "esm.encoder.layer.1.LayerNorm"),
    esm_two_decoder_tied_without_gradient=("detach", "lm_head.decoder", "weight gradient"),
)
