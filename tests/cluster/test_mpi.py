"""launch/mpi.sh with Open MPI and MPICH, and ranks and addresses that the program gets from MPI."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.workers.mpi import mpi
from tests.support.launch import LIMIT_S, ROOT, free_port
from tests.support.supervised import wait_until
from tests.test_train import losses, rows

__all__ = ["mpi"]  # the fixture
_PRINT_WORLD = """
import os, sys
from pretrain.distributed.world import running_environment
world = running_environment()
words = world.rank, world.size, world.local_rank, world.local_size, world.launcher, os.environ["MASTER_ADDR"]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # a single write, because mpirun mixes the output of the ranks
"""


@pytest.fixture(scope="module")
def environ(mpi: None) -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()),
            "VENV": str(Path(sys.executable).parents[1]), "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_a_run_stopped_by_a_signal_under_open_mpi_resumes_under_mpich(
        environ: dict[str, str], corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--", "--deepspeed_config", str(ROOT / "ds_configs" / "pipeline2_zero1_bf16.json"), "--model", "tiny",
             "--model_overrides", "vocab_size=256,n_layer=2,n_embd=64", "--train_data", corpus, "--seq_length", "64",
             "--micro_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3", "--split",
             "80,20,0", "--eval_steps", "1", "--log_interval", "1", "--train_steps", "120", "--save", str(run)]
    script = str(ROOT / "launch" / "mpi.sh")
    without_root = {name: value for name, value in environ.items() if not name.startswith("OMPI_ALLOW")}
    first = subprocess.Popen([script, "-np", "2", "--oversubscribe", *flags], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env={**without_root, "MPIRUN": "mpirun.openmpi"})
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() or first.poll() is not None)
        first.send_signal(signal.SIGINT)  # the script sends SIGUSR1 to mpirun, which passes it on to the ranks
        output, _ = first.communicate(timeout=LIMIT_S)
    finally:
        first.kill()
    assert first.returncode == 75, output
    assert ("running as root: allowing Open MPI to run as root" in output) == (os.geteuid() == 0)
    assert "\033" not in output  # no escape codes, although Open MPI gives each rank a terminal

    second = subprocess.run([script, "-n", "2", *flags, "--resume", "required"], text=True, capture_output=True,
                            env={**environ, "MPIRUN": "mpirun.mpich"}, timeout=LIMIT_S)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "2 pipeline stages" in second.stdout
    assert [step for step, *_ in losses(run)] == list(range(1, 121))
    assert losses(run)[-1][1] < losses(run)[0][1] - 0.2
    stops = [row["reason"] for row in rows(run, "events.jsonl") if row["event"] == "stop"]
    assert stops == ["SIGUSR1", "finished"]


@pytest.mark.parametrize(("hidden", "expected"), [
    # a launcher that sets only the variables of PMIx
    (["OMPI_COMM_WORLD_RANK"], ["0 2 0 2 mpi 127.0.0.1", "1 2 1 2 mpi 127.0.0.1"]),
    # two hosts with one rank each
    (["OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
     ["0 2 0 1 openmpi ADDRESS", "1 2 0 1 openmpi ADDRESS"]),
])
def test_missing_variables_are_replaced_by_values_from_mpi(
        environ: dict[str, str], hidden: list[str], expected: list[str]) -> None:
    done = subprocess.run(
        ["mpirun.openmpi", "-np", "2", "--oversubscribe", "env", *(word for name in hidden for word in ("-u", name)),
         sys.executable, "-c", _PRINT_WORLD], env=environ, text=True, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    address = subprocess.run(["hostname", "-I"], text=True, capture_output=True).stdout.split()[0]
    assert sorted(done.stdout.splitlines()) == [line.replace("ADDRESS", address) for line in expected]


def test_a_bad_run_is_rejected_before_mpirun_starts(environ: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "launch" / "mpi.sh", "-np", "2", "--", "--save", str(tmp_path), "--seq_length", "0"],
                          env=environ, text=True, capture_output=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "ds-pretrain: error: --seq_length: found 0; expected at least 1.\n"


def test_a_command_line_without_flags_for_the_run_is_rejected() -> None:
    done = subprocess.run([ROOT / "launch" / "mpi.sh", "-np", "2"], text=True, capture_output=True)
    assert done.returncode == 2
    assert "the flags of pretrain/train.py are missing" in done.stderr
    assert "launch/mpi.sh -np RANKS -- --config run.yaml" in done.stderr
