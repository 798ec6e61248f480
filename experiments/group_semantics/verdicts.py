"""What the suite itself says about groups=2 and what people take for the same thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from driftlab.diagnosis import diagnose, diagnosed
from driftlab.network.calling import calling, copied
from driftlab.network.pair import Pair, the_pair
from driftlab.record.seed_record import SeedRecord
from driftlab.words import Verdict
from experiments.group_semantics.check import net_sizes
from experiments.group_semantics.dense import dense_weight, own_weights, without_groups
from models.grouped_net import TILES, GroupedNet
from models.rewrites.grouped_conv import separate_groups
from models.rewrites.interleave_groups import interleave_groups

ASKED = "the conv asked about"
THIN_UPDATES = 3  # the wrong ones show at update 0 or 1
Batches = list[tuple[Tensor, Tensor]]
SAME_NUMBERS = "groups=1 with the same numbers, zeros elsewhere"
KEPT_ZEROS = f"{SAME_NUMBERS} and kept at zero"

REWRITES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "convs side by side": separate_groups,
    "groups=1 with weights of its own": own_weights,
    SAME_NUMBERS: without_groups,
    KEPT_ZEROS: lambda model: without_groups(model, masked=True),
    "interleaved channels": interleave_groups,
}


def conv_and_batches(settings: DictConfig) -> tuple[nn.Module, Batches, Callable]:
    """The asker's conv, random images, and the mean square of its output against random targets."""
    conv = case_conv(settings.case).to(settings.device)
    shape = (settings.training.batch, settings.case.in_channels, *settings.case.image)
    wanted = conv(torch.empty(shape, device=settings.device)).shape
    draws = [(torch.randn(shape), torch.randn(wanted)) for _ in range(settings.training.updates + 1)]
    return conv, [(x.to(settings.device), y.to(settings.device)) for x, y in draws], F.mse_loss


def net_and_batches(
    settings: DictConfig, sizes: Mapping, updates: int
) -> tuple[nn.Module, Batches, Callable]:
    """A ``GroupedNet`` of these sizes, random puzzles and their cross-entropy."""
    net = GroupedNet(settings.net.groups, **sizes, classes=settings.net.classes).to(settings.device)
    batch = settings.training.batch
    draws = [
        (torch.randn(batch, TILES, 3, *sizes["tile"]), torch.randint(0, settings.net.classes, (batch,)))
        for _ in range(updates + 1)
    ]
    return net, [(x.to(settings.device), y.to(settings.device)) for x, y in draws], F.cross_entropy


def case_conv(case: DictConfig) -> nn.Conv2d:
    """The conv that the asker was shown, without bias."""
    sizes = case.in_channels, case.out_channels, case.kernel_size
    return nn.Conv2d(*sizes, padding=case.padding, groups=case.groups, bias=False)


def conv_name(case: DictConfig) -> str:
    sizes = f"{case.in_channels}, {case.out_channels}, {case.kernel_size}"
    return f"Conv2d({sizes}, padding={case.padding}, groups={case.groups}, bias=False)"


def literal_record(settings: DictConfig, seed: int) -> SeedRecord:
    """The pair in question in lockstep: the asker's conv, or the network, against convs side by side."""
    if settings.training.pair == "net":
        module, batches, loss = net_and_batches(settings, net_sizes(settings.net), settings.training.updates)
    else:
        module, batches, loss = conv_and_batches(settings)
    mine, theirs, fold = the_pair(module, separate_groups, None)
    optimizer = _optimizer(settings)
    make = [lambda m: optimizer(m.parameters())] * 2
    call = calling(mine, batches[0][0])
    return diagnosed(Pair(mine, theirs, fold, loss, *make, call, seed), batches, settings.training.updates)


def verdicts(settings: DictConfig, seed: int) -> list[dict]:
    """Every rewrite of the asker's conv and, but at the smallest scale, of the thinned network."""
    subjects = {ASKED: conv_and_batches(settings)}
    if settings.scale.name != "smoke":
        thin = f"network {list(settings.thin.channels)}"
        subjects[thin] = net_and_batches(settings, net_sizes(settings.thin), THIN_UPDATES)
    return [
        {"subject": subject, "rewrite": rewrite}
        | _verdict(settings, seed, *subjects[subject], REWRITES[rewrite])
        for subject in subjects
        for rewrite in REWRITES
    ]


def _verdict(
    settings: DictConfig, seed: int, module: nn.Module, batches: Batches, loss: Callable, rewrite: Callable
) -> dict:
    made = rewrite(copied(module))
    optimizer, updates = _optimizer(settings), len(batches) - 1
    found = diagnose(module, made, batches, loss, optimizer, steps=updates, seed=seed)
    decisive = next((e for e in found.evidence if e.supports is found.verdict), None)
    differs = any(e.probe == "function" and e.supports is Verdict.BUG for e in found.evidence)
    return {
        "verdict": str(found.verdict),
        "place": str(found.where) if found.where else None,
        "same_at_start": not differs,
        "apart": _apart(module, made, batches[0][0]),
        **{key: getattr(decisive, key, None) for key in ("probe", "measured", "threshold")},
    }


@torch.no_grad()
def _apart(module: nn.Module, made: nn.Module, x: Tensor) -> float:
    """Relative distance of the outputs before any training, 2-norms, float64."""
    own, other = (copied(m).double()(x.double()) for m in (module, made))
    return float((own - other).norm() / own.norm())


def zeros_pulled(settings: DictConfig) -> dict[str, float]:
    """The gradient of the asker's conv written with groups=1: where its weight is zero, and in the blocks.

    Returns:
        "zeros": how many weights are zero; "pulled": how many of them have a gradient; "ratio": the root mean
        square of the gradient there over that in the blocks.
    """
    conv, batches, loss = conv_and_batches(settings)
    dense, (x, y) = without_groups(copied(conv)), batches[0]
    loss(dense(x), y).backward()
    outside = dense_weight(torch.ones_like(conv.weight), conv.groups) == 0
    there, blocks = dense.weight.grad[outside], dense.weight.grad[~outside]
    ratio = float(there.square().mean().sqrt() / blocks.square().mean().sqrt())
    return {"zeros": there.numel(), "pulled": int((there != 0).sum()), "ratio": ratio}


def _optimizer(settings: DictConfig) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=settings.training.lr, momentum=0.9)
