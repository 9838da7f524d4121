"""Rank and world size from the variables of each launcher, and the variables that torch reads."""

import itertools
import os

import pytest

from pretrain.cluster.hosts.rank_environment import launcher_environment
from pretrain.distributed import world as world_module
from pretrain.distributed.device import detect_device
from pretrain.distributed.host import RANK_VARIABLES
from pretrain.distributed.process_group import collective_timeout_s, taken_port
from pretrain.distributed.world import ALONE, World, export_world, running_environment, world_from_environment
from pretrain.errors import ConfigError

ENVIRONMENTS = {
    "none": ({}, World(0, 1, 0, 1, "none")),
    "torch": ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(3, 8, 1, 2, "torch")),
    "deepspeed": ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, World(3, 8, 1, 2, "torch")),
    "openmpi": ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, World(1, 4, 1, 2, "openmpi")),
    "mpich": ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
              World(1, 2, 1, 2, "pmi")),
    "srun": ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
              "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}, World(5, 8, 1, 4, "slurm")),
    "srun, uneven nodes": ({"SLURM_PROCID": "8", "SLURM_NTASKS": "9", "SLURM_LOCALID": "0", "SLURM_NODEID": "3",
                            "SLURM_STEP_TASKS_PER_NODE": "3(x2),2,1", "SLURM_NTASKS_PER_NODE": "3",
                            "SLURM_STEP_ID": "0"}, World(8, 9, 0, 1, "slurm")),
    "sbatch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World(0, 1, 0, 1, "none")),
    "launcher under SLURM": ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SLURM_PROCID": "0",
                              "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, World(1, 2, 1, 1, "torch")),
}


# What launchers leave in the environment, as SLURM 22.05, Open MPI 4.1.4, MPICH 4.0.2, torchrun 2.13 and PyTorchJob set
# it. SLURM's variables of an allocation of 4 tasks on 2 nodes
_ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
               "SLURM_NODELIST": "n[1-2]"}
