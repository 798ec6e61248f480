"""Exit status and last line, whatever ends a command: 0 only where it has itself written a verdict."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.suite.below import below
from tests.suite.conftest import ROOT, small
from tests.suite.programs import ONE_BLOCK
from tests.suite.refusing import assert_one_line

QUICK = ["steps=6", "float64_steps=2", "probe_images=2", "batch_size=4", "eval_images=8"]
QUICK += ["dtypes=[float32]", ONE_BLOCK, "checkpoint_every=0", "threads=1"]
ACTING = ["+experiment=split_conv", "rewrite.target=tests.suite.rewrites.acting", *QUICK]
STATUS = {"INT": 130, "TERM": 143, "HUP": 129, "QUIT": 131}
WORD = {130: "interrupted", 143: "terminated", 129: "hung up", 131: "quit"}
LINE = {status: f"{word}: the same command goes on" for status, word in WORD.items()}


@pytest.fixture
def acts(train, tmp_path, monkeypatch):
    """Runs a training in whose middle a rewrite does something."""

    def run(act: str, *settings: str):
        monkeypatch.setenv("DRIFTLAB_TEST_RESULTS", str(tmp_path))
        monkeypatch.setenv("DRIFTLAB_TEST_ACT", act)
        return train(*ACTING, "workers=1", *settings)

    return run


@pytest.mark.parametrize("name", STATUS)
def test_a_signal_in_the_training_is_one_line_and_its_own_status(acts, tmp_path, name):
    done = acts(f"os.kill(os.getpid(), signal.SIG{name})")
    assert_one_line(done, STATUS[name], LINE[STATUS[name]])
    assert not list(tmp_path.rglob("verdict.json"))
    assert not list(tmp_path.rglob("*.owner")), "the next command, elsewhere, waits for minutes"


def test_a_signal_that_somebody_keeps_ends_the_command_all_the_same(acts):
    done = acts("try:\n os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n time.sleep(99)")
    assert_one_line(done, 130, "interrupted")


def test_nohup_stays_deaf(tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_TEST_RESULTS", str(tmp_path))
    monkeypatch.setenv("DRIFTLAB_TEST_ACT", "os.kill(os.getpid(), signal.SIGHUP)")
    command = [sys.executable, str(ROOT / "train.py"), *small((*ACTING, "workers=1"), tmp_path)]
    done = subprocess.run(["nohup", *command], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("verdict.json"))


PRINTED = ["--help", "+experiment=control --cfg job", "+experiment=control --cfg job --resolve"]


@pytest.mark.parametrize("arguments", PRINTED)
def test_who_has_read_enough_hears_no_more(arguments):
    """As ``train.py --help | true``."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(ROOT / "train.py"), *arguments.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, timeout=300)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_disk_too_full_for_what_is_printed_is_one_line():
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, timeout=300)
    assert done.returncode == 2
    assert (
        done.stderr
        == b"error: what is printed cannot be written (no space left on device): send it elsewhere\n"
    )


def test_a_run_needs_no_open_stream(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *small(("+experiment=control", *QUICK), tmp_path)]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=ROOT, timeout=300)
    assert done.returncode == 0
    assert list(tmp_path.rglob("verdict.json"))


EXITS = {
    "sys.exit(0)": (2, "ends the run with sys.exit(0), and no verdict was written"),
    "sys.exit(3)": (2, "ends the run with sys.exit(3)"),
    "exit()": (2, "ends the run with sys.exit(None)"),
    "os._exit(0)": (1, "something that the run called ended the process (os._exit, exit status 0)"),
    "os._exit(3)": (1, "(os._exit, exit status 3)"),
    "os.kill(os.getpid(), signal.SIGSEGV)": (1, "crashed in compiled code (SIGSEGV)"),
    "os.kill(os.getpid(), signal.SIGKILL)": (1, "killed, perhaps because memory ran out"),
}


@pytest.mark.parametrize("call", EXITS)
def test_who_ends_the_process_ends_no_run_well(acts, tmp_path, call):
    assert_one_line(acts(call), *EXITS[call])
    assert not list(tmp_path.rglob("verdict.json"))


RAISED = {
    "raise RuntimeError('mine')": "RuntimeError: mine",
    "raise OSError(28, 'No space left on device')": "OSError: [Errno 28] No space left on device",
    "raise type('Own', (BaseException,), {})('mine')": "Own: mine",
    "raise GeneratorExit": "GeneratorExit",
    "raise __import__('hydra').errors.HydraException('mine')": "HydraException: mine",
}


@pytest.mark.parametrize("act", RAISED)
def test_what_a_network_raises_in_the_training_is_one_line_and_the_seed_goes_on(acts, act):
    done = acts(act)
    assert_one_line(done, 2, f"failed: {RAISED[act]} (suite/rewrites.py:")
    assert "seed 0 stands at its last checkpoint (step " in done.errors[0]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("act", [*(f"os.kill(os.getpid(), signal.SIG{name})" for name in STATUS), *RAISED])
def test_the_same_command_goes_on(acts, act):
    assert acts(act).status
    assert acts("").status == 0


