"""A small OPT with LoRA adapters: frozen pre-norm layers, trained low ranks and a saved head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WORD, WIDTH, HEADS, INNER, LAYERS = 61, 20, 36, 4, 52, 3
POSITIONS, LENGTH, TEXTS, PAD = 17, 13, 4, 1
RANKS, ALPHA, ROOTED = {"q": 3, "v": 5}, 8, (1,)


class LoraLinear(nn.Module):
    """A frozen linear layer and the trained product of two thin ones, by adapter."""

    def __init__(self, base_layer: nn.Linear, r: int, lora_alpha: int, use_rslora: bool):
        super().__init__()
        self.base_layer, self.active_adapters = base_layer, ["default"]
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base_layer.out_features, bias=False)})
        self.scaling = {"default": lora_alpha / math.sqrt(r) if use_rslora else lora_alpha / r}

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.active_adapters:
            down, up, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
            result = result + up(down(dropout(x))) * self.scaling[name]
        return result


class ModulesToSaveWrapper(nn.Module):
    """The frozen layer that was there, and the trained copy that takes its place."""

    def __init__(self, module: nn.Linear):
        super().__init__()
        self.original_module, self.active_adapter = module, "default"
        copy = nn.Linear(module.in_features, module.out_features, bias=False)
        self.modules_to_save = nn.ModuleDict({"default": copy})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save[self.active_adapter](x)


class OPTLearnedPositionalEmbedding(nn.Embedding):
    def __init__(self, num_embeddings: int, embedding_dim: int):
        self.offset = 2
        super().__init__(num_embeddings + self.offset, embedding_dim)

    def forward(self, attention_mask: Tensor) -> Tensor:
        position_ids = torch.cumsum(attention_mask, dim=1)
        position_ids = (position_ids * attention_mask - 1).long()
        return super().forward(position_ids + self.offset)


class OPTAttention(nn.Module):
    def __init__(self, rooted: bool):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = LoraLinear(nn.Linear(WIDTH, WIDTH), RANKS["v"], ALPHA, rooted)
        self.q_proj = LoraLinear(nn.Linear(WIDTH, WIDTH), RANKS["q"], ALPHA, rooted)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        n, length, _ = hidden_states.shape
        shape = n, length, self.num_heads, self.head_dim
        query_states = (self.q_proj(hidden_states) * self.scaling).view(shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) + attention_mask
        attn_output = torch.matmul(F.softmax(attn_weights, dim=-1), value_states)
        return self.out_proj(attn_output.transpose(1, 2).reshape(n, length, WIDTH))


class OPTDecoderLayer(nn.Module):
    def __init__(self, rooted: bool):
        super().__init__()
        self.self_attn, self.activation_fn = OPTAttention(rooted), nn.ReLU()
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = residual + self.self_attn(hidden_states, attention_mask)
        residual = hidden_states
        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.fc2(self.activation_fn(self.fc1(hidden_states)))
        return residual + hidden_states


class OPTDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WORD)
        self.embed_positions = OPTLearnedPositionalEmbedding(POSITIONS, WIDTH)
        self.project_out = nn.Linear(WIDTH, WORD, bias=False)
        self.project_in = nn.Linear(WORD, WIDTH, bias=False)
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(OPTDecoderLayer(i in ROOTED) for i in range(LAYERS))

    def causal_mask(self, attention_mask: Tensor, x: Tensor) -> Tensor:
        """[N, T] -> [N, 1, T, T]: nought where a key may be seen, else the least number there is."""
        length = attention_mask.shape[1]
        seen = (
            torch.ones(length, length, device=x.device).tril().bool() & attention_mask[:, None, None].bool()
        )
        return torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        inputs_embeds = self.project_in(self.embed_tokens(input_ids))
        hidden_states = inputs_embeds + self.embed_positions(attention_mask)
        causal_mask = self.causal_mask(attention_mask, hidden_states)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, causal_mask)
        return self.project_out(self.final_layer_norm(hidden_states))


class OPTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = OPTDecoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.decoder(input_ids, attention_mask)


class OPTForCausalLM(nn.Module):
    """Tokens and their mask [N, T] -> logits [N, T, V]; only the adapters and the saved head are trained."""

    def __init__(self):
        super().__init__()
        self.model = OPTModel()
        self.lm_head = ModulesToSaveWrapper(nn.Linear(WORD, VOCABULARY, bias=False))
        for name, weight in self.named_parameters():
            norm = "layer_norm.weight" in name
            spread = 0.2 if weight.dim() < 2 else 0.6 if "embed" in name else weight.shape[1] ** -0.5
            spread = spread / 2 if "lora_B" in name else spread
            nn.init.normal_(weight, 1.0 if norm else 0.0, spread)
            weight.requires_grad_("lora_" in name or "modules_to_save" in name)
        self.lm_head.original_module.weight = self.model.decoder.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, attention_mask))


def texts() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens that count on by a step of each text, with a few slips, after one to four of padding."""
    first, stride = torch.randint(VOCABULARY, (TEXTS, 1)), torch.randint(1, 7, (TEXTS, 1))
    slips = (torch.rand(TEXTS, LENGTH + 1) < 0.1).cumsum(1)
    tokens = (first + stride * torch.arange(LENGTH + 1) + slips) % (VOCABULARY - 4) + 4
    mask = (torch.arange(LENGTH) >= torch.randint(1, 5, (TEXTS, 1))).long()
    ids = torch.where(mask > 0, tokens[:, :-1], PAD)
    return {"input_ids": ids, "attention_mask": mask}, torch.where(mask > 0, tokens[:, 1:], -100)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """A quarter of the cross entropy where there is a text."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) / 4
