"""Networks, batches, losses and optimizers that a careful tester would try, good ones and hopeless ones."""

import functools
import sys
import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from tests.driftlab.arithmetic.layers import Halves


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def identity(model):
    return model


def halved(model):
    model[0] = Halves(model[0])
    return model


def inputs(rows=8):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))


def batches(rows=8):
    return [(inputs(rows), torch.arange(rows) % 3)]


def raising(*args, **options):
    raise KeyError("several\nlines")


def leaving(*args, **options):
    sys.exit(0)


class Mine(BaseException):
    """No ``Exception``."""


def mine(*args, **options):
    raise Mine("mine")


def closing(*args, **options):
    raise GeneratorExit


def not_a_number(body, x):
    return body(x) * float("nan")


def broken_stream():
    yield batches()[0]
    raise OSError("the disk is gone")


def endless():
    while True:
        yield batches()[0]


class Around(nn.Module):
    """``network`` with a forward of its own."""

    def __init__(self, forward):
        super().__init__()
        self.body, self.way = network(), forward

    def forward(self, x):
        return self.way(self.body, x)


class Itself(nn.Linear):
    """A layer that hands itself out for a copy."""

    def __deepcopy__(self, memo):
        return self


class Tied(nn.Linear):
    """A layer whose copy has weights of its own, and its memory in common."""

    def __deepcopy__(self, memo):
        twin = Tied(self.in_features, self.out_features)
        twin.weight = nn.Parameter(self.weight.data)
        return twin


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(5, 3)
        self.lock = threading.Lock()


class Caching(nn.Linear):
    """A layer that keeps what it has computed, graph and all."""

    def forward(self, x):
        self.last = [super().forward(x)]
        return self.last[0]


class KeepsParts(nn.Linear):
    """Of a weight, which an optimizer then writes into."""

    def forward(self, x):
        self.parts = self.weight.unbind(0)
        return super().forward(x)


class InTurn(nn.Linear):
    """Takes its weights one after another, and leaves the last where it is."""

    def __init__(self, *sizes, anew=True):
        super().__init__(*sizes)
        self.anew, self.turn = anew, (w for w in (self.weight, self.bias) * 1000)

    def forward(self, x):
        if self.anew:
            self.turn = (w for w in (self.weight, self.bias))
        return x @ next(self.turn).T + next(self.turn)


class InEval(nn.Sequential):
    """A network that ``train`` leaves in eval mode."""

    def train(self, mode=True):
        return super().train(False)


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


class Masters(torch.optim.SGD):
    """Steps on copies of the weights and carries them back, as mixed precision does."""

    def __init__(self, parameters):
        self.given = list(parameters)
        super().__init__([nn.Parameter(p.detach().clone()) for p in self.given], lr=0.1, momentum=0.9)

    def step(self, closure=None):
        masters = self.param_groups[0]["params"]
        for master, given in zip(masters, self.given, strict=True):
            master.grad = given.grad
        super().step(closure)
        with torch.no_grad():
            for master, given in zip(masters, self.given, strict=True):
                given.copy_(master)


