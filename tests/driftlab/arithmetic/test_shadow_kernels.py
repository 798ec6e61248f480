"""Which kernels torch chooses under shadow execution: only such that know the float64 that they get."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic
from driftlab.arithmetic.shadow_tensor import Shadow
from tests.driftlab.arithmetic.shadowing import Watching


class Chosen(Watching):
    """Lists the kernels that are run, all of them on the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._opname)
        return func(*args, **{k: "cpu" if k == "device" else v for k, v in (kwargs or {}).items()})


class OnGpu(Shadow):
    """Says that it lies on a GPU, by which torch chooses; what it holds lies on the CPU."""

    @staticmethod
    def __new__(cls, held, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), dtype=dtype, device="cuda")


def test_attention_takes_no_fused_kernel():
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    with Chosen() as chosen, shadow_arithmetic():
        found = F.scaled_dot_product_attention(*map(shadow, (q, k, v)))
    assert not [name for name in chosen.seen if "attention" in name]
    expected = (q @ k.mT / 4).double().softmax(-1) @ v.double()
    torch.testing.assert_close(held(found), expected, rtol=1e-5, atol=1e-6)


GPU = {
    "batch norm": (lambda x, w: F.batch_norm(x, None, None, w, w, training=True), (4, 3, 5, 5), (3,)),
    "sampling on a grid": (lambda x, g: F.grid_sample(x, g, align_corners=True), (2, 3, 4, 4), (2, 5, 5, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", GPU)
def test_what_says_that_it_is_on_a_gpu_takes_no_kernel_of_cudnn(name, dtype):
    function, *shapes = GPU[name]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    with Chosen() as chosen, shadow_arithmetic():
        found = function(*(OnGpu(x, dtype) for x in inputs))
    assert not [name for name in chosen.seen if "cudnn" in name]
    torch.testing.assert_close(held(found), function(*inputs), rtol=1e-12, atol=1e-13)


def test_the_callers_choice_of_kernels_is_as_it_was():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), torch.backends.cudnn.flags(enabled=True):
        with shadow_arithmetic():
            assert not torch.backends.cudnn.enabled
        assert torch.backends.cudnn.enabled
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
