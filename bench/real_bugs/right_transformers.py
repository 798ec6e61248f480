"""Right pairs out of transformers: attention by other kernels, torch's own layers in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bench.real_bugs import right_pair
from bench.surgery import replace
from bench.tasks import _classes, _task

HOME, VERSION = "https://github.com/huggingface/transformers", f"transformers {version('transformers')}"
pair = partial(right_pair, HOME, VERSION)
VOCABULARY = 37
TEXT = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = WIDE | TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}


def _logits(outputs: object) -> Tensor:
    return getattr(outputs, "logits", outputs)


def _next_token(outputs: object, targets: Tensor) -> Tensor:
    return F.cross_entropy(_logits(outputs).flatten(0, 1), targets.flatten())


def _chosen(outputs: object, targets: Tensor) -> Tensor:
    return F.cross_entropy(_logits(outputs), targets)


def _tokens() -> tuple[dict, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (4, 11))
    return {"input_ids": tokens[:, :10]}, tokens[:, 1:]


def _sentences() -> tuple[dict, Tensor]:
    mask = (torch.arange(10) < torch.randint(4, 11, (6, 1))).long()
    return {"input_ids": torch.randint(1, VOCABULARY, (6, 10)) * mask, "attention_mask": mask}, _classes(6, 3)


def _images() -> tuple[dict, Tensor]:
    return {"pixel_values": torch.randn(6, 3, 12, 12)}, _classes(6, 3)


def _model(kind: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    """Without a cache, which is no part of the function, and without dropout."""
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**settings, use_cache=False))


def _classifier(kind: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**settings, num_labels=3))


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
llama = _task("llama", _model("LlamaForCausalLM", "LlamaConfig", **GROUPED), _tokens, _next_token)
mistral = _task(
    "mistral",
    _model("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=4),
    _tokens,
    _next_token,
)
gemma = _task("gemma", _model("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=8), _tokens, _next_token)
gpt2 = _task("gpt2", _model("GPT2LMHeadModel", "GPT2Config", **TEXT, **GPT2), _tokens, _next_token)
bert = _task(
    "bert",
    _classifier("BertForSequenceClassification", "BertConfig", **TEXT, **WIDE, **NO_DROPOUT),
    _sentences,
    _chosen,
)
vit = _task(
    "vit",
    _classifier(
        "ViTForImageClassification",
        "ViTConfig",
        **WIDE,
        **NO_DROPOUT,
        image_size=12,
        patch_size=4,
        attn_implementation="eager",
    ),
    _images,
    _chosen,
)


def by_sdpa(model: nn.Module) -> nn.Module:
    model.set_attn_implementation("sdpa")
    return model


for _of in (llama, mistral, gemma, gpt2, bert, vit):

    def _rewrite(model: nn.Module) -> nn.Module:
        return by_sdpa(model)

    _rewrite.__name__ = f"{_of.name}_by_sdpa"
    pair(_of)(_rewrite)


@pair(llama)
def llama_checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()
    return model


@pair(gpt2)
def gpt2_checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pair(llama)
def llama_with_norms_of_torch(model: nn.Module) -> nn.Module:
    for name, part in list(model.named_modules()):
        if type(part).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(len(part.weight), eps=part.variance_epsilon)
            norm.load_state_dict(part.state_dict())
            model = replace(model, name, norm)
    return model


class GateUp(nn.Module):
    """Llama's MLP with both of its first layers in one matrix."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_up = nn.Parameter(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach().clone())
        self.down = nn.Parameter(mlp.down_proj.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(gate * gate.sigmoid() * up, self.down)


@pair(llama)
def llama_gate_and_up_in_one(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp = GateUp(layer.mlp)
    return model


@pair(gpt2)
def gpt2_with_linears(model: nn.Module) -> nn.Module:
    """GPT-2's Conv1D holds its weight transposed."""
    for name, part in list(model.named_modules()):
        if isinstance(part, Conv1D):
            linear = nn.Linear(*part.weight.shape)
            linear.weight = nn.Parameter(part.weight.detach().T.contiguous())
            linear.bias = nn.Parameter(part.bias.detach().clone())
            model = replace(model, name, linear)
    return model


class Bare(nn.Module):
    """Gives the logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits


@pair(llama)
def llama_bare_logits(model: nn.Module) -> nn.Module:
    return Bare(model)


class Patches(nn.Module):
    """A convolution whose stride is its kernel, as a matrix product over unfolded patches."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.size, self.bias = conv.kernel_size, nn.Parameter(conv.bias.detach().clone())
        self.weight = nn.Parameter(conv.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        y = self.weight.flatten(1) @ F.unfold(x, self.size, stride=self.size) + self.bias[:, None]
        return y.view(n, -1, h // self.size[0], w // self.size[1])


@pair(vit)
def vit_patches_by_unfold(model: nn.Module) -> nn.Module:
    name = next(name for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
    return replace(model, name, Patches(model.get_submodule(name)))
