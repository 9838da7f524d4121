"""launch/slurm/pretrain.sbatch on a SLURM cluster of two nodes on this machine, and the checks before and after a job.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.cluster.slurm_job import RECORD, after, check_time_limit, parse_slurm_time
from pretrain.errors import NO_RESTART, ConfigError
from tests.cluster.workers.slurm_cluster import SBATCH, SlurmCluster, slurm
from tests.support.launch import ROOT
from tests.support.supervised import wait_until
from tests.test_train import rows

__all__ = ["slurm"]  # the fixture
STEPS = 300  # a request is agreed on within 64 steps


@pytest.fixture(scope="module")
def config(corpus: str, slurm: SlurmCluster) -> str:
    """Write the run.yaml of all jobs in this file, and return its path. Each job gets its own --save."""
    values: dict[str, Any] = {
        "deepspeed_config": str(ROOT / "ds_configs" / "zero2_bf16.json"), "model": "tiny",
        "model_overrides": "vocab_size=256,n_layer=2,n_embd=64,resid_pdrop=0.1", "train_data": corpus,
        "seq_length": 64, "split": "80,20,0", "micro_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1.0e-3, "eval_steps": 1, "log_interval": 1, "save_interval": 5, "train_steps": STEPS}
    path = slurm.folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def submit(slurm: SlurmCluster, config: str, run: Path, *flags: str, minutes: int = 30, **environ: str) -> str:
    """Submit `sbatch -N 2 launch/slurm/pretrain.sbatch run.yaml --save RUN`. Returns the job id."""
    return slurm.submit("--nodes=2", "--ntasks-per-node=1", f"--time={minutes}", str(SBATCH), config, "--save",
                        str(run), *flags, **environ)


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Return {step: (loss, grad_norm)}. The last row of a repeated step counts."""
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(run) if "loss" in row}


def saves(run: Path) -> list[int]:
    """Return the steps of the committed checkpoints."""
    return [row["step"] for row in rows(run, "events.jsonl") if row["event"] == "save"]


def wait_for_step(slurm: SlurmCluster, job: str, run: Path, step: int) -> None:
    def reached() -> bool:
        # a job that is being requeued is COMPLETING
        assert slurm.state(job) in ("PENDING", "RUNNING", "COMPLETING"), slurm.log(job)
        return (run / "metrics.jsonl").exists() and step <= max(losses(run), default=0)

    wait_until(reached, lambda: slurm.log(job))


@pytest.fixture(scope="module")
def uninterrupted(slurm: SlurmCluster, config: str) -> Path:
    """Train without interruption with one DeepSpeed launcher per node, and return the run folder."""
    run = slurm.folder / "uninterrupted"
    job = submit(slurm, config, run, LAUNCHER="deepspeed")
    slurm.wait_for(job, "COMPLETED")
    assert "2 data-parallel" in slurm.log(job)
    assert len(losses(run)) == STEPS
    assert not list(slurm.folder.glob(".hosts*"))
    return run


@pytest.mark.slow
@pytest.mark.root
def test_a_run_survives_a_signal_a_cancelled_job_and_the_loss_of_a_node(
        slurm: SlurmCluster, config: str, uninterrupted: Path) -> None:
    run = slurm.folder / "interrupted"
    first = submit(slurm, config, run, "--save_interval", "0")
    wait_for_step(slurm, first, run, 2)
    slurm.run("scancel", "--signal=USR1", "--batch", first)  # SLURM sends the same signal before the time limit
    wait_until(lambda: "goes back to the queue" in slurm.log(first), lambda: slurm.log(first))
    (signalled_at,) = saves(run)

    wait_for_step(slurm, first, run, signalled_at + 2)  # the job has been requeued and resumed
    slurm.run("scancel", first)
    slurm.wait_for(first, "CANCELLED")
    wait_until(lambda: len(saves(run)) == 2, lambda: slurm.log(first))
    cancelled_at = saves(run)[-1]

    second = submit(slurm, config, run, "--resume", "required")
    wait_for_step(slurm, second, run, cancelled_at + 7)  # after the next save
    slurm.end_node("n2")
    slurm.wait_for(second, "PENDING", "COMPLETING")
    slurm.start_node("n2")
    slurm.wait_for(second, "COMPLETED")
    assert "node n2 of the previous start was lost" in slurm.log(second)

    assert losses(run) == losses(uninterrupted)
    resumed = [row["step"] for row in rows(run, "events.jsonl") if row["event"] == "resume"]
    assert resumed[:2] == [signalled_at, cancelled_at]
    assert resumed[2] > cancelled_at
    starts = [(start["job"], start["step"]) for start in rows(run, "slurm.jsonl")]
    assert starts == [(first, 0), (first, resumed[0]), (second, resumed[1]), (second, resumed[2])]
    assert slurm.state(first) == "CANCELLED"


