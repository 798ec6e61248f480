"""A temporal fusion transformer: weighed variables, a recurrence, interpretable attention, quantiles."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, HISTORY, HORIZON, SERIES = 8, 2, 2, 8, 4, 12
CATEGORIES = {"region": 4, "product": 4, "weekday": 7}
REALS = ("size", "price", "promotion", "sales")
STATIC = ("region", "product", "size")
ENCODER = ("weekday", "price", "promotion", "sales")
DECODER = ("weekday", "price", "promotion")
QUANTILES = (0.1, 0.5, 0.9)


def lively(module: nn.Module) -> None:
    """Start with gates, norms and attention that already make a difference."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight, gain=1.3)
        if module.bias is not None:
            nn.init.uniform_(module.bias, -0.4, 0.4)
    elif isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.uniform_(module.bias, -0.4, 0.4)


class GatedLinearUnit(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.fc = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.fc(x), dim=-1)


class GateAddNorm(nn.Module):
    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH):
        super().__init__()
        self.glu, self.norm = GatedLinearUnit(inputs, outputs), nn.LayerNorm(outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.norm(self.glu(x) + skip)


class GatedResidualNetwork(nn.Module):
    """Two layers with an optional context in the first, gated and added to the input."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH, context: bool = False):
        super().__init__()
        self.fc1, self.elu, self.fc2 = nn.Linear(inputs, WIDTH), nn.ELU(), nn.Linear(WIDTH, WIDTH)
        self.context = nn.Linear(WIDTH, WIDTH, bias=False) if context else None
        self.resample = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()
        self.gate_norm = GateAddNorm(WIDTH, outputs)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        hidden = self.fc1(x)
        if context is not None:
            hidden = hidden + self.context(context)
        return self.gate_norm(self.fc2(self.elu(hidden)), self.resample(x))


class VariableSelectionNetwork(nn.Module):
    """The sum of the variables, each by a network of its own, with weights that depend on all of them."""

    def __init__(self, names: tuple[str, ...], context: bool = True):
        super().__init__()
        self.single_variable_grns = nn.ModuleDict({name: GatedResidualNetwork() for name in names})
        self.flattened_grn = GatedResidualNetwork(len(names) * WIDTH, len(names), context)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, variables: dict[str, Tensor], context: Tensor | None = None) -> Tensor:
        flat = torch.cat([variables[name] for name in self.single_variable_grns], -1)
        weights = self.softmax(self.flattened_grn(flat, context))
        values = [grn(variables[name]) for name, grn in self.single_variable_grns.items()]
        return (torch.stack(values, -1) * weights.unsqueeze(-2)).sum(-1)


class ScaledDotProductAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(k.shape[-1])
        return torch.bmm(self.softmax(scores.masked_fill(mask, -math.inf)), v)


class InterpretableMultiHeadAttention(nn.Module):
    """Heads that share their values and are averaged."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.v_layer = nn.Linear(WIDTH, size)
        self.q_layers = nn.ModuleList(nn.Linear(WIDTH, size) for _ in range(HEADS))
        self.k_layers = nn.ModuleList(nn.Linear(WIDTH, size) for _ in range(HEADS))
        self.attention = ScaledDotProductAttention()
        self.w_h = nn.Linear(size, WIDTH, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        v = self.v_layer(v)
        layers = zip(self.q_layers, self.k_layers, strict=True)
        heads = [self.attention(of_q(q), of_k(k), v, mask) for of_q, of_k in layers]
        return self.w_h(torch.stack(heads).mean(0))


class TemporalFusionTransformer(nn.Module):
    """What series are (kinds, sizes), what is known of all steps, sales of the past ones -> [N, T, Q]."""

    def __init__(self):
        super().__init__()
        self.input_embeddings = nn.ModuleDict({x: nn.Embedding(n, WIDTH) for x, n in CATEGORIES.items()})
        self.prescalers = nn.ModuleDict({name: nn.Linear(1, WIDTH) for name in REALS})
        self.static_variable_selection = VariableSelectionNetwork(STATIC, context=False)
        self.encoder_variable_selection = VariableSelectionNetwork(ENCODER)
        self.decoder_variable_selection = VariableSelectionNetwork(DECODER)
        self.static_context_variable_selection = GatedResidualNetwork()
        self.static_context_initial_hidden_lstm = GatedResidualNetwork()
        self.static_context_initial_cell_lstm = GatedResidualNetwork()
        self.static_context_enrichment = GatedResidualNetwork()
        self.lstm_encoder = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.lstm_decoder = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.post_lstm_gate_norm = GateAddNorm()
        self.static_enrichment = GatedResidualNetwork(context=True)
        self.multihead_attn = InterpretableMultiHeadAttention()
        self.post_attn_gate_norm = GateAddNorm()
        self.pos_wise_ff = GatedResidualNetwork()
        self.pre_output_gate_norm = GateAddNorm()
        self.output_layer = nn.Linear(WIDTH, len(QUANTILES))
        self.apply(lively)

    def forward(self, kinds: Tensor, sizes: Tensor, days: Tensor, known: Tensor, observed: Tensor) -> Tensor:
        length, past = known.shape[1], observed.shape[1]
        codes = {"region": kinds[:, 0], "product": kinds[:, 1], "weekday": days[..., 0]}
        reals = {"size": sizes, "price": known[..., :1], "promotion": known[..., 1:], "sales": observed}
        vectors = {name: self.input_embeddings[name](x) for name, x in codes.items()}
        vectors |= {name: self.prescalers[name](x) for name, x in reals.items()}
        static = self.static_variable_selection(vectors)
        context = self.static_context_variable_selection(static)[:, None].expand(-1, length, -1)
        encoded = {name: vectors[name][:, :past] for name in ENCODER}
        encoded = self.encoder_variable_selection(encoded, context[:, :past])
        decoded = {name: vectors[name][:, past:] for name in DECODER}
        decoded = self.decoder_variable_selection(decoded, context[:, past:])
        hidden = self.static_context_initial_hidden_lstm(static).repeat(LAYERS, 1, 1)
        cell = self.static_context_initial_cell_lstm(static).repeat(LAYERS, 1, 1)
        encoder_output, state = self.lstm_encoder(encoded, (hidden, cell))
        decoder_output, _ = self.lstm_decoder(decoded, state)
        output = torch.cat([encoder_output, decoder_output], 1)
        output = self.post_lstm_gate_norm(output, torch.cat([encoded, decoded], 1))
        enrichment = self.static_context_enrichment(static)[:, None].expand(-1, length, -1)
        enriched = self.static_enrichment(output, enrichment)
        steps = torch.arange(length, device=output.device)
        mask = steps[None, :] > steps[past:, None]
        attended = self.multihead_attn(enriched[:, past:], enriched, enriched, mask)
        attended = self.post_attn_gate_norm(attended, enriched[:, past:])
        fused = self.pre_output_gate_norm(self.pos_wise_ff(attended), output[:, past:])
        return self.output_layer(fused)


def series() -> tuple[dict[str, Tensor], Tensor]:
    """Sales that follow the weekday, prices, promotions, their own past and what the series is."""
    kinds, sizes = torch.randint(0, 4, (SERIES, 2)), torch.randn(SERIES, 1)
    days = (torch.randint(0, 7, (SERIES, 1)) + torch.arange(HISTORY + HORIZON)) % 7
    price = torch.randn(SERIES, HISTORY + HORIZON)
    promotion = (torch.rand_like(price) < 0.3).to(price)
    drift = 0.6 * torch.sin(days * (2 * math.pi / 7)) + 0.8 * promotion + 0.1 * torch.randn_like(price)
    drift = drift - (0.2 + 0.1 * kinds[:, :1]) * price + 0.3 * sizes * (kinds[:, 1:] - 1.5)
    sales = [torch.randn(SERIES)]
    for change in drift.unbind(1):
        sales.append(0.5 * sales[-1] + change)
    sales = torch.stack(sales[1:], 1)
    inputs = {"kinds": kinds, "sizes": sizes, "days": days[..., None]}
    inputs |= {"known": torch.stack([price, promotion], 2), "observed": sales[:, :HISTORY, None]}
    return inputs, sales[:, HISTORY:]


def quantile_loss(output: Tensor, target: Tensor) -> Tensor:
    error, quantiles = target.to(output)[..., None] - output, output.new_tensor(QUANTILES)
    return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()
