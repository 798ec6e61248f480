"""A small Temporal Fusion Transformer for the sales of stores, with the modules of pytorch-forecasting."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

HIDDEN, HEADS, LAYERS, QUANTILES = 12, 3, 2, (0.1, 0.5, 0.9)
CATEGORIES = {"store": 9, "region": 4, "weekday": 7, "promo": 3}
REALS = ("size", "price", "sales", "traffic")
STATIC, PAST = ("store", "region", "size"), ("weekday", "promo", "price", "sales", "traffic")
FUTURE, BATCH, ENCODER, DECODER = ("weekday", "promo", "price"), 6, 7, 4


def vary(model: nn.Module) -> None:
    """Start with weights that let every layer, gain, shift and gate count."""
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(weight, 0.6, 1.4)
        else:
            nn.init.normal_(weight, std=0.3 if weight.ndim == 1 else weight.shape[1] ** -0.5)


class GatedLinearUnit(nn.Module):
    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size * 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.fc(x), dim=-1)


class GateAddNorm(nn.Module):
    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.glu, self.norm = GatedLinearUnit(input_size, hidden_size), nn.LayerNorm(hidden_size)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.norm(self.glu(x) + skip)


class GatedResidualNetwork(nn.Module):
    def __init__(self, input_size: int, hidden_size: int, output_size: int, context_size: int | None = None):
        super().__init__()
        self.skip_layer = nn.Linear(input_size, output_size) if input_size != output_size else None
        self.fc1, self.elu = nn.Linear(input_size, hidden_size), nn.ELU()
        if context_size is not None:
            self.context = nn.Linear(context_size, hidden_size, bias=False)
        self.fc2 = nn.Linear(hidden_size, hidden_size)
        self.gate_norm = GateAddNorm(hidden_size, output_size)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        residual = x if self.skip_layer is None else self.skip_layer(x)
        x = self.fc1(x)
        if context is not None:
            x = x + self.context(context)
        x = self.fc2(self.elu(x))
        return self.gate_norm(x, residual)


class VariableSelectionNetwork(nn.Module):
    """The sum of the variables, each made by a network of its own, under weights made of all."""

    def __init__(self, names: tuple[str, ...], context_size: int | None = None):
        super().__init__()
        self.flattened_grn = GatedResidualNetwork(len(names) * HIDDEN, HIDDEN, len(names), context_size)
        self.single_variable_grns = nn.ModuleDict(
            {name: GatedResidualNetwork(HIDDEN, HIDDEN, HIDDEN) for name in names}
        )
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: dict[str, Tensor], context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        flat_embedding = torch.cat([x[name] for name in self.single_variable_grns], dim=-1)
        sparse_weights = self.softmax(self.flattened_grn(flat_embedding, context)).unsqueeze(-2)
        var_outputs = torch.stack([grn(x[name]) for name, grn in self.single_variable_grns.items()], dim=-1)
        return (var_outputs * sparse_weights).sum(dim=-1), sparse_weights


class LSTM(nn.LSTM):
    """Sequences of several lengths, padded behind; the state is that after the last true step."""

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor], lengths: Tensor) -> tuple[Tensor, tuple]:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, state = super().forward(packed, hx)
        return pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0], state


class ScaledDotProductAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        attn = torch.bmm(q, k.transpose(1, 2)) / k.shape[-1] ** 0.5
        attn = attn.masked_fill(mask, -1e9).softmax(dim=2)
        return torch.bmm(attn, v), attn


class InterpretableMultiHeadAttention(nn.Module):
    def __init__(self, n_head: int, d_model: int):
        super().__init__()
        size = d_model // n_head
        self.v_layer = nn.Linear(d_model, size)
        self.q_layers = nn.ModuleList(nn.Linear(d_model, size) for _ in range(n_head))
        self.k_layers = nn.ModuleList(nn.Linear(d_model, size) for _ in range(n_head))
        self.attention, self.w_h = ScaledDotProductAttention(), nn.Linear(size, d_model, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        vs = self.v_layer(v)
        pairs = zip(self.q_layers, self.k_layers, strict=True)
        heads, attns = zip(*(self.attention(ql(q), kl(k), vs, mask) for ql, kl in pairs), strict=True)
        return self.w_h(torch.stack(heads, dim=2).mean(dim=2)), torch.stack(attns, dim=2)


class TemporalFusionTransformer(nn.Module):
    """Categories and reals of the past and of the future [N, T, .] -> quantiles of the future [N, T, 3]."""

    def __init__(self):
        super().__init__()
        self.input_embeddings = nn.ModuleDict({n: nn.Embedding(c, HIDDEN) for n, c in CATEGORIES.items()})
        self.prescalers = nn.ModuleDict({name: nn.Linear(1, HIDDEN) for name in REALS})
        self.static_variable_selection = VariableSelectionNetwork(STATIC)
        self.encoder_variable_selection = VariableSelectionNetwork(PAST, HIDDEN)
        self.decoder_variable_selection = VariableSelectionNetwork(FUTURE, HIDDEN)
        for use in ("variable_selection", "initial_hidden_lstm", "initial_cell_lstm", "enrichment"):
            setattr(self, f"static_context_{use}", GatedResidualNetwork(HIDDEN, HIDDEN, HIDDEN))
        self.lstm_encoder = LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)
        self.lstm_decoder = LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)
        self.post_lstm_gate_norm = GateAddNorm(HIDDEN, HIDDEN)
        self.static_enrichment = GatedResidualNetwork(HIDDEN, HIDDEN, HIDDEN, HIDDEN)
        self.multihead_attn = InterpretableMultiHeadAttention(HEADS, HIDDEN)
        self.post_attn_gate_norm = GateAddNorm(HIDDEN, HIDDEN)
        self.pos_wise_ff = GatedResidualNetwork(HIDDEN, HIDDEN, HIDDEN)
        self.pre_output_gate_norm = GateAddNorm(HIDDEN, HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, len(QUANTILES))
        vary(self)

    @staticmethod
    def get_attention_mask(lengths: Tensor, past: int, future: int) -> Tensor:
        """What a step of the future must not see: padding, itself and what comes later."""
        step, place = torch.arange(future, device=lengths.device), torch.arange(past, device=lengths.device)
        decoder_mask = (step >= step[:, None]).expand(len(lengths), -1, -1)
        encoder_mask = (place >= lengths[:, None])[:, None].expand(-1, future, -1)
        return torch.cat([encoder_mask, decoder_mask], dim=2)

    def forward(self, x_cat: Tensor, x_cont: Tensor, encoder_lengths: Tensor) -> Tensor:
        past, future = ENCODER, x_cont.shape[1] - ENCODER
        x = {name: layer(x_cat[..., i]) for i, (name, layer) in enumerate(self.input_embeddings.items())}
        x |= {name: layer(x_cont[..., i, None]) for i, (name, layer) in enumerate(self.prescalers.items())}
        static, _ = self.static_variable_selection({name: x[name][:, 0] for name in STATIC})
        context = self.static_context_variable_selection(static)[:, None]
        encoded, _ = self.encoder_variable_selection({name: x[name][:, :past] for name in PAST}, context)
        decoded, _ = self.decoder_variable_selection({name: x[name][:, past:] for name in FUTURE}, context)
        hidden = self.static_context_initial_hidden_lstm(static).expand(LAYERS, -1, -1).contiguous()
        cell = self.static_context_initial_cell_lstm(static).expand(LAYERS, -1, -1).contiguous()
        encoder_output, state = self.lstm_encoder(encoded, (hidden, cell), encoder_lengths)
        decoder_output, _ = self.lstm_decoder(decoded, state, torch.full_like(encoder_lengths, future))
        lstm_output = torch.cat([encoder_output, decoder_output], dim=1)
        lstm_output = self.post_lstm_gate_norm(lstm_output, torch.cat([encoded, decoded], dim=1))
        enriched = self.static_enrichment(lstm_output, self.static_context_enrichment(static)[:, None])
        mask = self.get_attention_mask(encoder_lengths, past, future)
        attended, _ = self.multihead_attn(enriched[:, past:], enriched, enriched, mask)
        output = self.pos_wise_ff(self.post_attn_gate_norm(attended, enriched[:, past:]))
        return self.output_layer(self.pre_output_gate_norm(output, lstm_output[:, past:]))


def sales() -> tuple[dict[str, Tensor], Tensor]:
    """Stores whose sales follow the week, their size, price and promotions; short pasts are padded behind."""
    steps = ENCODER + DECODER
    lengths = torch.tensor([ENCODER, 4, 6, ENCODER, 5, 3])[torch.randperm(BATCH)]
    weekday = (torch.randint(7, (BATCH, 1)) + torch.arange(steps)) % 7
    store, region, promo = (torch.randint(n, (BATCH, t)) for n, t in ((9, 1), (4, 1), (3, steps)))
    size, price = torch.randn(BATCH, 1).expand(-1, steps), torch.randn(BATCH, steps)
    sold = size + 0.8 * torch.sin(weekday * 0.9) + 0.5 * promo - 0.6 * price + 0.3 * torch.randn(price.shape)
    x_cat = torch.stack([store.expand(-1, steps), region.expand(-1, steps), weekday, promo], 2)
    x_cont = torch.stack([size, price, sold, sold + 0.5 * torch.randn(price.shape)], 2)
    for sequence, length in enumerate(lengths):
        x_cat[sequence, length:ENCODER], x_cont[sequence, length:ENCODER] = 0, 0.0
    return {"x_cat": x_cat, "x_cont": x_cont, "encoder_lengths": lengths}, sold[:, ENCODER:]


def pinball(prediction: Tensor, target: Tensor) -> Tensor:
    """The pinball loss, summed over the quantiles."""
    q = torch.tensor(QUANTILES).to(prediction)
    errors = target[..., None] - prediction
    return torch.maximum((q - 1) * errors, q * errors).sum(-1).mean()