@pytest.mark.slow
@pytest.mark.root
def test_the_time_limit_sends_the_signal(slurm: SlurmCluster, config: str) -> None:
    """A copy of the script makes SLURM send the signal 30 s before a time limit of two minutes."""
    run, script = slurm.folder / "timed", slurm.folder / "timed.sbatch"
    script.write_text(SBATCH.read_text().replace("USR1@120", "USR1@30"))
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "--time=2", str(script), config, "--save", str(run),
                       "--train_steps", "100000", "--save_interval", "0")
    wait_until(lambda: "goes back to the queue" in slurm.log(job), lambda: slurm.log(job))
    assert rows(run, "events.jsonl")[-1]["reason"] == "SIGUSR1"
    assert "exit code 75" in slurm.log(job)
    slurm.run("scancel", job)
    slurm.wait_for(job, "CANCELLED")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("launcher", ["srun --mpi=pmi2", "srun --mpi=pmix", "cluster.sh --launcher slurm"])
def test_srun_and_cluster_sh_start_ranks_in_a_job(slurm: SlurmCluster, config: str, launcher: str) -> None:
    run, script = slurm.folder / launcher.replace(" ", "-"), slurm.folder / "other.sbatch"
    train = f"--config {config} --train_steps 2 --save '{run}'"
    if launcher.startswith("srun"):
        if launcher.partition("=")[2] not in slurm.run("srun", "--mpi=list"):
            pytest.skip(f"this SLURM has no {launcher.partition('=')[2]}")
        line = f"{launcher} -N2 -n2 python -u '{ROOT}/pretrain/train.py' {train}"
    else:
        line = f"scontrol show hostnames | sed 's/$/ slots=1/' > hosts; " \
               f"'{ROOT}/launch/{launcher.split()[0]}' --hostfile hosts {launcher.partition(' ')[2]} -- {train}"
    script.write_text(f"#!/bin/bash\n#SBATCH --output=pretrain-%j.log\n{line}\n")
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "--time=9", str(script))
    slurm.wait_for(job, "COMPLETED", "FAILED")
    if "can not load PMIx library" in slurm.log(job):
        pytest.skip("this SLURM's pmix needs libpmix.so: Debian has it in libpmix-dev")
    if "no network interface" in slurm.log(job):
        pytest.skip("this machine has no network interface except loopback")
    assert slurm.state(job) == "COMPLETED", slurm.log(job)
    assert "2 data-parallel" in slurm.log(job)
    assert len(losses(run)) == 2


