"""DeepSpeed: under `srun`, which sets SLURM_PROCID and SLURM_NTASKS, every task trains alone (comm/comm.py).

`init_distributed` asks MPI for the ranks if RANK is not set; without PMI each task is then rank 0 of 1. Here two
processes get the variables of two tasks. Expected: a world of 2, or an error that names SLURM.

python j_slurm_ranks.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import subprocess
import sys

TASK = """
import deepspeed, importlib
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # it would be compiled
deepspeed.init_distributed(distributed_port={port})
print("world of", deepspeed.comm.get_world_size())
"""


def output_of_tasks() -> list[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    outside = {name: value for name, value in os.environ.items()
               if not name.startswith(("OMPI_", "PMI", "SLURM_")) and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    step = {"DS_ACCELERATOR": "cpu", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
            "OMPI_MCA_ess_singleton_isolated": "1"}
    tasks = [subprocess.Popen([sys.executable, "-c", TASK.format(port=port + task)], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.STDOUT, env={**outside, **step, "SLURM_PROCID": str(task)})
             for task in range(2)]
    return [task.communicate()[0].strip() for task in tasks]


if __name__ == "__main__":
    outputs = output_of_tasks()
    if all("No module named 'mpi4py'" in output or "libmpi" in output for output in outputs):
        print("cannot run: without mpi4py and an MPI library, init_distributed ends with an ImportError")
        sys.exit(77)
    last_lines = [output.rpartition("\n")[2] for output in outputs]
    print(f"two tasks of a SLURM step: expected 'world of 2', found {last_lines}")
    sys.exit(0 if all("world of 2" in output or "SLURM" in output for output in outputs) else 1)
