"""Shadow execution of float32 layers, one by one and in chains, against the same layers made ``double()``."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from tests.driftlab.arithmetic.shadowing import Calling, assert_equal_in_shadow


def image():
    return [torch.randn(3, 4, 8, 8)]


def sequence():
    return [torch.randn(3, 5, 8)]


def sequences():
    return [torch.randn(3, 5, 8), torch.randn(3, 5, 8)]


def words():
    return [torch.randint(9, (3, 5))]


def packed(x):
    lengths = torch.tensor([5, 4, 2])
    narrow = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(narrow, batch_first=True)[0]


LAYERS = {
    "linear": (lambda: nn.Linear(8, 6), sequence),
    "bilinear": (lambda: nn.Bilinear(8, 8, 3), sequences),
    "conv1d": (lambda: nn.Conv1d(5, 4, 3), sequence),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), image),
    "circular conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), image),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3), lambda: [torch.randn(2, 2, 4, 5, 4)]),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2), image),
    "batch norm": (lambda: nn.BatchNorm2d(4), image),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), image),
    "group norm": (lambda: nn.GroupNorm(2, 4), image),
    "layer norm": (lambda: nn.LayerNorm(8), sequence),
    "RMS norm": (lambda: nn.RMSNorm(8, eps=1e-6), sequence),
    "local response norm": (lambda: nn.LocalResponseNorm(2), image),
    "RNN": (lambda: nn.RNN(8, 4), sequence),
    "RNN, batch first": (lambda: nn.RNN(8, 4, batch_first=True), sequence),
    "LSTM": (lambda: nn.LSTM(8, 4, 2, bidirectional=True), sequence),
    "LSTM, batch first": (lambda: nn.LSTM(8, 4, batch_first=True, proj_size=2), sequence),
    "GRU": (lambda: nn.GRU(8, 4), sequence),
    "GRU, batch first": (lambda: nn.GRU(8, 4, batch_first=True), sequence),
    "LSTM cell": (lambda: nn.LSTMCell(8, 4), lambda: [torch.randn(3, 8)]),
    "packed sequence": (lambda: Calling(packed), sequence),
    "embedding": (lambda: nn.Embedding(9, 4, padding_idx=0), words),
    "embedding of bounded norm": (lambda: nn.Embedding(9, 4, max_norm=0.5), words),
    "embedding bag": (lambda: nn.EmbeddingBag(9, 4), words),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: [*sequences(), torch.randn(3, 5, 8)],
    ),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), sequence),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), sequences),
    "max pool": (lambda: nn.MaxPool2d(2), image),
    "average pool": (lambda: nn.AvgPool2d(3, padding=1), image),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(3), image),
    "bilinear upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), image),
    "PReLU": (lambda: nn.PReLU(4), image),
    "GELU": (nn.GELU, image),
    "softmax": (lambda: nn.LogSoftmax(1), image),
    "dropout": (lambda: nn.Dropout(0.4), image),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 4)), sequence),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), sequence),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_shadow_equals_the_double_layer(name, training):
    make, inputs = LAYERS[name]
    torch.manual_seed(0)
    assert_equal_in_shadow(make().train(training), inputs())


WAYS = [nn.Tanh, nn.SiLU, nn.Softplus, lambda: nn.LayerNorm(6), lambda: nn.Linear(6, 6), nn.Softsign]
CASTS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, len(WAYS) - 1), st.sampled_from(CASTS)), min_size=1, max_size=6),
    st.integers(0, 2**31),
)
def test_casts_on_the_way_through_any_network_are_undone(drawn, seed):
    torch.manual_seed(seed)
    parts = [(WAYS[i](), dtype) for i, dtype in drawn]
    casting = [nn.Sequential(part, Calling(lambda x, d=dtype: x.to(d).float())) for part, dtype in parts]
    reference = nn.Sequential(*(part for part, _ in parts))
    assert_equal_in_shadow(nn.Sequential(*casting), [torch.randn(4, 6)], reference)
