"""Losses, optimizers, schedules and clipping by their names, and what a resumed seed has of them."""

import json
import math

import pytest
import torch
import yaml
from torch import nn

from driftlab.lockstep.arm import make_arm
from driftlab.lockstep.checkpoint import save_checkpoint
from driftlab.lockstep.loop import Lockstep
from suite.command.configuration import digest
from suite.command.errors import ConfigurationError
from suite.running.updates import make_clip, make_loss, make_optimizer, make_scheduler
from tests.driftlab.lockstep.test_lockstep import load_checkpoint
from tests.suite import own
from tests.suite.conftest import set_anew

STEPS = 20
SCHEDULER = "scheduler._target_=torch.optim.lr_scheduler."


def rates(*overrides: str) -> list[float]:
    """The learning rate of each update, over the full one."""
    settings = set_anew("control", f"steps={STEPS}", "optimizer.lr=0.5", *overrides)
    optimizer = make_optimizer(settings)([nn.Parameter(torch.ones(2))])
    scheduler = make_scheduler(settings)(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"] / 0.5)
        optimizer.step()
        scheduler.step()
    return found


def test_a_cosine_starts_at_the_full_rate_and_one_with_a_warm_up_rises_to_it():
    cosine = [0.5 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    assert rates() == pytest.approx(cosine)
    warm = rates("learning_rate_schedule=warmup_cosine", "warmup=0.2")
    assert warm[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert warm[4:] == sorted(warm[4:], reverse=True)


@pytest.mark.parametrize("share", [0, 0.05, 0.1, 0.3, 1])
def test_one_cycle_rises_to_the_full_rate_and_comes_down(share):
    found = rates("learning_rate_schedule=onecycle", f"warmup={share}")
    top = found.index(max(found))
    assert max(found) == pytest.approx(1)
    assert found == sorted(found[:top]) + sorted(found[top:], reverse=True)
    assert top == pytest.approx(max(share * STEPS, 2), abs=1)


def test_a_scheduler_of_torchs_is_moved_after_each_update():
    step = rates(f"{SCHEDULER}StepLR", "++scheduler.step_size=5", "++scheduler.gamma=0.5")
    assert step == pytest.approx([0.5 ** (k // 5) for k in range(STEPS)])
    assert rates("scheduler._target_=tests.suite.own.rising")[:6] == pytest.approx(
        [0.1, 0.325, 0.55, 0.775, 1, 1]
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["scheduler._target_=tests.suite.own.no_scheduler"], "made a NoneType: name a scheduler"),
        ([f"{SCHEDULER}ReduceLROnPlateau"], "made a ReduceLROnPlateau: name a scheduler"),
        ([f"{SCHEDULER}StepLR"], "scheduler: TypeError"),
    ],
)
def test_what_is_no_scheduler_is_one_line(overrides, line):
    with pytest.raises(ConfigurationError, match=line):
        rates(*overrides)


def test_a_lack_of_memory_is_not_the_fault_of_what_was_named():
    with pytest.raises(torch.OutOfMemoryError):
        rates("scheduler._target_=tests.suite.own.no_memory")


def test_losses_are_functions_with_arguments_or_classes():
    outputs, targets = torch.randn(3, 10, generator=torch.Generator().manual_seed(0)), torch.arange(3)
    function = make_loss(set_anew("control", "loss._target_=tests.suite.own.distance", "++loss.power=4"))
    assert function(outputs, targets) == own.distance(outputs, targets, 4)
    made = make_loss(set_anew("control", "loss._target_=tests.suite.own.Distance"))
    assert made(outputs, targets) == own.distance(outputs, targets)
    assert make_loss(set_anew("control")) is nn.functional.cross_entropy


def test_gradients_are_cut_to_the_norm():
    module = nn.Linear(3, 2)
    module(torch.full((1, 3), 100.0)).sum().backward()
    make_clip(set_anew("control", "clip=0.5"))(module)
    assert torch.stack([p.grad.norm() for p in module.parameters()]).norm() == pytest.approx(0.5)
    assert make_clip(set_anew("control")) is None


def test_what_is_said_of_nothing_changes_no_digest_and_what_is_said_does():
    plain = digest(set_anew("control"))
    settings = set_anew("control")
    for name in ("loss", "scheduler", "warmup", "clip"):
        settings.pop(name)
    assert digest(settings) == plain
    asked = ["clip=1.0", "loss._target_=tests.suite.own.distance", "learning_rate_schedule=onecycle"]
    asked += [f"{SCHEDULER}ConstantLR"]
    assert len({plain, *(digest(set_anew("control", one)) for one in asked)}) == 5


OF_TORCH = {
    "StepLR": "++scheduler.step_size=2",
    "MultiStepLR": "++scheduler.milestones=[2,5]",
    "CosineAnnealingWarmRestarts": "++scheduler.T_0=3",
    "CyclicLR": "++scheduler={base_lr: 0.01, max_lr: 0.1, step_size_up: 2}",
    "OneCycleLR": "++scheduler={max_lr: 0.1, total_steps: 10}",
    "LinearLR": "++scheduler.total_iters=4",
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_resumed_seed_goes_on_at_the_same_rate(tmp_path, name):
    settings = set_anew("control", f"{SCHEDULER}{name}", OF_TORCH[name])

    def lockstep() -> Lockstep:
        torch.manual_seed(0)
        net, of = nn.Linear(3, 10), make_optimizer(settings)
        arm = make_arm(
            "reference",
            "float32",
            net,
            lambda m: of(m.parameters()),
            8,
            scheduler=make_scheduler(settings),
        )
        return Lockstep([arm], nn.functional.cross_entropy)

    def walk(of: Lockstep, steps) -> list[torch.Tensor]:
        for step in steps:
            of.forward_backward(step, torch.ones(2, 3), torch.tensor([0, 1]))
            of.update(step)
        return [p.detach().clone() for p in of.arms[0].module.parameters()]

    whole, first, second = lockstep(), lockstep(), lockstep()
    walk(first, range(3))
    save_checkpoint(first, 3, tmp_path)
    assert load_checkpoint(second, tmp_path) == 3
    for a, b in zip(walk(whole, range(8)), walk(second, range(3, 8)), strict=True):
        assert torch.equal(a, b)


def test_a_scheduler_takes_the_place_of_the_schedule(train):
    shown = train("+experiment=control", f"{SCHEDULER}LinearLR", "--cfg", "job", "--resolve")
    assert yaml.safe_load(shown.out)["learning_rate_schedule"] == "constant"
    done = train("+experiment=control", f"{SCHEDULER}LinearLR", "learning_rate_schedule=cosine")
    assert "move one rate: leave one of them out" in done.errors[0]
    done = train("+experiment=control", f"{SCHEDULER}LinearLR", "+scheduler.totl_iters=3")
    assert done.errors == [
        "error: scheduler.totl_iters is no argument of LinearLR: did you mean total_iters?"
    ]


def test_all_of_it_is_trained_and_windows_have_it_too(train, tmp_path):
    """A right rewrite with an own loss, a schedule that ends with the training, and clipping."""
    asked = ["model._target_=tests.suite.own.Net", "loss._target_=tests.suite.own.Distance", "clip=0.01"]
    asked += ["learning_rate_schedule=onecycle", "local.windows=[2]", "local.updates=2"]
    assert train("+experiment=split_conv", *asked).status == 0
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["verdict"] == "round_off"
    assert list(tmp_path.rglob("local.csv"))