@pytest.mark.slow
@pytest.mark.root
def test_programs_start_in_the_shell_of_salloc(slurm: SlurmCluster, config: str, tmp_path: Path) -> None:
    """In the interactive step of a job of two tasks: one rank, two ranks of ds-pretrain, and one launcher a node."""
    flags = f"--config {config} --train_steps 2 --save {tmp_path}"
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    program = f"{sys.executable} -m pretrain"
    launcher = f"--hostfile {tmp_path}/hosts --no_ssh --master_addr n1"
    commands = {
        "alone": f"{program}.train {flags}/alone", "check": f"{program} check {flags}/check",
        "evaluate": f"{program} evaluate {tmp_path}/alone",
        "both": f"{program} --num_accelerators 2 {flags}/both",
        "mpirun": f"mpirun.openmpi -np 1 {program} --num_accelerators 2 {flags}/mpirun",
        "no_ssh": f"srun --overlap -N2 -n2 {program} {launcher} {flags}/no_ssh",
        "srun": f"srun --overlap -N2 -n2 {program}.train {flags}/srun",
    }
    (tmp_path / "commands.sh").write_text(f"cd {ROOT}; export OMP_NUM_THREADS=1\n" + "".join(
        f"timeout 200 {command} > {tmp_path}/{name}.log 2>&1; echo $? > {tmp_path}/{name}.code\n"
        for name, command in commands.items()))
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    shell = subprocess.Popen(["script", "-qec", "salloc -n2 -N2", "/dev/null"], env={**slurm.environ, **as_root},
                             text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = shell.communicate(f"bash {tmp_path}/commands.sh; echo step $SLURM_STEP_ID; exit\n", timeout=900)[0]
    assert "step 4294967290" in output, output
    for name in commands:
        log = (tmp_path / f"{name}.log").read_text()
        assert (tmp_path / f"{name}.code").read_text() == "0\n", (name, log)
        if name in ("both", "no_ssh", "mpirun", "srun"):
            assert "2 data-parallel" in log, (name, log)


@pytest.mark.root
def test_a_job_trains_on_two_nodes(slurm: SlurmCluster, config: str) -> None:
    run = slurm.folder / "one-step"
    job = submit(slurm, config, run, "--train_steps", "1")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert slurm.state(job) == "COMPLETED", slurm.log(job)
    assert "2 data-parallel" in slurm.log(job)
    assert list(losses(run)) == [1]


@pytest.mark.root
def test_a_time_limit_shorter_than_the_signals_lead_time_is_rejected(slurm: SlurmCluster, config: str) -> None:
    job = submit(slurm, config, slurm.folder / "short", minutes=1)
    slurm.wait_for(job, "FAILED")
    assert slurm.exit_code(job) == 2
    (line,) = [line for line in slurm.log(job).splitlines() if "ds-pretrain" in line]
    assert line.startswith("ds-pretrain: error: --time: found ")
    assert "more than 120 s" in line
    assert not (slurm.folder / "short").exists()


def test_the_signal_must_leave_time_for_a_step_and_a_save() -> None:
    check_time_limit(limit_s=math.inf, signal_s=120, save_s=100, step_s=20)
    with pytest.raises(ConfigError, match=r"USR1@120: found 120 s .* at least 130 s"):
        check_time_limit(limit_s=3600, signal_s=120, save_s=100, step_s=30)
    with pytest.raises(ConfigError, match="--time: found 200 s; expected more than 240 s"):
        check_time_limit(limit_s=200, signal_s=120, save_s=100, step_s=20)


def test_parse_times_of_squeue() -> None:
    assert [parse_slurm_time(text) for text in ("59", "1:00", "2:00:01\n", "1-00:00:00", "UNLIMITED")] == [
        59, 60, 7201, 86400, math.inf]
    with pytest.raises(ConfigError, match="squeue: found 'soon'"):
        parse_slurm_time("soon")


def test_rejected_runs_and_runs_without_progress_are_not_requeued(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = {"job": "7", "nodes": [], "step": 0, "time": 0.0}
    record, environ = tmp_path / RECORD, {"SLURM_JOB_ID": "7"}
    record.write_text("".join(json.dumps(row) + "\n" for row in [{**start, "job": "6"}, start, start]))
    assert after(tmp_path, environ, exit_code=75) == 0
    assert after(tmp_path, environ, exit_code=2) == 1
    (tmp_path / "STOP").touch()
    assert after(tmp_path, environ, exit_code=75) == 1
    (tmp_path / "STOP").unlink()
    record.write_text(record.read_text() + json.dumps(start) + "\n" + '{"job": "7", "no')
    assert after(tmp_path, environ, exit_code=75) == 1
    assert [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "exit code 75, step 0: the job goes back to the queue",
        f"exit code 2, step 0: the job is not requeued, because {NO_RESTART[2]}",
        f"exit code 75, step 0: the job is not requeued, because {tmp_path / 'STOP'} exists",
        "exit code 75, step 0: the job is not requeued, because 3 starts in a row made no progress beyond step 0"]
