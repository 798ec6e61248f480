"""The pretended device fails where a GPU would, computes what the CPU does, and goes as it came."""

import copy
from unittest import SkipTest

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import nn

from driftlab.arithmetic.shadow_tensor import Shadow
from tests.pretended_cuda import pretended_cuda


@pytest.fixture
def x(cuda):
    return torch.arange(6.0).reshape(2, 3).to("cuda")


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )


class Last(nn.Module):
    """The last of a sequence."""

    def forward(self, x):
        return (x[0] if isinstance(x, tuple) else x)[:, -1]


def recurrent():
    return nn.Sequential(nn.LSTM(6, 8, batch_first=True), Last())


def transformer():
    return nn.Sequential(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), Last())


NETWORKS = {
    "convnet": (convnet, (4, 3, 8, 8)),
    "recurrent": (recurrent, (4, 3, 6)),
    "transformer": (transformer, (4, 5, 6)),
}


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(2, 3),
        lambda x: torch.ones(2, 3) + x,
        lambda x: torch.ones(2, 3).add_(x.sum()),
        lambda x: torch.zeros(()).add_(x.sum()),
        lambda x: x.add_(torch.ones(2, 3)),
        lambda x: torch.cat([x, torch.ones(2, 3)]),
        lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
        lambda x: nn.Linear(3, 3)(x),
        lambda x: nn.LSTM(3, 3)(x),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
        lambda x: torch.where(x > 1, x, torch.ones(2, 3)),
        lambda x: x.bernoulli_(0.5, generator=torch.Generator()),
    ],
)
def test_tensors_of_two_devices_do_not_mix(x, mixed):
    with pytest.raises(RuntimeError, match="device"):
        mixed(x)


def test_nor_do_those_of_two_gpus():
    with pretended_cuda(gpus=2), pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")


def test_there_are_no_more_gpus_than_asked_for(cuda, monkeypatch):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(3).to("cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pretended_cuda(gpus=8):
        assert torch.cuda.device_count() == 1


def test_a_number_of_the_host_and_indices_of_the_host_are_taken(x, cuda):
    assert (x * torch.tensor(2.0) + 1).tolist() == [[1, 3, 5], [7, 9, 11]]
    assert x[torch.tensor([1])].tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: x.__array__()])
def test_numpy_does_not_read_it(x, read):
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        read(x)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: float(x.sum()), "_local_scalar_dense"),
        (lambda x: bool((x > 1).any()), "is_nonzero"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 1], "index by a mask"),
        (lambda x: x[torch.tensor([0, 1])], "index by indices of the host"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: x.tolist(), "copy to the host"),
        (lambda x: torch.ones(3).copy_(x[0]), "copy to the host"),
        (lambda x: torch.ones(3).to(x.device), "copy from the host"),
        (lambda x: torch.ones(3).to(x.device, non_blocking=True), "copy from the host"),
        (lambda x: torch.tensor([1.0], device="cuda"), "copy from the host"),
        (lambda x: torch.cuda.synchronize(), "synchronize"),
    ],
)
def test_what_the_host_waits_for_is_counted_with_its_place(x, cuda, asked, what):
    cuda.waited.clear()
    asked(x)
    ((found, place),) = cuda.waited
    assert found in (what, "_local_scalar_dense")
    assert place.startswith(__file__)


def test_what_it_does_not_wait_for_is_not(x, cuda):
    cuda.waited.clear()
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    x.add_(1).matmul(x.T).softmax(-1).clone().double().sum()
    torch.zeros(3, device="cuda"), torch.randn_like(x), torch.arange(4, device="cuda"), x.to("cuda")
    assert cuda.waited == []


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_train_as_on_the_cpu_and_stay_there(cuda, kind):
    make, shape = NETWORKS[kind]
    torch.manual_seed(0)
    network, inputs = make(), torch.randn(shape)
    losses = {}
    for place in ("cpu", "cuda"):
        module, batch = copy.deepcopy(network).to(place), inputs.to(place)
        module = copy.deepcopy(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        losses[place] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses[place].append(loss.item())
        state = [t for s in optimizer.state.values() for n, t in s.items() if n != "step"]
        tensors = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters()), *state]
        assert {t.device.type for t in tensors} == {place}
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)


