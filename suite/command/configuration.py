"""From Hydra's composed configuration to settings that were checked, and their digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from suite.command.checking import check, check_interpolations, shown
from suite.command.command_line import CONF, given, in_sweep, instead, kind, overrides
from suite.command.errors import ConfigurationError, one_line
from suite.command.idle import OF_TRAININGS, say_idle
from suite.command.machine import chosen_device, register_resolvers, seeds_at_once, threads_chosen
from suite.command.schema import Scale, ScaleName, Shared, Training, WithOwnData
from suite.command.written import drop_arguments_of_others, label, written

# What does not change a seed's curves, and so is not part of the experiment's identity: seeds, paths,
# loggers, and how a run is carried out.
_NOT_IDENTITY = (
    *("seed", "results", "logger", "rerun", "reprobe", "fail_on", "checkpoint_every"),
    *("keep_checkpoint", "threads", "workers"),
    *("hypothesis", "question", "source", "caveat", "expected", "label"),
)
AUTO = "auto"
# Settings as they are where nobody asks: digests are as they were before there were any of these.
_BY_ITSELF = {
    "local": {"windows": AUTO, "updates": 6, "share": 0.1},
    "loss": {"_target_": "torch.nn.functional.cross_entropy"},
    "scheduler": {"_target_": None},
    "warmup": None,
    "clip": None,
    "stop_on_bug": False,
    "fast_float64": True,
}
# What scale=full said before there was auto: digests of other settings hold it still, and kinds of experiment
# that ask a question take it.
ALL_FLOAT64_STEPS = 3900


def composed(*command_line: str) -> DictConfig:
    """What Hydra makes of it, for whoever is not started by Hydra."""
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*command_line])


def resolve(config: DictConfig, say: Callable[[str], None] = print) -> DictConfig:
    """Every interpolation replaced by its value, on this machine, and held to the schema of its kind.

    A kind that trains no network of the config on no data set of it is left none of a training's settings.
    Whoever set one that changes nothing is told so.

    Raises:
        ConfigurationError: for the first setting that cannot be used. Nothing was written.
    """
    register_resolvers()
    schema = kind(shown(config.get("kind"))).Settings
    trains = issubclass(schema, Training)
    config = config.copy()
    OmegaConf.set_struct(config, False)
    config.device = chosen_device(config.get("device"))
    check_interpolations(config)
    if trains:
        drop_arguments_of_others(config)
    try:
        _take_own_sizes(config, schema) if trains else _keep_shared(config)
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigurationError(f"{error.full_key} is not set: write {error.full_key}=VALUE") from None
    except InterpolationKeyError:
        raise  # its line is made where that of a composition is
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"the configuration cannot be resolved: {one_line(error)}") from None
    if (several := values.pop("rewrites", None)) is not None:  # a training has taken them apart before
        raise ConfigurationError(f"rewrites={shown(several)}: {values['name']} has no use for it")
    _check(values, schema)
    settings = OmegaConf.create(values)
    say_idle(config, settings, schema, say)
    settings.label = label(settings, _NOT_IDENTITY)
    _settle(settings)
    if not trains:
        return settings
    _check_subject(settings)
    _check_dtypes(settings)
    _check_windows(settings)
    _settle_schedule(settings)
    return _settle_float64(settings)


def _check(values: dict, schema: type[Shared]) -> None:
    """A data set of one's own is held to the signature of what it names, as a network is."""
    data = values.get("data")
    if isinstance(data, dict) and data.get("_target_") is not None and issubclass(schema, Training):
        check(values, WithOwnData)
        values = values | {"data": {"name": AUTO}}
    check(values, schema)


def _take_own_sizes(config: DictConfig, schema: type[Training]) -> None:
    """What an experiment means by each scale (``sizes``), where it has sizes of its own."""
    own = config.pop("sizes", None)
    scale = config.get("scale")
    if not OmegaConf.is_dict(scale):
        raise ConfigurationError(f"scale={shown(scale)} holds no sizes: write scale=small")
    if own is not None:
        scale = OmegaConf.create(OmegaConf.to_container(scale, resolve=True))
        config.scale = OmegaConf.merge(scale, _sizes_of(config, scale.get("name"), own))
    _check_sizes(config, {*Scale.model_fields, *schema.model_fields})


def _sizes_of(config: DictConfig, scale: str, own: DictConfig) -> dict:
    if not OmegaConf.is_dict(own) or not all(OmegaConf.is_dict(sizes) for sizes in own.values()):
        raise ConfigurationError(
            f"sizes={own} must hold sizes for each scale, as in {{small: {{steps: 60}}}}"
        )
    if scale not in own:
        raise ConfigurationError(f"scale={scale}: {config.name} has sizes for {', '.join(map(str, own))}")
    return {name: size for name, size in own[scale].items() if not given("scale", name, config)}


def _check_sizes(config: DictConfig, known: Iterable[str]) -> None:
    """Refuses a size that nothing reads. One of a file may stand unread, for a setting given in its place."""
    for name in {*config.scale}.difference(known):
        if f"${{scale.{name}}}" not in OmegaConf.to_yaml(config):
            meant = instead(name, list(Scale.model_fields), every=False)
            if "?" in meant or given("scale", name, config) or given("sizes", name, config):
                raise ConfigurationError(f"scale.{name} is no setting: {meant}")


