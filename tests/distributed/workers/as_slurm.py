"""Run `python ARGUMENTS` with SLURM's variables instead of RANK etc., as srun does."""

import os
import runpy
import sys
from pathlib import Path

NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID",
         "LOCAL_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE"}

environ = {NAMES.get(name, name): value for name, value in os.environ.items() if name != "LOCAL_SIZE"}
environ |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
if sys.argv[1] == "-c":  # run the code in a new process, without the modules that this process has imported
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environ)
os.environ.clear()
os.environ.update(environ)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
