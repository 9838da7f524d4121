"""Waits of the host for the device, and kernels, in a step that is not logged. Both numbers may only become smaller.

A failing test prints the places, with DeepSpeed's files and lines.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dry_gpu.conftest import DryGpu
from tests.dry_gpu.kinds import bf16
from tests.dry_gpu.test_runs import train
from tests.support.cases import CPU, config, flags

STEPS = 14  # tools/dry_gpu/waits.py counts in some of them
DOCUMENTS = {"document_attention": "true", "seq_length": 128, "recompute": "blocks"}

# name -> DeepSpeed JSON, flags, devices, reads and waits for the device, and events that DeepSpeed waits for
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int, int]] = {
    **{f"ZeRO-{stage} on {ranks}": (bf16(stage), {}, ranks, 0, 0) for stage in range(4) for ranks in (1, 2)},
    **{f"ZeRO-{stage}, documents": (bf16(stage), DOCUMENTS, 1, 0, 0) for stage in range(4)},
    "ZeRO-2 with overlap": (bf16(2, overlap_comm=True), {}, 2, 0, 0),
    "ZeRO-3, all parameters divided": (bf16(3, stage3_param_persistence_threshold=0), {}, 2, 0, 0),
    "hpZ": (bf16(3, zero_hpz_partition_size=2), {}, 2, 0, 0),
    "pipeline": (bf16(1, stages=2), {}, 2, 0, 0),
    "tensor": (bf16(1) | {"tensor_parallel": {"autotp_size": 2}}, {}, 2, 0, 0),
    "sequence at ZeRO-3": (bf16(3) | {"sequence_parallel_size": 2}, {}, 2, 0, 0),
    "spikes are skipped": (bf16(1), {"spike_policy": "skip"}, 1, 5, 0),
    "adaptive clipping": (bf16(1), {"adaptive_clipping": 2}, 1, 2, 0),
    "fp32 at ZeRO-0": (config(0, micro=2), {}, 1, 1, 0),
    "fp16 at ZeRO-0": (config(0, precision="fp16", micro=2), {}, 1, 9, 0),
    "sequence at ZeRO-0": (bf16(0) | {"sequence_parallel_size": 2}, {}, 2, 9, 0),
    "fp16": (config(1, precision="fp16", micro=2), {}, 1, 1, 0),
    "ZeRO-2, optimizer on the CPU": (bf16(2, offload_optimizer=CPU), {}, 1, 5, 104),
    "ZeRO-3, optimizer on the CPU": (bf16(3, offload_optimizer=CPU), {}, 1, 11, 0),
}
# ZeRO stage -> kernels of this program; kernels and waits of a loop over DeepSpeed's engine with the same JSON
KERNELS = {0: (420, 1309, 64), 1: (510, 1184, 12), 2: (509, 1185, 12), 3: (546, 526, 10)}


def waits_of(file: Path) -> Counter[str]:
    """Return the numbers per step by kind: "read", "device", "event", "kernels", and "own event" of this program."""
    found: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        number, kind, *place = line.split(maxsplit=2)
        found["own event" if kind == "event" and place[0].startswith("pretrain/") else kind] += float(number)
    return found


@pytest.mark.parametrize("name", [name if name == "ZeRO-3 on 1" else pytest.param(name, marks=pytest.mark.slow)
                                  for name in CASES])
def test_the_host_waits_no_more(name: str, dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    values, own, devices, expected, events = CASES[name]
    path, file = tmp_path / "ds.json", tmp_path / "waits.txt"
    path.write_text(json.dumps(values))
    train(dry_gpu, tmp_path / "run", path, {**flags(corpus, steps=STEPS), "log_interval": 100, **own}, devices=devices,
          DRY_GPU_WAITS=str(file))
    for rank in range(devices):
        of_rank = file if rank == 0 else Path(f"{file}.{rank}")
        waits = waits_of(of_rank)
        assert (waits["read"] + waits["device"], waits["event"]) == (expected, events), of_rank.read_text()
        assert waits["own event"] <= 3  # copies that the step before has begun: late skip, guard, flight record


@pytest.mark.slow
@pytest.mark.parametrize("stage", KERNELS)
def test_a_step_has_no_more_kernels(stage: int, dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    """If the numbers of DeepSpeed alone fall: delete parts of engine/patches/late_skip.py, waits.py and reads.py."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(bf16(stage)))
    own = {**flags(corpus, steps=STEPS), "log_interval": 100, "deepspeed_config": path, "save": tmp_path / "run"}
    found = {}
    for program in ("pretrain.train", "tests.dry_gpu.bare_loop"):
        file = tmp_path / f"{program}.txt"
        done = dry_gpu(["python", "-m", program, *(f"--{key}={value}" for key, value in own.items())],
                       DRY_GPU_WAITS=str(file), DRY_GPU_COUNTERS=str(tmp_path / f"{program}.counts"))
        assert done.returncode == 0, done.stdout[-4000:]
        found[program] = waits_of(file)
    ours, (kernels, *of_deepspeed), bare = found["pretrain.train"], KERNELS[stage], found["tests.dry_gpu.bare_loop"]
    assert ours["kernels"] <= kernels
    assert [bare["kernels"], bare["read"] + bare["device"]] == of_deepspeed
