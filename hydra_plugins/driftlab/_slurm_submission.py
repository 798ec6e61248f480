"""Jobs handed to Slurm: arrays, and what to say where sbatch refuses them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hydra_plugins.driftlab import _slurm_controller as controller
from suite.command.errors import ConfigurationError, one_line
from suite.command.machine import environment_without

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job

_SETTING = "hydra.launcher"
_FILE = "conf/hydra/launcher/submitit_slurm.yaml"
# What sbatch says -> what to write instead. The first that fits counts.
_ADVICE = {
    r"account": f"write {_SETTING}.account=NAME",
    r"time limit": f"write a smaller {_SETTING}.timeout_min: a seed that reaches it goes on in a new job",
    r"partition": f"write {_SETTING}.partition=NAME; sinfo lists the names",
    r"gres|gpu": f"write {_SETTING}.gpus_per_node=null where there are no GPUs, or {_SETTING}.gres=…",
    r"qos|QOS": f"write {_SETTING}.qos=NAME, or fewer seeds at a time",
    r"[Mm]emory": f"write a smaller {_SETTING}.mem_gb",
    r"node configuration|CPU count|processors": f"write smaller {_SETTING}.cpus_per_task or gpus_per_node",
    r"[Uu]nable to contact|Zero Bytes|refused": "ask sinfo whether this cluster is up",
}


def check_slurm() -> None:
    """Raises ConfigurationError where this machine has no Slurm."""
    missing = [name for name in ("sbatch", "srun", "squeue", "scontrol") if shutil.which(name) is None]
    if missing:
        raise ConfigurationError(
            f"hydra/launcher=submitit_slurm: no {missing[0]} here; start the sweep on a login node of the "
            "cluster, or write hydra/launcher=joblib"
        )


def executor(params: dict[str, Any]) -> AutoExecutor:
    """submitit's executor with the settings of the launcher. Raises ConfigurationError."""
    import submitit
    from submitit.core.utils import JobPaths

    _check_time(params)
    params = dict(params)
    folder, requeues = params.pop("submitit_folder"), params.pop("max_num_timeout")
    # Since 22.05 srun no longer takes this over from sbatch, and would give the job one core.
    if params.get("cpus_per_task"):
        params["srun_args"] = [*(params.get("srun_args") or []), f"--cpus-per-task={params['cpus_per_task']}"]
    general = {"timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "name", "stderr_to_stdout"}
    named = {k if k in general else f"slurm_{k}": v for k, v in params.items() if v is not None}
    try:
        JobPaths.get_first_id_independent_folder(folder).mkdir(parents=True, exist_ok=True)
        made = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=requeues)
        made.update_parameters(nodes=1, tasks_per_node=1, **named)
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be written ({one_line(error)}): write results=FOLDER"
        ) from None
    except (AssertionError, NameError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{_SETTING}: {one_line(error)}; all settings are in {_FILE}") from None
    return made


def _check_time(params: dict[str, Any]) -> None:
    """A job that is told of its limit as it starts puts itself back into the queue, and trains nothing."""
    minutes, delay = params.get("timeout_min"), params.get("signal_delay_s")
    numbers = isinstance(minutes, int | float) and isinstance(delay, int | float)
    if numbers and 60 * minutes <= delay:
        raise ConfigurationError(
            f"{_SETTING}.timeout_min={minutes} leaves no time to train, for a job is told of its limit "
            f"signal_delay_s={delay} seconds before: write {_SETTING}.timeout_min={delay // 60 + 2} or more, "
            f"or a smaller {_SETTING}.signal_delay_s"
        )


def submit(
    made: AutoExecutor, function: Callable, arguments: Sequence[tuple], at_once: int
) -> tuple[list[Job], str | None]:
    """Submit a call of ``function`` for each of ``arguments``, in as few arrays as the cluster allows.

    Args:
        at_once: jobs that run at a time, shared out among the arrays.

    Returns:
        The jobs, in the order of ``arguments``, and None; or as many jobs as Slurm took, and why no more.

    Raises:
        ConfigurationError: where Slurm took none.
    """
    try:
        most = controller.max_array_size()
    except controller.ControllerError as error:
        raise ConfigurationError(refusal(str(error))) from None
    parts = [arguments[i : i + most] for i in range(0, len(arguments), most)]
    if at_once < len(parts):
        raise ConfigurationError(
            f"{_SETTING}.array_parallelism={at_once} is less than the {len(parts)} arrays that "
            f"{len(arguments)} jobs need on this cluster: write {len(parts)} or more, or fewer seeds"
        )
    made.update_parameters(slurm_array_parallelism=at_once // len(parts))
    jobs: list[Job] = []
    for part in parts:
        refused = _submit_array(made, function, part, jobs)
        if refused and not jobs:
            raise ConfigurationError(refused)
        if refused:
            return jobs, refused
    return jobs, None


def _submit_array(
    made: AutoExecutor, function: Callable, part: Sequence[tuple], jobs: list[Job]
) -> str | None:
    import submitit

    # started inside an allocation (salloc), sbatch must not take that one's settings for its own
    of_a_job = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
    try:
        # submitit prints what sbatch says, and raises it as well
        with environment_without(of_a_job), contextlib.redirect_stderr(io.StringIO()):
            jobs += made.map_array(function, *zip(*part, strict=True))
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        return refusal(str(error))
    except OSError as error:
        return (
            f"the jobs cannot be written to the results folder ({one_line(error)}): make room and start again"
        )
    return None


def refusal(said: str) -> str:
    """Slurm's own reason, and what to write instead."""
    lines = [re.sub(r"^(sbatch|scontrol): (error: )?", "", line).strip() for line in said.splitlines()]
    reason = "; ".join(dict.fromkeys(line for line in lines if line)) or "no reason given"
    advice = next((text for pattern, text in _ADVICE.items() if re.search(pattern, reason)), f"see {_FILE}")
    return f"Slurm refuses the sweep ({reason}): {advice}"
