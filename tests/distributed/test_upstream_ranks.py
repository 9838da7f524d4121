"""Defects of DeepSpeed in ranks and process groups: results are right with this package."""

import json
from pathlib import Path

from pretrain.distributed.world import World, world_from_environment
from tests.distributed.test_upstream import BF16, ds_config, flags
from tests.support.launch import ROOT, WORKERS, free_port, run_ranks


def test_j_ranks_are_read_from_slurms_variables() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8",
               "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    assert world_from_environment(environ) == World(rank=5, size=8, local_rank=1, local_size=4, launcher="slurm")


def test_j_slurm_tasks_train_together(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(1, **BF16)))
    words = [f"--{name}={value}" for name, value in flags(corpus, train_steps=1, split="1,0,0", save="run").items()]
    done = run_ranks([str(WORKERS / "as_slurm.py"), str(ROOT / "pretrain" / "train.py"), "--deepspeed_config=ds.json",
                      *words], 2, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout[-4000:]
    (start,) = json.loads((tmp_path / "run" / "run.json").read_text())
    assert start["layout"]["world_size"] == start["layout"]["data_parallel_size"] == 2


def test_y_no_shared_memory_is_left_behind(tmp_path: Path) -> None:
    port = str(free_port())
    done = run_ranks(["-c", "from pretrain.distributed.process_group import init_process_group\n"
                            "from pretrain.distributed.world import running_environment\n"
                            "init_process_group(running_environment())"], 2, cwd=tmp_path,
                     environ={"MASTER_PORT": port})
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    left = list(Path("/dev/shm").glob(f"deepspeed_*_{port}_*"))
    for segment in left:
        segment.unlink()
    assert not left


def test_one_rank_loads_no_shared_memory_operator(tmp_path: Path) -> None:
    def operator_after(code: str) -> str:
        """Return DeepSpeed's shared-memory operator in a world of one rank."""
        code += "\nfrom deepspeed.comm import comm; print('operator:', comm.cdb.shm_comm_op)"
        (rank,) = run_ranks(["-c", code], 1, cwd=tmp_path)
        assert rank.returncode == 0, rank.stdout
        return rank.stdout.rpartition("operator: ")[2].strip()

    assert operator_after("from pretrain.distributed.process_group import init_process_group\n"
                          "from pretrain.distributed.world import running_environment\n"
                          "init_process_group(running_environment())") == "None"
    assert operator_after("import deepspeed; deepspeed.init_distributed()") != "None", (
        "DeepSpeed loads no operator for one rank: remove process_group.skip_shared_memory_operator")
