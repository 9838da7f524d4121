"""Runs on GPUs that are not there (tools/dry_gpu): CUDA's control flow, memory and collectives are real, values are 0.

A run must reach its end: no exception on a line that only CUDA executes, no tensor on a wrong device, no collective
that the other ranks do not join.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.read_run_folder import read_rows
from tests.distributed.test_ds_configs import EXPERTS, FILES, ranks_of
from tests.dry_gpu.conftest import DryGpu
from tests.support.cases import config, flags

STEPS = 4


def train(dry_gpu: DryGpu, folder: Path, json_file: Path | str, own: dict[str, Any], *, devices: int,
          **environ: str) -> str:
    """Train on dry GPUs, one rank each. Returns the output; raises AssertionError unless the run reached its end."""
    words = [f"--{name}={value}" for name, value in {"log_interval": 1, **own}.items()]
    done = dry_gpu(["python", "-m", "pretrain", "--num_accelerators", str(devices), f"--deepspeed_config={json_file}",
                    f"--save={folder}", *words], devices=devices, **environ)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


LAYOUTS = [pytest.param(path, id=path.stem, marks=[] if path.stem in ("zero3_bf16", "pipeline2_zero1_bf16") else
                        pytest.mark.slow) for path in FILES if "nvme" not in path.stem]


@pytest.mark.parametrize("path", LAYOUTS)
def test_every_layout_trains_evaluates_and_saves(path: Path, dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    own = {**flags(corpus, steps=STEPS, micro_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3),
           "save_interval": 2, "eval_interval": 2, **(EXPERTS if "experts" in path.stem else {})}
    output = train(dry_gpu, tmp_path / "run", path, own, devices=ranks_of(path))
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert "; cuda, " in output
    assert (tmp_path / "run/checkpoints/latest").read_text() == "global_step4"


def bf16(stage: int, **others: Any) -> dict[str, Any]:
    return config(stage, precision="bf16", micro=2, **others)


# name -> DeepSpeed JSON, flags, devices, a part of the output
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "documents": (bf16(1), {"document_attention": "true", "seq_length": 128}, 1, "attention: flex_attention"),
    "compiled": (bf16(1), {"compile_blocks": "true"}, 1, ""),
    "compiled at ZeRO-3": (bf16(3), {"compile_blocks": "true"}, 2, ""),
    "plain": (bf16(1), {"plain_operators": "true"}, 1, ""),
    "plain, with documents": (bf16(1), {"plain_operators": "true", "document_attention": "true"}, 1, "efficient"),
    "recomputed": (bf16(3), {"recompute": "blocks"}, 2, ""),
    "recomputed MLP": (bf16(1), {"recompute": "mlp"}, 1, ""),
    "asynchronous saves": (bf16(2), {"async_save": "true", "save_interval": 2}, 2, "saved"),
    "deterministic": (bf16(1), {"deterministic": "true", "recompute_interval": 2}, 2, ""),
    "replicas": (bf16(1), {"replica_check_interval": 2}, 2, ""),
    "flight record": (bf16(1), {"flight_interval": 2}, 2, ""),
    "spikes are skipped": (bf16(1), {"spike_policy": "skip"}, 2, ""),
    "experts with a capacity": (bf16(1), {**EXPERTS, "expert_capacity_factor": 1.2}, 2, ""),
    "experts and tensor": (bf16(1) | {"tensor_parallel": {"autotp_size": 2},
                                       "expert_parallel": {"enabled": True, "autoep_size": 2}}, EXPERTS, 2, ""),
    "hpZ": (bf16(3, zero_hpz_partition_size=2), {}, 2, ""),
    "RMSprop": (bf16(1) | {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}}, {}, 2, ""),
    "Adagrad at ZeRO-0": (bf16(0) | {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-3}}}, {}, 2, ""),
    "label smoothing and z-loss": (bf16(1), {"label_smoothing": 0.1, "z_loss": 1e-4}, 1, ""),
    "noise scale": (bf16(1), {"noise_scale_interval": 2}, 2, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_run_reaches_its_end(name: str, dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    values, extra, devices, part = KINDS[name]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    output = train(dry_gpu, tmp_path / "run", path, {**flags(corpus, steps=STEPS), **extra}, devices=devices)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert part in output, output[-3000:]


@pytest.mark.slow
def test_a_run_resumes_in_each_layout(dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    """ZeRO-1, the same again, ZeRO-3, two pipeline stages, ZeRO-0."""
    chain = [(bf16(1), 2), (bf16(1), 2), (bf16(3), 2), (bf16(1, stages=2), 2), (bf16(0), 1)]
    for number, (values, devices) in enumerate(chain):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(values))
        own = {**flags(corpus, steps=2 * len(chain)), "save_interval": 2,
               "exit_step": 2 * (number + 1)}
        train(dry_gpu, tmp_path / "run", path, own, devices=devices)
        assert steps_of(tmp_path / "run")[-1] == 2 * (number + 1)


@pytest.mark.slow
def test_the_commands_of_a_trained_run(dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    """Commands end as on a GPU; those that look at values say in a line what is wrong with this device."""
    run, path = tmp_path / "run", tmp_path / "ds.json"
    path.write_text(json.dumps(bf16(1)))
    own = {**flags(corpus, steps=STEPS), "save_interval": 2}
    train(dry_gpu, run, path, own, devices=2)
    words = [f"--deepspeed_config={path}", *(f"--{name}={value}" for name, value in own.items())]

    def ends(code: int, part: str, command: list[str], devices: int = 1) -> None:
        done = dry_gpu(["python", "-m", "pretrain", *command], devices=devices)
        assert (done.returncode, part in done.stdout, "Traceback" in done.stdout) == (code, True, False), \
            f"{command}: {done.returncode}\n{done.stdout[-4000:]}"

    ends(0, "perplexity", ["evaluate", str(run), "--data", corpus])
    ends(0, "", ["export", str(run), "--output", str(tmp_path / "hf")])
    ends(0, "model", ["check", "--world_size=2", f"--save={run}", *words])
    ends(2, "the device computes nothing", ["--num_accelerators=2", "sanity", f"--save={run}", *words], devices=2)
    ends(0, "", ["summary", str(run)])
    ends(1, "wrong result", ["check-cluster"])