def test_views_share_and_copies_do_not(x):
    part, copied = x[0], copy.deepcopy(x)
    part.view(3, 1).mul_(10)
    assert x.tolist() == [[0, 10, 20], [3, 4, 5]]
    assert copied.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert {part.device, copied.device, part.untyped_storage().device} == {torch.device("cuda:0")}


def test_a_module_is_moved_in_place(cuda):
    module = nn.Linear(2, 2)
    parameter = module.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.to("cuda")
    assert module.weight is parameter
    assert parameter.is_cuda
    assert type(parameter) is nn.Parameter
    module(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    assert module.cpu().weight.device.type == "cpu"


def test_a_state_is_stored_and_read_again(cuda):
    module = convnet().cuda()
    stored = load(save(module.state_dict()))
    assert {t.device.type for t in stored.values()} == {"cpu"}
    again = convnet().cuda()
    again.load_state_dict(stored)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_random_numbers_come_from_the_gpu_s_own_state(cuda):
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    drawn = (
        torch.randn(3, device="cuda"),
        F.dropout(torch.ones(50, device="cuda")),
        nn.Linear(3, 3, device="cuda"),
    )
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(torch.cuda.get_rng_state(), gpu)
    torch.cuda.set_rng_state(gpu)
    assert torch.equal(torch.randn(3, device="cuda"), drawn[0])
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(5)
        once = torch.randn(3, device="cuda")
        torch.manual_seed(5)
        assert torch.equal(torch.randn(3, device="cuda"), once)


def test_dropout_and_attention_are_those_of_a_gpu(cuda):
    from torch.profiler import profile

    ones = torch.ones(1, 2, 3, 4, device="cuda", requires_grad=True)
    with profile() as seen:
        F.dropout(ones, 0.5)
        F.scaled_dot_product_attention(ones, ones, ones).sum().backward()
        F.scaled_dot_product_attention(*[ones.double()] * 3)
    names = {e.key for e in seen.key_averages()}
    assert {"aten::native_dropout", "aten::_scaled_dot_product_efficient_attention_backward"} <= names
    assert "aten::_scaled_dot_product_attention_math" in names
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ops.aten._scaled_dot_product_efficient_attention(*[ones.double()] * 3, None, False)


def test_wrappers_of_driftlab_s_lie_on_it(cuda):
    shadow = Shadow(torch.ones(2, 3, dtype=torch.float64, device="cuda"), torch.float32)
    assert shadow.device == torch.device("cuda:0")
    assert (shadow * 2).sum().device.type == "cuda"


def test_what_it_cannot_compute_it_says(x):
    with pytest.raises(NotImplementedError, match=r"no kernel for aten\._cudnn_rnn"):
        torch._cudnn_rnn(x, [x], 4, None, x, None, 0, 3, 0, 1, False, 0.0, True, False, [], None)


@pytest.mark.parametrize("few", [torch.bfloat16, torch.float16])
def test_autocast_casts_by_the_lists_of_cuda(cuda, few):
    x, layer = torch.randn(3, 4).to("cuda"), nn.Linear(4, 4).to("cuda")
    with torch.autocast("cuda", few):
        assert layer(x).dtype is (x @ x.T).dtype is few
        assert layer(x).softmax(1).dtype is F.layer_norm(layer(x), (4,)).dtype is torch.float32
        assert layer(x).relu().dtype is few
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype is torch.float32
        assert (x.double() @ x.double().T).dtype is torch.float64
        layer(x).float().sum().backward()
    assert layer(x).dtype is layer.weight.grad.dtype is torch.float32


def test_the_driver_is_asked_for_when_something_is_done_there(cuda):
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    torch.manual_seed(0)
    assert not torch.cuda.is_initialized()
    torch.ones(1, device="cuda")
    assert torch.cuda.is_initialized()


def test_a_torch_without_cuda_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(SkipTest, match="built with CUDA"), pretended_cuda():
        pass


def test_nothing_is_left():
    owners = torch, torch.Tensor, torch.UntypedStorage, torch.cuda, torch._C
    before = [dict(vars(owner)) for owner in owners]
    with pretended_cuda(gpus=2):
        torch.ones(3, device="cuda:1").sum().item()
    assert [dict(vars(owner)) for owner in owners] == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(3, device="cuda")
    weight = torch.ones(2, requires_grad=True)
    (3 * weight).sum().backward()
    assert weight.grad.tolist() == [3, 3]