def _keep_shared(config: DictConfig) -> None:
    """The shared settings and the experiment's own."""
    for key in OF_TRAININGS & set(config):
        config.pop(key)
    config.scale = {k: v for k, v in config.scale.items() if k in ScaleName.model_fields}


def follows_auto(settings: DictConfig) -> bool:
    """Whether where a training's local windows begin is to be measured where it runs."""
    return settings.kind == "training" and settings.local.windows == AUTO


def digest(settings: DictConfig) -> str:
    """A short hash of the settings less seeds, paths and loggers; a seed that is set alone stays in."""
    identity = OmegaConf.to_container(settings)
    if "seeds" in identity:
        identity["seeds"] = {k: v for k, v in identity["seeds"].items() if v is not None}
    for key in _NOT_IDENTITY:
        identity.pop(key, None)
    identity = {k: v for k, v in identity.items() if k not in _BY_ITSELF or v != _BY_ITSELF[k]}
    data = identity.get("data", {})
    for key in ("root", "time_limit") if data.get("_target_") is None else ("root",):
        data.pop(key, None)
    if data.get("_target_", "") is None:
        data.pop("_target_")
    scale = identity.get("scale", {})
    for key in ("why", "least_float64_steps"):
        scale.pop(key, None)
    if scale.get("float64_steps") == AUTO:
        scale["float64_steps"] = ALL_FLOAT64_STEPS
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]


def with_float64_steps(settings: DictConfig, steps: int) -> DictConfig:
    """These settings with so many, as if they had been asked for."""
    settings = settings.copy()
    settings.float64_steps = min(steps, settings.steps)
    settings.pop("float64_share", None)  # means nothing then: digests are as they were before there was one
    return settings


def steps_in(settings: DictConfig, dtype: str) -> int:
    """How many updates the arms of one precision make."""
    return settings.float64_steps if dtype == "float64" else settings.steps


def _settle_float64(settings: DictConfig) -> DictConfig:
    """A number, but for a training whose number is to be measured where it runs."""
    if settings.float64_steps != AUTO:
        asked = "float64_share" in written()
        if asked and "float64" in settings.dtypes:
            why = f"float64_share={settings.float64_share} counts where float64_steps=auto"
            raise ConfigurationError(f"{why}, and it is {settings.float64_steps}: leave one of them out")
        return with_float64_steps(settings, settings.float64_steps)
    return settings if settings.kind == "training" else with_float64_steps(settings, ALL_FLOAT64_STEPS)


def _settle(settings: DictConfig) -> None:
    """``threads`` and ``workers`` as numbers, for this machine."""
    settings.threads = threads_chosen(settings.threads)
    if settings.workers == "auto":
        settings.workers = 1 if in_sweep() else seeds_at_once(settings.threads, settings.device)
    if settings.tf32 and settings.device == "cpu":  # nothing would be measured
        raise ConfigurationError("tf32=true: a CPU has no TF32; run it on a GPU, or write tf32=false")


def _settle_schedule(settings: DictConfig) -> None:
    """A scheduler of one's own moves the optimizer's rate, and no schedule by name does."""
    name = settings.learning_rate_schedule
    if not settings.scheduler._target_ or name == "constant":
        return
    if "learning_rate_schedule" in written():
        raise ConfigurationError(
            f"learning_rate_schedule={name} and scheduler._target_ move one rate: leave one of them out"
        )
    settings.learning_rate_schedule = "constant"


def _check_windows(settings: DictConfig) -> None:
    windows = [] if settings.local.windows == AUTO else settings.local.windows
    if late := [w for w in windows if w >= settings.steps]:
        why = f"holds {late[0]}, and the last of {settings.steps} steps is {settings.steps - 1}"
        raise ConfigurationError(
            f"local.windows={list(windows)} {why}: leave it out, or write steps={late[0] + 1}"
        )


def _check_dtypes(settings: DictConfig) -> None:
    """Probes, folds and local windows start from float32, and what 16 bits make is told from it."""
    if "float32" not in settings.dtypes and (few := {*settings.dtypes} - {"float64"}):
        has = ",".join(settings.dtypes)
        raise ConfigurationError(
            f"dtypes=[{has}]: {min(few)} is compared with float32, write dtypes=[float32,{has}]"
        )


def _check_subject(settings: DictConfig) -> None:
    if settings.subject not in (*settings.roles, "reference"):
        raise ConfigurationError(f"subject={settings.subject} is not among roles={list(settings.roles)}")
    if settings.subject == "candidate" and not settings.rewrite.target:
        raise ConfigurationError("rewrite.target is not set: write rewrite.target=package.module.function")
    unread = [o for o in overrides(settings) if re.match(r"[+~]*rewrite[.=]", o)]
    if "candidate" not in settings.roles and unread:
        why = f"rewrite.target makes the candidate, which is not among roles={list(settings.roles)}"
        raise ConfigurationError(f"{unread[0]} changes nothing: {why}")