def test_what_an_optimizer_raises_before_any_seed_began_leaves_nothing(train, tmp_path):
    own = ["optimizer._target_=tests.suite.rewrites.RaisingStep", "~optimizer.weight_decay"]
    done = train("+experiment=control", *QUICK, *own, "~optimizer.momentum")
    assert_one_line(done, 2, "failed: RuntimeError: in a step (suite/rewrites.py:")
    assert not list(tmp_path.iterdir())


def test_a_rewrite_that_raises_no_exception_is_refused(train, tmp_path):
    done = train("+experiment=split_conv", "rewrite.target=tests.suite.rewrites.raising_no_exception")
    assert_one_line(done, 2, "failed: NoException: mine (suite/rewrites.py:")
    assert not list(tmp_path.iterdir())


def test_a_refusal_leaves_nothing_of_what_hydra_writes(train, tmp_path):
    files = [f"hydra.run.dir={tmp_path}/run", "hydra.output_subdir=.hydra", "hydra/job_logging=default"]
    done = train("+experiment=control", *files, "steps=0")
    assert_one_line(done, 2, "steps=0 must be a whole number of at least 1")
    assert not list(tmp_path.iterdir())


def test_the_line_names_the_place_of_the_call(train):
    done = train("+experiment=split_conv", "rewrite.target=tests.suite.rewrites.exiting")
    assert_one_line(done, 2, "tests/suite/rewrites.py:")


def test_in_a_sweep_the_other_jobs_go_on(acts, tmp_path):
    once = "p = Path(os.environ['DRIFTLAB_TEST_RESULTS'], 'once')"
    done = acts(f"{once}; p.exists() or (p.touch(), sys.exit(0))", "-m", "seed=0,1")
    assert_one_line(done, 2, "sys.exit(0)")
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["seeds"] == [1]


def test_a_folder_that_is_deleted_meanwhile_is_one_line(acts):
    done = acts("shutil.rmtree(next(Path(os.environ['DRIFTLAB_TEST_RESULTS']).glob('*/*')))")
    assert_one_line(done, 1, "is gone, deleted while the run was at work")
    assert acts("").status == 0


def test_a_folder_in_place_of_the_verdict_is_one_line(acts, tmp_path):
    assert acts("").status == 0
    (verdict,) = tmp_path.rglob("verdict.json")
    verdict.unlink()
    verdict.mkdir()
    done = acts("")
    assert_one_line(done, 1, "is a directory while writing split_conv/")
    assert "move it away, then the same command goes on" in done.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_signals_at_random_moments(forked, tmp_path, name):
    number = int(os.environ.get("DICE") or random.SystemRandom().randrange(10**6))
    dice, said = random.Random(number), f"(repeat with DICE={number})"
    command, ended = small(("+experiment=control", *QUICK), tmp_path / "undisturbed"), None
    began = time.monotonic()
    assert forked.run(*command).status == 0
    life = time.monotonic() - began
    command = small(("+experiment=control", *QUICK), tmp_path / "signalled")
    while ended is None or ended.status:  # until one is through
        after = dice.expovariate(4 / life)
        ended = forked.run(*command, kill_after=after, kill_by=signal.Signals[f"SIG{name}"])
        wrote = any(below(tmp_path / "signalled", "verdict.json"))
        assert ended.status or wrote, f"{said}\n{ended.out}"
        if ended.status == -signal.Signals[f"SIG{name}"]:  # before our first line ran
            assert not ended.out, said
        elif ended.status == 1 and "KeyboardInterrupt" in ended.out:  # the same, as Python has it
            assert f'File "{ROOT / "train.py"}"' not in ended.out, f"{said}\n{ended.out}"
        elif ended.status:  # after the verdict too, while the page is still to be written
            assert ended.status == STATUS[name], f"{said}\n{ended.out}"
            assert len(ended.stderr.splitlines()) == 1, f"{said}\n{ended.out}"
            assert ended.stderr.startswith(LINE[ended.status]), f"{said}\n{ended.out}"


def hear_signals():
    """Whoever started the tests may have them ignored, as a shell's ``&`` and ``nohup`` do."""
    for name in STATUS:
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", STATUS)
def test_a_signal_to_all_processes_of_a_command_with_workers(tmp_path, name):
    """As a terminal's Ctrl-C, timeout(1) and Slurm send it."""
    settings = ("+experiment=control", *QUICK, "steps=200", "seed=0..1", "workers=2")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *small(settings, tmp_path)],
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT},
        start_new_session=True,
        preexec_fn=hear_signals,
    )
    while process.poll() is None and not any(below(tmp_path, "state.safetensors")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.Signals[f"SIG{name}"])
    _, err = process.communicate(timeout=300)
    assert process.returncode == STATUS[name], err
    (line,) = err.splitlines()
    assert line.startswith(LINE[process.returncode])
    while is_any_left(process.pid):
        time.sleep(0.01)


def is_any_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_worker_in_which_something_calls_exit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_TEST_RESULTS", str(tmp_path))
    monkeypatch.setenv("DRIFTLAB_TEST_ACT", "sys.exit(0)")
    command = [sys.executable, str(ROOT / "train.py"), *small(ACTING, tmp_path), "workers=2", "seed=0..1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "ends the run with sys.exit(0)" in line