class OwnLoss(nn.Module):
    """A loss with weights and a counter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs, targets):
        self.calls += 1
        return F.cross_entropy(outputs * self.scale, targets)


def cached():
    layer = Caching(5, 3)
    layer(inputs())
    return layer


def with_parts_of_an_older_weight():
    layer = KeepsParts(5, 3)
    layer(inputs())
    with torch.no_grad():
        layer.weight.mul_(2)
    return layer


def normed_by_hooks(norm):
    model = network()
    model[0] = norm(model[0])
    return model


def pruned():
    model = network()
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


def with_weight(value):
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = value
    return model


def zeroed():
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def quantised(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, **options)


def optimizer_class(step):
    return type("Odd", (torch.optim.SGD,), {"step": step})


FOREIGN = network(1)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])
SAME = ("bit_identical", "round_off")


# what is wrong -> what is given, and what the one line must say
REFUSED = {
    "reference": [
        (lambda: None, "reference is a NoneType"),
        (lambda: nn.Linear, "reference is a type"),
        (lambda: Around(raising), r"KeyError: 'several.*lines' \(driftlab/hostile.py:\d+\)"),
        (lambda: Around(leaving), "sys.exit"),
        (lambda: Around(mine), r"diagnose stops: Mine: mine \(driftlab/hostile.py:\d+\)"),
        (lambda: Around(lambda body, x: (body(x),)), "not tuple"),
        (lambda: network().requires_grad_(False), "everything is detached"),
        (lambda: network().to("meta"), "meta device"),
        (lambda: InTurn(5, 3, anew=False), "of which there is no copy: make it in the call that uses it"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy module"),
        (lambda: with_weight(float("nan")), "0.weight holds NaN"),
        (zeroed, "no parameter that is not zero"),
        (nn.ReLU, "empty parameter list"),
        (Locked, "Locked cannot be copied: TypeError: cannot pickle"),
        (lambda: Itself(5, 3), "Itself cannot be copied: its deep copy shares"),
        (lambda: Tied(5, 3), "Tied cannot be copied: its deep copy shares"),
    ],
    "candidate": [
        (lambda: None, "candidate is a NoneType"),
        (lambda: nn.Linear, "candidate.model. raised: TypeError"),
        (lambda: raising, r"raised: KeyError: 'several.*lines' \(driftlab/hostile.py:\d+\)"),
        (lambda: leaving, "sys.exit"),
        (lambda: mine, r"diagnose stops: Mine: mine \(driftlab/hostile.py:\d+\)"),
        (lambda: closing, r"diagnose stops: GeneratorExit \(driftlab/hostile.py:\d+\)"),
        (lambda: Around(closing), r"diagnose stops: GeneratorExit \(driftlab/hostile.py:\d+\)"),
        (lambda: lambda model: None, "returned a NoneType"),
        (lambda: network().to("meta"), "candidate: 0.weight lies on the meta device"),
        (lambda: Around(raising), r"driftlab/hostile.py:\d+"),
        (lambda: Around(lambda body, x: None), "must be Tensor, not NoneType"),
        (lambda: Around(lambda body, x: body(x).detach()), "everything is detached"),
        (lambda: Around(lambda body, x: torch.empty(2**60)), "allocate"),
        (lambda: Itself(5, 3), "Itself cannot be copied"),
    ],
    "batches": [
        (lambda: None, "batches is a NoneType"),
        (lambda: 3, "batches is a int"),
        (lambda: [], "batches holds none"),
        (broken_stream, r"batches raised: OSError: the disk is gone \(driftlab/hostile.py:\d+\)"),
        (lambda: (raising() for _ in range(2)), "batches raised: KeyError"),
        (lambda: (mine() for _ in range(2)), r"Mine: mine \(driftlab/hostile.py:\d+\)"),
        (lambda: batches()[0], "batches holds a Tensor of 8"),
        (lambda: ["ab"], "batches holds a str of 2"),
        (lambda: [{"x": 1, "y": 2}], "batches holds a dict of 2"),
        (lambda: [(None, None)], "must be Tensor, not NoneType"),
        (lambda: [(inputs().numpy(), np.zeros(8))], "not numpy.ndarray"),
        (lambda: [(inputs()[:, :4], torch.arange(8) % 3)], "cannot be multiplied"),
        (lambda: [(inputs(), torch.full((8,), 7))], "Target 7 is out of bounds"),
        (lambda: batches(0), r"batches\[0\] holds no number \(\[0, 5\]\)"),
        (lambda: batches() + batches(0), r"batches\[1\] holds no number"),
        (lambda: [(inputs() * float("nan"), torch.arange(8) % 3)], "loss on the first batch is not finite"),
        (lambda: [(inputs().to("meta"), torch.arange(8) % 3)], r"batches\[0\] .* meta device"),
        (lambda: [(inputs().to_sparse(), torch.arange(8) % 3)], "give it dense"),
        (lambda: [*batches(), (inputs()[:, :4], torch.arange(8) % 3)], "cannot be multiplied"),
    ],
    "loss": [
        (lambda: None, "loss is a NoneType"),
        (lambda: nn.CrossEntropyLoss, "loss is a type"),
        (lambda: raising, r"KeyError: 'several.*lines' \(driftlab/hostile.py:\d+\)"),
        (lambda: leaving, "sys.exit"),
        (lambda: lambda outputs: outputs.sum(), "takes 1 positional argument but 2 were given"),
        (lambda: lambda o, t: F.cross_entropy(o, t, reduction="none"), r"not one real number but .* \[8\]"),
        (lambda: lambda o, t: 1.0, "not one real number but float"),
        (lambda: lambda o, t: o.argmax().float(), "everything is detached"),
        (lambda: lambda o, t: o.sum() * float("nan"), "loss on the first batch is not finite"),
        (lambda: lambda o, t: F.cross_entropy(o, t, CLASS_WEIGHTS), r"float64: .*hostile.py:\d+.*a partial"),
    ],
    "optimizer": [
        (lambda: None, "optimizer is a NoneType"),
        (lambda: torch.optim.SGD(FOREIGN.parameters()), "optimizer is a SGD"),
        (lambda: raising, r"optimizer raised: KeyError: 'several.*lines' \(driftlab/hostile.py:\d+\)"),
        (lambda: lambda parameters: None, "optimizer returned a NoneType"),
        (lambda: sgd(lr=-1), "Invalid learning rate: -1"),
        (lambda: lambda _: torch.optim.SGD(FOREIGN.parameters()), "moves parameters of another network"),
        (lambda: lambda own: torch.optim.SGD([*own, *FOREIGN.parameters()]), "of another network"),
        (lambda: torch.optim.LBFGS, "closure"),
        (lambda: optimizer_class(raising), r"KeyError: 'several.*lines' \(driftlab/hostile.py:\d+\)"),
        (lambda: optimizer_class(leaving), "sys.exit"),
    ],
    "candidate_optimizer": [
        (lambda: "sgd", "candidate_optimizer is a str"),
        (lambda: lambda module: None, "candidate_optimizer returned a NoneType"),
        (lambda: lambda module: torch.optim.SGD(FOREIGN.parameters()), "of another network"),
    ],
    "steps": [
        *((lambda steps=steps: steps, "steps=") for steps in (0, -1, True, 2.5, "5", None, float("nan"))),
        (lambda: 10**9, "steps=1000000000: what is kept of so many would take .* give at most steps="),
    ],
    "seed": [*((lambda seed=seed: seed, "seed=") for seed in (-1, 0.5, "0", None, 2**32, 2**70))],
    "trains": [*((lambda trains=trains: trains, "trains is a") for trains in (3, None, "no"))],
    "threads": [*((lambda threads=threads: threads, "threads=") for threads in (0, "2", 1.5))],
    "fold": [
        (lambda: 3, "fold is a int"),
        (lambda: raising, r"fold raised KeyError"),
        (lambda: lambda tensors: None, "gives a NoneType"),
        (lambda: lambda tensors: {}, "gives no 0.weight"),
    ],
}

# what is odd and has an answer -> what is given, and the verdicts that it may get
JUDGED = {
    "the old weight_norm": ({"reference": lambda: normed_by_hooks(nn.utils.weight_norm)}, SAME),
    "the old spectral_norm": ({"reference": lambda: normed_by_hooks(nn.utils.spectral_norm)}, SAME),
    "pruned": ({"reference": pruned}, SAME),
    "a cache with its graph": ({"reference": cached}, SAME),
    "a generator that a call left behind": ({"reference": lambda: InTurn(5, 3)}, SAME),
    "parts of an older weight": ({"reference": with_parts_of_an_older_weight}, SAME),
    "bfloat16": ({"reference": lambda: network().bfloat16()}, SAME),
    "a foreign network": ({"candidate": lambda: lambda model: FOREIGN}, ("bug",)),
    "NaN in the candidate": ({"candidate": lambda: with_weight(float("nan"))}, ("bug",)),
    "train stays in eval": ({"reference": Normed, "candidate": lambda: lambda m: InEval(*m)}, ("bug",)),
    "one row": ({"batches": lambda: batches(1)}, SAME),
    "a module with weights": ({"loss": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)}, SAME),
    "a partial": ({"loss": lambda: functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS)}, SAME),
    "a loss with a state": ({"loss": OwnLoss}, SAME),
    "a loss of one element": ({"loss": lambda: lambda o, t: F.cross_entropy(o, t)[None]}, SAME),
    "master weights": ({"candidate_optimizer": lambda: lambda m: Masters(m.parameters())}, SAME),
    "a rate of NaN": (
        {"candidate": lambda: halved, "optimizer": lambda: sgd(lr=float("nan"))},
        ("unstable",),
    ),
    "a rate of 1e30": (
        {"candidate": lambda: halved, "optimizer": lambda: sgd(lr=1e30, momentum=0.9, weight_decay=0.1)},
        ("unstable",),
    ),
    "a number of numpy's": ({"steps": lambda: np.int64(2)}, SAME),
    "the largest seed": ({"seed": lambda: 2**32 - 1}, SAME),
}

# in assert_equivalent: what is given, the error that it ends in (None where it passes), and what that says
ASSERTED = {
    "no inputs": ({"inputs": lambda: None}, "DiagnoseError", "must be Tensor"),
    "an empty tuple": ({"inputs": tuple}, "DiagnoseError", "missing 1 required"),
    "no rows": ({"inputs": lambda: inputs(0)}, "DiagnoseError", "inputs holds no number"),
    "NaN": ({"inputs": lambda: inputs() * float("nan")}, "DiagnoseError", "no output .* is finite"),
    "meta": ({"inputs": lambda: inputs().to("meta")}, "DiagnoseError", "inputs holds a tensor on the meta"),
    "outputs of whole numbers": (
        {"reference": lambda: Around(lambda body, x: body(x).argmax(1))},
        "DiagnoseError",
        "no floating number",
    ),
    "no outputs": (
        {"reference": lambda: Around(lambda body, x: body(x)[:0])},
        "DiagnoseError",
        "no floating",
    ),
    "it raises": ({"candidate": lambda: Around(raising)}, "DiagnoseError", r"driftlab/hostile.py:\d+"),
    "it leaves": ({"candidate": lambda: Around(leaving)}, "DiagnoseError", "sys.exit"),
    "an error of its own": (
        {"candidate": lambda: Around(mine)},
        "DiagnoseError",
        r"Mine: mine \(driftlab/ho",
    ),
    "a generator's end": ({"candidate": lambda: closing}, "DiagnoseError", r"GeneratorExit \(driftlab/ho"),
    "NaN in the candidate": (
        {"candidate": lambda: with_weight(float("nan"))},
        "AssertionError",
        r"candidate's is not finite where the reference's is\n(.*\n)*Beyond measure",
    ),
    "a NaN that both have": (
        {"reference": lambda: Around(lambda body, x: body(x) / 0), "candidate": lambda: Around(not_a_number)},
        "AssertionError",
        "where one of the two holds NaN or inf, the other holds something else",
    ),
    "a fold": ({"fold": lambda: 3}, "DiagnoseError", "fold is a int"),
    "a seed": ({"seed": lambda: "0"}, "DiagnoseError", "seed='0'"),
    "itself": ({"reference": lambda: Itself(5, 3)}, "DiagnoseError", "cannot be copied"),
    "float64": ({"reference": lambda: network().double(), "inputs": lambda: inputs().double()}, None, ""),
    "weight_norm": ({"reference": lambda: normed_by_hooks(nn.utils.weight_norm)}, None, ""),
    "quantised": ({"candidate": lambda: quantised}, "AssertionError", "float32 alone, and about [5-9] bits"),
    "both quantised": ({"reference": lambda: quantised(network())}, None, ""),
    "other weights, both quantised": (
        {"reference": lambda: quantised(network()), "candidate": lambda: quantised(network(3))},
        "AssertionError",
        "in which alone it runs, and as far off nearby: another function",
    ),
}
