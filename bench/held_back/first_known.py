"""The bench's recurrent net, its transformer, and a small vision transformer on its block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from bench.held_back._first_shared import BACK, both, leaf, pile
from bench.tasks import Recurrent, Transformer, TransformerBlock, _task, recurrent, transformer


class ByHand(nn.Module):
    """Kernels [inputs, gates], the LSTM's gates in TensorFlow's order."""

    def __init__(self, model: Recurrent, wrong: bool):
        super().__init__()
        parts = (torch.cat([p.chunk(4)[i] for i in (0, 2, 1, 3)]) for p in model.lstm.parameters())
        self.lstm = nn.ParameterList(leaf(p.movedim(0, -1)) for p in parts)
        self.gru = nn.ParameterList(leaf(p.movedim(0, -1)) for p in model.cell.parameters())
        self.top, self.wrong = model.fc, wrong

    def forward(self, x: Tensor) -> Tensor:
        (wx, wh, bx, bh), (ux, uh, cx, ch) = self.lstm, self.gru
        h = c = x.new_zeros(len(x), 14)
        s = x.new_zeros(len(x), 10)
        for now in x.unbind(1):
            i, g, f, o = (now @ wx + bx + h @ wh + bh).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            a, b = h @ ux + cx, s @ uh + ch
            r, z = (a + b)[:, :20].sigmoid().chunk(2, 1)
            past = (r * s) @ uh[:, 20:] + ch[20:] if self.wrong else r * b[:, 20:]
            s = torch.lerp((a[:, 20:] + past).tanh(), s, z)
        return self.top(s)


class Cells(nn.Module):
    """A cell for the LSTM, a GRU for the cell; the LSTM may go on from the last batch."""

    def __init__(self, model: Recurrent, wrong: bool):
        super().__init__()
        self.low, self.high, self.top, self.wrong = nn.LSTMCell(6, 14), nn.GRU(14, 10), model.fc, wrong
        self.low.load_state_dict({k.removesuffix("_l0"): v for k, v in model.lstm.state_dict().items()})
        self.high.load_state_dict({f"{k}_l0": v for k, v in model.cell.state_dict().items()})
        self.kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        fits = self.wrong and self.kept and len(self.kept[0]) == len(x)
        state, seen = tuple(s.to(x) for s in self.kept) if fits else None, []
        for now in x.unbind(1):
            state = self.low(now, state)
            seen.append(state[0])
        self.kept = tuple(s.detach() for s in state)
        return self.top(self.high(torch.stack(seen))[1][0])


class Recomputed(Recurrent):
    """Each step of the cell under a checkpoint; the gradient may be cut once."""

    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        for t, state in enumerate(self.states(x).unbind(1)):
            past = h.detach() if self.wrong and t == 4 else h
            h = checkpoint(self.cell, state, past, use_reentrant=False)
        return self.fc(h)


class PerSentence(nn.Module):
    """A function of one sentence under vmap; the blocks' weights stacked in a dict."""

    def __init__(self, model: Transformer, wrong: bool):
        super().__init__()
        self.norm, self.place = model.norm, leaf(model.position)
        names = dict(model.blocks[0].named_parameters())
        each = {k.replace(".", "-"): pile(b.get_parameter(k) for b in model.blocks) for k in names}
        self.weights, self.table = nn.ParameterDict(each), leaf(model.embed.weight)
        self.head, self.code = leaf(self.table) if wrong else self.table, (model.blocks[0],)

    def one(self, tokens: Tensor) -> Tensor:
        x = (self.table[tokens] + self.place[: len(tokens)])[None]
        for i in range(2):
            x = functional_call(self.code[0], {k.replace("-", "."): v[i] for k, v in self.weights.items()}, x)
        return self.norm(x[0]) @ self.head.T

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.vmap(self.one)(tokens)


class Counted(Transformer):
    """Embeddings as a product with counts; the positions may not learn."""

    wrong = False

    def place(self, tokens: Tensor) -> Tensor:
        places = self.position[: tokens.shape[1]]
        table = self.embed.weight
        return F.one_hot(tokens, 29).to(table.dtype) @ table + (places.detach() if self.wrong else places)


class Vit(nn.Module):
    """[N, 3, 12, 12] -> [N, 5]; the class token comes last."""

    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 24, 4, 4), nn.Parameter(torch.randn(1, 1, 24))
        self.position = nn.Parameter(0.1 * torch.randn(10, 24))
        self.block, self.norm, self.head = TransformerBlock(24, 3, 0.0), nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.patch(x).flatten(2).mT, self.token.expand(len(x), -1, -1)], 1)
        return self.head(self.norm(self.block(x + self.position))[:, -1])


class Pixels(nn.Module):
    """Channels last, a matrix product of each patch's pixels; only the last token goes on; a dict out."""

    def __init__(self, model: Vit, wrong: bool):
        super().__init__()
        kernel, b = model.patch.weight, model.block
        self.project = leaf(kernel.flatten(1).T if wrong else kernel.permute(2, 3, 1, 0).flatten(0, 2))
        self.shift, self.last, self.places = leaf(model.patch.bias), leaf(model.token), leaf(model.position)
        self.norms, self.mix = nn.ModuleList([b.norm1, b.norm2, model.norm]), b.attention.qkv
        self.tail = nn.ModuleList([b.attention.out, nn.Sequential(b.up, nn.GELU(), b.down), model.head])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.movedim(1, 3).reshape(-1, 3, 4, 3, 4, 3).transpose(2, 3).reshape(-1, 9, 48)
        x = F.pad(x @ self.project + self.shift, (0, 0, 0, 1))
        x = x + F.pad(self.last, (0, 0, 9, 0)) + self.places
        q, k, v = self.mix(self.norms[0](x)).unflatten(2, (3, 3, 8)).unbind(2)
        weights = torch.einsum("nhd,nshd->nhs", q[:, -1] * 8**-0.5, k).softmax(2)
        x = x[:, -1] + self.tail[0](torch.einsum("nhs,nshd->nhd", weights, v).flatten(1))
        return {"logits": self.tail[2](self.norms[2](x + self.tail[1](self.norms[1](x))))}


def _loss(out: Tensor | dict, classes: Tensor) -> Tensor:
    return F.cross_entropy(out["logits"] if isinstance(out, dict) else out, classes)


vit = _task("first_vit", Vit, lambda: (torch.randn(6, 3, 12, 12), torch.randint(5, (6,))), _loss)
UNTIED = {"passes": ("weight gradient", "update")}
both(recurrent, ByHand, "gates_in_another_order", "reset_before_the_product", "cell")
both(recurrent, Cells, "cell_and_layer_exchanged", "state_of_the_last_batch_kept", "lstm")
both(recurrent, Recomputed, "steps_recomputed", "gradient_cut_in_time", ("", "cell"), passes=BACK)
both(transformer, PerSentence, "one_sentence_at_a_time", "head_not_tied", ("embed", "head", ""), **UNTIED)
both(transformer, Counted, "words_as_counts", "positions_do_not_learn", "", passes="weight gradient")
both(vit, Pixels, "patches_of_pixels", "pixels_in_another_order", "patch")
