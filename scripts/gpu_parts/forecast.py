"""How long a seed of each experiment takes at full scale on this GPU, from its own timed steps."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from scripts.gpu_parts.part import ROOT, Check, Found, Items, Part
from scripts.gpu_parts.training import drawn_images, settings_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from suite.running.costs import Sketch

EXPERIMENTS = ROOT / "conf" / "experiment"
TEST_IMAGES = 10_000  # of CIFAR-10
# The settings that a step's cost depends on: experiments that agree in them are timed once.
COSTLY = ("model", "rewrite", "roles", "dtypes", "batch_size", "tf32", "eval_images", "probe_images")
_sketches: dict[str, Sketch] = {}


def items(check: Check) -> Items:
    names = ["split_conv", "kinks"] if check.smoke else sorted(f.stem for f in EXPERIMENTS.glob("*.yaml"))
    return {name: partial(_forecast, name) for name in names}


def _forecast(name: str, check: Check) -> Found:
    from omegaconf import OmegaConf

    kind = OmegaConf.load(EXPERIMENTS / f"{name}.yaml").get("kind", "training")
    if kind != "training":
        return Found(f"cannot be forecast: experiments/{kind} measures in a way of its own")
    from suite.command.configuration import AUTO, with_float64_steps
    from suite.running.costs import float64_choice, forecast

    settings = settings_of(check, name)
    costly = str({key: settings[key] for key in COSTLY})
    if costly not in _sketches:
        _sketches[costly] = _sketch(settings)
    sketch = _sketches[costly]
    if settings.float64_steps == AUTO:
        settings = with_float64_steps(settings, float64_choice(settings, sketch)["float64_steps"])
    seconds = forecast(settings, sketch, [0], workers=1)
    updates = f"{settings.steps:,} updates, {settings.float64_steps:,} of them in float64 too"
    values = {"seconds": seconds, "float64_steps": settings.float64_steps} | asdict(sketch)
    return Found(f"{seconds / 60:.1f} min a seed ({updates})", values=values)


def _sketch(settings: DictConfig) -> Sketch:
    """With as many test images as CIFAR-10 has: of the drawn ones, which need no network, there are fewer."""
    from driftlab.process import settled
    from suite.running.costs import build_sketched, make_sketch

    images = drawn_images()
    with settled(tf32=settings.tf32, cuda=True):
        sketch = make_sketch(settings, build_sketched(settings, images, 0))
    more = 1 if settings.eval_images else TEST_IMAGES / len(images.test_images)
    costs = {d: replace(cost, evaluation=more * cost.evaluation) for d, cost in sketch.costs.items()}
    return replace(sketch, costs=costs)


PART = Part("forecast", "A seed of each experiment at full scale on this GPU", 1.5, items)
