"""A real Slurm on this machine alone, to try a sweep before the cluster: start, stop or status.

    eval "$(python scripts/loopback_slurm.py start)"
    python train.py -m +experiment=split_conv seed=0..3 hydra/launcher=submitit_slurm \\
        hydra.launcher.gpus_per_node=null
    python scripts/loopback_slurm.py stop

Needs Linux and the packages slurm-wlm and munge; root or not. Key, sockets, state and logs lie in one
folder, the ports are free ones, and nothing of the system's own Slurm is read or changed. A job of the
partition "urgent" preempts those of the other.
"""

from __future__ import annotations

import argparse
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from loopback_processes import DAEMONS, daemons, job_processes, send

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from suite.command import supervision

# Waits are short, so that what goes wrong shows within seconds. A requeued job waits for cred_expire
# (120 s by default, and for any value below 5), a silent node is down after SlurmdTimeout (300 s by default;
# with 10 s the other node went down too where the machine was busy). Where processes take long to end, a node
# is drained after UnkillableStepTimeout (60 s by default), and stays so.
CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
KillWait=2
SlurmdTimeout=30
UnkillableStepTimeout=300
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=loopback Nodes=ALL Default=YES MaxTime=1440 PriorityTier=1 GraceTime=3
PartitionName=urgent Nodes=ALL MaxTime=1440 PriorityTier=2 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory={memory}"


class SlurmError(RuntimeError):
    """The message is one line: what is wrong and what to do."""


def start(folder: Path, nodes: int, cpus: int) -> None:
    """Start what does not run yet: all of it, or after a crash the daemons that are missing.

    ``nodes`` and ``cpus`` (a node) count where nothing of this folder runs. Raises SlurmError.
    """
    missing = [name for name in (*DAEMONS, "sbatch", "srun") if not program(name)]
    if missing:
        raise SlurmError(f"{', '.join(missing)} not found: apt-get install slurm-wlm munge")
    if not daemons(folder):
        configure(folder, nodes, cpus)
    running = [arguments for _, arguments in daemons(folder)]
    for name, *arguments in (c for c in commands(folder) if c[1:] not in running):
        done = run(folder, program(name), *arguments)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise SlurmError(f"{name} does not start ({reason}): see the logs in {folder}")
    for name in shown_nodes(folder, "drain"):  # a node that somebody's crash left so takes no job any more
        run(folder, "scontrol", "update", f"NodeName={name}", "State=RESUME")
    if not wait_until(lambda: all_up(folder), 60):
        raise SlurmError(f"the nodes do not come up within 60 s: see the logs in {folder}")


def stop(folder: Path) -> None:
    """Cancel the jobs and end every process of this Slurm. The folder stays, with its logs.

    Raises SlurmError.
    """
    if any(f"{folder}/slurm.conf" in arguments for _, arguments in daemons(folder)):
        for only in (["--state=pending"], []):  # no job may start in the place of one that ends
            run(folder, "scancel", "--user", str(os.getuid()), *only)
        wait_until(lambda: not run(folder, "squeue", "--noheader").stdout.strip(), 10)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in [*(pid for pid, _ in daemons(folder)), *job_processes(folder)]:
            send(pid, number)
        if wait_until(lambda: not [*daemons(folder), *job_processes(folder)], 10):
            return
    raise SlurmError(f"some processes of {folder} do not end")


def status(folder: Path) -> str:
    """A line a node and a line a job."""
    if not daemons(folder):
        raise SlurmError(f"no Slurm runs in {folder}: start it with {Path(__file__).name} start")
    shown = run(folder, "sinfo", "--Node"), run(folder, "squeue", "--array")
    return "\n".join((s.stdout or s.stderr).strip() for s in shown)


def configure(folder: Path, nodes: int, cpus: int) -> None:
    """Write all that the daemons read. A folder used before keeps its key, its logs and its jobs."""
    if len(str(folder)) > 60:
        raise SlurmError(
            f"{folder} is too long for the name of a socket: write --folder with 60 letters at most"
        )
    names = [f"n{number + 1}" for number in range(nodes)]
    for place in (folder, folder / "state", *(folder / "spool" / name for name in names)):
        place.mkdir(parents=True, exist_ok=True, mode=0o755)  # munged wants its socket within reach of all
    key = folder / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
    host, ports = socket.gethostname().partition(".")[0], free_ports(nodes + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20  # MB
    lines = [
        NODE.format(name=name, host=host, port=port, cpus=cpus, memory=memory)
        for name, port in zip(names, ports[1:], strict=True)
    ]
    user = pwd.getpwuid(os.getuid()).pw_name
    text = CONFIGURATION.format(folder=folder, host=host, ports=ports, user=user, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)


def commands(folder: Path) -> list[list[str]]:
    """Each daemon with its arguments, in the order in which they need each other."""
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    configuration = folder / "slurm.conf"
    lines = [line for line in configuration.read_text().splitlines() if line.startswith("NodeName=")]
    names = [line.split()[0].removeprefix("NodeName=") for line in lines]
    return [
        ["munged", *(f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items())],
        ["slurmctld", "-f", str(configuration)],
        *(["slurmd", "-f", str(configuration), "-N", name] for name in names),
    ]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def all_up(folder: Path) -> bool:
    shown = run(folder, "sinfo", "--noheader", "--Node", "--format=%T")
    up = {"idle", "mixed", "allocated", "completing"}
    return shown.returncode == 0 and set(shown.stdout.split()) <= up


def shown_nodes(folder: Path, state: str) -> list[str]:
    """The names of the nodes in a state."""
    return run(folder, "sinfo", "--noheader", "--Node", f"--states={state}", "--format=%N").stdout.split()


def program(name: str) -> str | None:
    """Where it is; daemons are often not on the path of a user."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (there := reached()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return there


def main() -> int:
    default = Path(tempfile.gettempdir()) / f"loopback-slurm-{os.getuid()}"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["start", "stop", "status"])
    parser.add_argument("--folder", type=Path, default=default, help=f"all its files ({default})")
    parser.add_argument("--nodes", type=int, default=2, help="at start (2)")
    parser.add_argument("--cpus", type=int, default=1, help="a node, at start (1); may exceed the machine's")
    options = parser.parse_args()
    folder = options.folder.absolute()
    try:
        if options.action == "start":
            start(folder, options.nodes, options.cpus)
            print(f"export SLURM_CONF={folder}/slurm.conf")
        elif options.action == "stop":
            stop(folder)
        else:
            print(status(folder))
    except (SlurmError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    supervision.end(main)