_TASK_0 = {**_ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASK_PID": "13"}
_STEP = {**_TASK_0, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
         "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
_STEP_OF_1 = {**_TASK_0, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1",
              "SLURM_STEP_TASKS_PER_NODE": "1"}
_INTERACTIVE = {**_TASK_0, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "34247",
                "SLURM_STEP_TASKS_PER_NODE": "1"}
_OPENMPI_1 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
              "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_RANK": "0"}
_OPENMPI_2 = {**_OPENMPI_1, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1",
              "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
_HYDRA_1 = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
_HYDRA_2 = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
_PYTORCHJOB_1 = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
             "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
_TORCHRUN_1 = {**_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
_DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0"}
SHELLS = {  # whatever is started there is one rank, or a launcher that starts the ranks
    "none": {}, "salloc": _ALLOCATION, "sbatch": _TASK_0, "salloc, interactive step": _INTERACTIVE,
    "salloc, interactive step of pmi2": {**_INTERACTIVE, "PMI_RANK": "0", "PMI_SIZE": "1"},
    "salloc, interactive step of pmix": {**_INTERACTIVE, "PMIX_RANK": "0"},
    **{f"step {number}": {**_INTERACTIVE, "SLURM_STEP_ID": number} for number in
       ("4294967291", "4294967292", "4294967293", "4294967294", "batch", "extern", "interactive")},
    "srun --pty -n1": {**_STEP_OF_1, "SLURM_PTY_PORT": "42107"},
    "srun --pty -n1 --preserve-env": {**_STEP_OF_1, "SLURM_NTASKS": "4"},
    "sbatch -n4 in srun --pty -n1": {**_STEP_OF_1, **_TASK_0, "SLURM_PTY_PORT": "36329"},
    "mpirun -np 1": _OPENMPI_1, "mpiexec.hydra -n 1": _HYDRA_1, "mpirun -np 1, local rank alone": {
        "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "PyTorchJob of 1": _PYTORCHJOB_1, "torchrun of 1": _TORCHRUN_1,
    "mpirun -np 1 in an interactive step": {**_INTERACTIVE, **_OPENMPI_1},
}
LAUNCHED = {  # ranks, in any of these shells
    "srun": (_STEP, World(3, 4, 1, 2, "slurm")),
    "srun --mpi=pmi2": ({**_STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}, World(3, 4, 1, 2, "slurm")),
    "srun --mpi=pmix": ({**_STEP, "PMIX_RANK": "3"}, World(3, 4, 1, 2, "slurm")),
    "srun of a heterogeneous job": ({**_STEP, "SLURM_HET_SIZE": "2"}, World(3, 4, 1, 2, "slurm")),
    "mpirun": (_OPENMPI_2, World(1, 2, 1, 2, "openmpi")), "mpiexec.hydra": (_HYDRA_2, World(1, 2, 1, 2, "pmi")),
    "mpiexec.hydra by srun": ({**_STEP, **_HYDRA_2}, World(1, 2, 1, 2, "pmi")),
    "torchrun": (_TORCHRUN, World(1, 2, 1, 2, "torch")), "deepspeed": (_DEEPSPEED, World(1, 2, 1, 2, "torch")),
    "torchrun of 1 in srun": ({**_STEP, **_TORCHRUN_1}, World(0, 1, 0, 1, "torch")),
    "PyTorchJob": ({**_PYTORCHJOB_1, "RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 0, 1, "torch")),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_is_one_rank_and_launchers_in_it_start_theirs(shell: str) -> None:
    world = world_from_environment(SHELLS[shell])
    assert (world.rank, world.size, world.local_rank) == (0, 1, 0)
    environ = {**SHELLS[shell]}
    export_world(world, environ)
    assert environ["LOCAL_RANK"] == environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"), "DeepSpeed asserts this"
    assert environ["MASTER_PORT"] != "29500", "a second process of this shell would find the port taken"
    for launcher, (variables, expected) in LAUNCHED.items():
        if shell == "torchrun of 1" and launcher not in ("torchrun", "deepspeed"):
            continue  # the same variables as of torchrun in srun
        environ = {**SHELLS[shell], **variables}
        if launcher == "deepspeed":  # of ds-pretrain
            own = launcher_environment_of(SHELLS[shell])
            assert not any(name in own for name in RANK_VARIABLES)
            environ = {**own, **variables}
        assert world_from_environment(environ) == expected, launcher
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        export_world(expected, environ)
        assert environ["LOCAL_RANK"] == environ.get("OMPI_COMM_WORLD_LOCAL_RANK", environ["LOCAL_RANK"]), launcher
        assert ("TORCHELASTIC_USE_AGENT_STORE" in environ) == launcher.startswith("torchrun"), launcher


def launcher_environment_of(shell: dict[str, str]) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as context:
        context.setattr(os, "environ", shell)
        return launcher_environment({})


def test_the_shell_of_several_tasks_is_rejected_where_it_has_the_only_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --pty -n 4 bash`: typed there, a program would wait for the other ranks. Ranks of srun are accepted."""
    environ = {**_STEP, "SLURM_PTY_PORT": "42085"}
    assert world_from_environment(environ).size == 4
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    with pytest.raises(ConfigError, match="first of 4 tasks, and the others have no terminal") as error:
        world_from_environment(environ)
    assert "env -u SLURM_PROCID" in str(error.value)
    assert world_from_environment({name: environ[name] for name in environ if name != "SLURM_PROCID"}) == ALONE
    assert world_from_environment({**environ, "SLURM_TASK_PID": str(os.getpid())}).size == 4


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_world_from_environment(name: str) -> None:
    environ, expected = ENVIRONMENTS[name]
    assert world_from_environment(environ) == expected


@pytest.mark.parametrize("environ", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"},
                                     {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0",
                                      "SLURM_STEP_TASKS_PER_NODE": "1(y2)"}])
def test_impossible_ranks_are_rejected(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"RANK|TASKS_PER_NODE"):
        world_from_environment(environ)


VALUES = ("x", "", "-1", "0", "2", "1.5", "a\nb", "9" * 30, "99999", "http", "a,b", "no-such-host.invalid", "gpu",
          "cuda")


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_variables_are_rejected_in_one_line_or_harmless(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device and the address of rank 0 are those that torch would use; no rank begins alone by mistake."""
    monkeypatch.setattr(world_module, "_RESOLVE_S", 0)
    right = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0",
             "DEEPSPEED_TIMEOUT": "30"}
    rejected: dict[str, list[str]] = {}
    problems: list[str] = []
    for name, value in itertools.product(right, (None, *VALUES)):
        environ = {**right, name: value}
        monkeypatch.setattr(os, "environ", {key: text for key, text in environ.items() if text is not None})
        try:
            world = running_environment()
            device = detect_device()
            collective_timeout_s(0.0, os.environ)
        except ConfigError as error:
            rejected.setdefault(name, []).append(str(value))
            is_named = name in str(error) or name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            problems += [] if is_named and len(str(error).splitlines()) == 1 else [f"{name}={value}: {error}"]
        else:
            assert 0 <= world.rank < world.size
            assert world.local_rank >= 0
            assert device.kind == "cpu" or name == "DS_ACCELERATOR", (name, value)
    assert not problems
    assert {"x", "", "-1", "0", "1.5", "a\nb", "9" * 30, "99999", "http", "a,b"} <= {*rejected["MASTER_PORT"]}
    assert {"x", "", "a\nb", "no-such-host.invalid", "http"} <= {*rejected["MASTER_ADDR"]}
    assert {"x", "gpu", "-1", "a\nb"} <= {*rejected["DS_ACCELERATOR"]}
    assert {"x", "", "0", "-1", "1.5"} <= {*rejected["WORLD_SIZE"]}
    assert ("None" in rejected["RANK"]) == (ranks > 1)


@pytest.mark.parametrize("name", ["openmpi", "mpich", "srun"])
def test_wrong_variables_of_launchers_are_rejected_in_one_line_or_harmless(name: str) -> None:
    """Each variable of the launcher, also missing: the rank remains in its world, or the process does not start."""
    right, expected = ENVIRONMENTS[name]
    rejected: dict[str, set[str]] = {}
    problems: list[str] = []
    for variable, value in itertools.product(right, (None, *VALUES, "x" * 5000, "2(x999999999)", "1(x-2)", "2(x")):
        environ = {key: text for key, text in {**right, variable: value}.items() if text is not None}
        try:
            world = world_from_environment(environ)
            export_world(world, environ)
        except ConfigError as error:
            rejected.setdefault(variable, set()).add(str(value))
            is_named = any(key in str(error) for key in (*right, "MASTER_ADDR"))
            is_short = len(str(error).splitlines()) == 1 and len(str(error)) < 600
            problems += [] if is_named and is_short else [f"{variable}={value}: {error}"]
        else:
            assert 0 <= world.rank < world.size
            assert world.launcher == expected.launcher or (name, world) == ("srun", ALONE), (variable, value)
    assert not problems
    for variable in [key for key in right if key != "SLURM_STEP_ID"]:
        assert {"x", "", "1.5", "-1", "a\nb", "9" * 30, "x" * 5000, "2(x"} <= rejected[variable], variable


@pytest.mark.parametrize("visible", ["a,b", "0;1", "gpu0", "0,", ""])
def test_wrong_visible_devices_are_rejected(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="CUDA"):
        detect_device()


def test_export_sets_the_variables_that_torch_reads() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
               "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    export_world(world_from_environment(environ), environ)
    assert {key: environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}


def test_several_hosts_need_an_address() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        export_world(world_from_environment(environ), environ)


def test_one_process_takes_a_free_port() -> None:
    first: dict[str, str] = {}
    export_world(ALONE, first)
    assert first["MASTER_PORT"] != "29500"
    given = {"MASTER_PORT": "1234"}
    export_world(ALONE, given)
    assert given["MASTER_PORT"] == "1234"


def test_the_remedy_for_a_port_in_use_depends_on_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1234")
    for launcher, variable, remedy in (
            ("none", "X", "Unset MASTER_PORT"), ("torch", "CROSS_RANK", "deepspeed --master_port N"),
            ("torch", "TORCHELASTIC_RUN_ID", "torchrun --master_port N"), ("openmpi", "X", "mpirun -x MASTER_PORT=N"),
            ("slurm", "X", "before srun"), ("torch", "X", "MASTER_PORT=N")):
        with monkeypatch.context() as context:
            context.setenv(variable, "0")
            error = str(taken_port(World(rank=0, size=2, local_rank=0, local_size=2, launcher=launcher)))
        assert error.startswith("MASTER_PORT: another program listens on port 1234 of rank 0's host")
        assert remedy in error
