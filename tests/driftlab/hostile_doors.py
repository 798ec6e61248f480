"""What any argument of any call may be handed: things that are none, code that raises, broken rewrites."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.driftlab.hostile import (
    Around,
    batches,
    halved,
    identity,
    inputs,
    leaving,
    mine,
    network,
    raising,
    sgd,
)


class UntoldError(Exception):
    """An error whose own message raises."""

    def __str__(self):
        raise TypeError


def untold(*args, **options):
    raise UntoldError


class Awkward:
    """A thing that raises, whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise TypeError("no repr")

    __len__ = __index__ = __float__ = __bool__ = __eq__ = __iter__ = __getitem__ = raising
    __hash__ = None


class Groups:
    """An optimizer by its groups, which are none."""

    param_groups = (3,)

    def __init__(self, parameters):
        self.param_groups = [3]


class Steps:
    """A scheduler by its method alone."""

    def __init__(self, optimizer):
        self.step = raising


def sgd_whose(method, on_class=False):
    """Makes an SGD of which one method raises: its class's, or one that was set on it later."""

    def make(parameters):
        if on_class:
            return type("Own", (torch.optim.SGD,), {method: raising})(parameters)
        optimizer = torch.optim.SGD(parameters)
        setattr(optimizer, method, raising)
        return optimizer

    return make


def overriding(method, error=KeyError):
    """``network``, of whose methods one raises."""

    def own(self, *args, **options):
        raise error("several\nlines")

    model = network()
    model.__class__ = type("Own", (nn.Sequential,), {method: own})
    return model


METHODS = ("modules", "children", "named_modules", "parameters", "named_parameters", "buffers", "train")
METHODS += (
    "eval",
    "state_dict",
    "to",
    "float",
    "zero_grad",
    "__call__",
    "__hash__",
    "__deepcopy__",
    "forward",
)


def copied_to(anything):
    model = network()
    model.__class__ = type("Own", (nn.Sequential,), {"__deepcopy__": lambda self, memo: anything})
    return model


class WritingIds(nn.Module):
    """Table rows 1 to 5 and 0 for the ids 0 to 5, which it counts up in their place."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(6, 5), network()

    def forward(self, ids):
        return self.body(self.table(ids.add_(1).remainder_(6)))


def writing_targets(outputs, targets):
    return F.cross_entropy(outputs, targets.add_(1).remainder_(3))


def holding_itself():
    cycle = [inputs()]
    cycle.append(cycle)
    return cycle


def changing_defaults(body, x):
    torch.set_default_dtype(torch.float64)
    torch.autograd.set_detect_anomaly(True)
    torch.set_num_threads(2)
    torch.set_default_device("cpu")
    return body(x)


def drawing(body, x):
    """Noise out of generators that torch does not know."""
    return body(x) * (1 + float(np.random.rand()))


class Behind(nn.Module):
    """A network, and what is made of its outputs."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x):
        return self.change(self, self.model(x))


def behind(change):
    return lambda model: Behind(model, change)


def giving(method, *args, in_eval_alone=False):
    """Returns what a method of the outputs does."""

    def change(self, y):
        return y if in_eval_alone and self.training else getattr(y, method)(*args)

    return behind(change)


class ThroughSparse(nn.Module):
    """A layer whose outputs are sparse, and are made dense by another."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.factor = nn.Linear(5, 3), factor
        self.sparse, self.dense = giving("to_sparse")(self.body), giving("to_dense")(nn.Identity())

    def forward(self, x):
        return self.dense(self.sparse(self.factor * x))


def moved(model):
    with torch.no_grad():
        list(model.parameters())[-1].add_(0.01)
    return model


RIGHT = (identity, halved, behind(lambda _, y: y))
# another function in each of what a door looks at, outputs among them
BROKEN = (
    moved,
    behind(lambda _, y: y * 1.01),
    behind(lambda _, y: -y),
    behind(lambda _, y: y * float("nan")),
    behind(lambda self, y: y if self.training else y + 0.1),
)
ANYTHING = (None, 3, -1, 0, True, 2.5, float("nan"), float("inf"), 10**400, "ab", b"ab", 2j, ..., object)
ANYTHING += (Awkward(), np.int64(2), np.float32("nan"), range(3), raising, untold, leaving, mine)
ANYTHING += (lambda *args: None, lambda: None, int, max, "ab".__getitem__)
# made anew for each call
FRESH = (network, inputs, batches, list, dict, set, object, lambda: (i for i in range(3)), holding_itself)
FRESH += (lambda: np.ones(2), lambda: torch.tensor(2), lambda: nn.Sequential(nn.LazyLinear(3)))
NETWORKS = [lambda way=way: Around(way) for way in (raising, untold, mine, changing_defaults, drawing)]
NETWORKS += [lambda method=method: overriding(method) for method in METHODS]
NETWORKS += [lambda: nn.Linear(5, 0), lambda: network().to("meta"), lambda: nn.Sequential(nn.LazyLinear(3))]
INPUTS = [holding_itself, lambda: (i for i in ()), lambda: inputs().to_sparse(), lambda: inputs().to("meta")]
INPUTS += [lambda: inputs(0), lambda: inputs()[:, :4], lambda: inputs() * float("nan"), lambda: inputs()[0]]
LOSSES = [lambda: untold, lambda: F.mse_loss, lambda: lambda o, t: o, lambda: lambda o, t: (o.sum(), 1)]
OPTIMIZERS = [lambda: Groups, lambda: sgd(lr=float("nan")), lambda: untold, lambda: lambda p: [3]]
OPTIMIZERS += [lambda: sgd_whose("step"), lambda: sgd_whose("zero_grad", on_class=True)]
