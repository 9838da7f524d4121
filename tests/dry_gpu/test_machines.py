"""Machines whose GPUs cannot be used, or differ: each run ends in one line before a process group forms, or trains."""

import json
from pathlib import Path

import pytest

from tests.dry_gpu.conftest import DryGpu
from tests.support.cases import config, flags

BEFORE = ("starting DeepSpeed's launcher", "loading torch and DeepSpeed")
# name -> variables, ranks, a part of the line; an exit code of 0 where the run trains
MACHINES: dict[str, tuple[dict[str, str], int, str, int]] = {
    "old driver": ({"DRY_GPU_FAULT": "old_driver"}, 1, "NVIDIA driver: it supports CUDA up to 12.8, and torch", 2),
    "old driver, ranks": ({"DRY_GPU_FAULT": "old_driver"}, 2, "NVIDIA driver: it supports CUDA up to 12.8", 2),
    "no permission": ({"DRY_GPU_FAULT": "no_permission"}, 1, "/dev/nvidia0: it cannot be opened (Permission", 2),
    "busy": ({"DRY_GPU_FAULT": "busy"}, 1, "GPU 0: it is busy: another process has it in exclusive mode", 2),
    "full": ({"DRY_GPU_FAULT": "full", "MODEL": "gpt2-medium"}, 1, "GPU 0: 1.0 of 80.0 GiB are free, and the run", 2),
    "small enough": ({"DRY_GPU_FAULT": "full"}, 1, "finished 2 steps", 0),
    "one MIG instance": ({"CUDA_VISIBLE_DEVICES": "MIG-dry-0"}, 1, "finished 2 steps", 0),
    "two MIG instances": ({"CUDA_VISIBLE_DEVICES": "MIG-dry-0,MIG-dry-1"}, 2, "a program one MIG instance", 2),
    "MIG that is not there": ({"CUDA_VISIBLE_DEVICES": "MIG-dry-9"}, 1, "CUDA finds no device of 'MIG-dry-9'", 2),
    "no such number": ({"CUDA_VISIBLE_DEVICES": "0,5"}, 1, "found '0,5'; expected numbers below 2", 2),
    "twice the same": ({"CUDA_VISIBLE_DEVICES": "1,1"}, 2, "found '1,1'; expected each device once", 2),
    "text": ({"CUDA_VISIBLE_DEVICES": "gpu0"}, 1, "found 'gpu0'; expected numbers or UUIDs", 2),
    "empty": ({"CUDA_VISIBLE_DEVICES": ""}, 1, "DS_ACCELERATOR: it is cuda, and torch sees no CUDA device", 2),
    "UUIDs": ({"CUDA_VISIBLE_DEVICES": "GPU-dry-1,GPU-dry-0"}, 2, "finished 2 steps", 0),
    "too few": ({}, 3, "--num_gpus: found 3; expected at most 2", 2),
    "two kinds": ({"DRY_GPU_KINDS": "A100-SXM4-80GB:80,A30:24"}, 2,
                  "differ: 1 x NVIDIA A100-SXM4-80GB (dry) (80 GiB), 1 x NVIDIA A30 (dry) (24 GiB)", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_named_in_one_line_or_trains(name: str, dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    variables, ranks, part, code = MACHINES[name]
    path, own = tmp_path / "ds.json", flags(corpus, steps=2)
    path.write_text(json.dumps(config(1, precision="bf16", micro=2)))
    if model := variables.get("MODEL"):
        own |= {"model": model, "model_overrides": "n_layer=24"}
    done = dry_gpu(["python", "-m", "pretrain", "--num_accelerators", str(ranks), f"--deepspeed_config={path}",
                    f"--save={tmp_path / 'run'}", *(f"--{key}={value}" for key, value in own.items())],
                   devices=2, **variables)
    out = done.stdout
    assert (done.returncode, part in out, "Traceback" in out) == (code, True, False), out[-3000:]
    if code == 2:
        assert len([line for line in out.splitlines() if not line.endswith(BEFORE)]) == 1, out
