"""Runs on GPUs that are not there (tools/dry_gpu): CUDA's control flow, memory and collectives are real, values are 0.

A run must reach its end: no exception on a line that only CUDA executes, no tensor on a wrong device, no collective
that the other ranks do not join.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

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


def optimizer(kind: str, **others: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **others}}}


def llama(model: str, **others: Any) -> dict[str, str]:
    """Return the flags of a small model of the family of a preset."""
    sizes = {"vocab_size": 256, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **others}
    return {"model": model, "model_overrides": ",".join(f"{key}={value}" for key, value in sizes.items())}


class Kind(NamedTuple):
    """A run: its DeepSpeed JSON and flags, the devices, and a part of its output."""

    json: dict[str, Any]
    flags: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    devices: int = 1
    part: str = ""
    capability: int = 80


MEASURED = {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True,
            "comms_logger": {"enabled": True, "prof_all": True}, "flops_profiler": {"enabled": True, "profile_step": 2}}
TENSOR2 = {"tensor_parallel": {"autotp_size": 2}}
EXPERT2 = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
DOCUMENTS = {"document_attention": "true", "seq_length": 128}
KINDS: dict[str, Kind] = {
    "documents": Kind(bf16(1), DOCUMENTS, 1, "attention: flex_attention"),
    "documents in a pipeline": Kind(bf16(1, stages=2), DOCUMENTS, 2, "attention: flex_attention"),
    "documents, sequences": Kind(bf16(2) | {"sequence_parallel_size": 2}, DOCUMENTS, 2, "attention: flex_attention"),
    "compiled": Kind(bf16(1), {"compile_blocks": "true"}),
    "compiled at ZeRO-3": Kind(bf16(3), {"compile_blocks": "true"}, 2),
    "compiled in a pipeline": Kind(bf16(1, stages=2), {"compile_blocks": "true", "recompute": "blocks"}, 2),
    "compiled and tensor": Kind(bf16(1) | TENSOR2, {"compile_blocks": "true"}, 2),
    "plain": Kind(bf16(1), {"plain_operators": "true"}),
    "plain, with documents": Kind(bf16(1), {"plain_operators": "true", "document_attention": "true"}, 1, "efficient"),
    "Gemma 2": Kind(bf16(1), {**llama("gemma2-2b", sliding_window=32), "seq_length": 128}, 1, "flex_attention"),
    "Llama 3, tensor": Kind(bf16(3) | TENSOR2, llama("llama3-1b"), 2),
    "recomputed": Kind(bf16(3), {"recompute": "blocks"}, 2),
    "recomputed MLP": Kind(bf16(1), {"recompute": "mlp"}),
    "recomputed attention, MLP in tiles": Kind(bf16(2), {"recompute": "attention", "recompute_every": 2,
                                                         "mlp_tiles": 2}, 2),
    "FP8 by tensor": Kind(bf16(1), {"fp8": "tensorwise"}, capability=89),
    "FP8 by row, compiled, ZeRO-3": Kind(bf16(3), {"fp8": "rowwise", "compile_blocks": "true"}, 2, capability=89),
    "TF32": Kind(config(1, micro=2), {"tf32": "true"}, 2),
    "asynchronous saves": Kind(bf16(2), {"async_save": "true", "save_interval": 2}, 2, "saved"),
    "asynchronous saves of offloaded states": Kind(
        bf16(3, offload_optimizer={"device": "cpu", "pin_memory": True}, offload_param={
            "device": "cpu", "pin_memory": True}), {"async_save": "true", "save_interval": 2}, 2, "saved"),
    "deterministic": Kind(bf16(1), {"deterministic": "true", "recompute_interval": 2}, 2),
    "replicas": Kind(bf16(1), {"replica_check_interval": 2}, 2),
    "flight record": Kind(bf16(1), {"flight_interval": 2}, 2),
    "flight record at ZeRO-3": Kind(bf16(3), {"flight_interval": 1}, 2),
    "spikes are skipped": Kind(bf16(1), {"spike_policy": "skip"}, 2),
    "experts with a capacity": Kind(bf16(1), {**EXPERTS, "expert_capacity_factor": 1.2}, 2),
    "experts and tensor": Kind(bf16(1) | TENSOR2 | EXPERT2, EXPERTS, 2),
    "hpZ": Kind(bf16(3, zero_hpz_partition_size=2), {}, 2),
    "settings of ZeRO-2": Kind(bf16(2, overlap_comm=True, round_robin_gradients=True, contiguous_gradients=False) |
                               {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}, {}, 2),
    "settings of ZeRO-3": Kind(bf16(3, overlap_comm=False, stage3_param_persistence_threshold=0,
                                    stage3_use_all_reduce_for_fetch_params=True, sub_group_size=20_000), {}, 2),
    "states in bf16": Kind(bf16(1) | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                                               "bf16_optimizer_states": True}}, {}, 2),
    "DeepSpeed's measurements": Kind(bf16(1) | MEASURED, {}, 2),
    "DeepSpeed's measurements of a pipeline": Kind(bf16(1, stages=2) | MEASURED, {}, 2),
    "profiles": Kind(bf16(2), {"profile_steps": "2:3", "memory_snapshot": "true"}, 2),
    "timeline": Kind(bf16(1, stages=2), {"pipeline_timeline": "2:3", "profile_steps": "2:3"}, 2),
    "Muon": Kind(bf16(1) | optimizer("Muon"), {}, 2, "AdamW of torch"),
    **{kind: Kind(bf16(1) | optimizer(kind), {}, 2)
       for kind in ("Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")},
    "fused SGD": Kind(bf16(1) | optimizer("SGD", fused=True, momentum=0.9), {}),
    "Adagrad at ZeRO-0": Kind(bf16(0) | optimizer("Adagrad"), {}, 2),
    "label smoothing and z-loss": Kind(bf16(1), {"label_smoothing": 0.1, "z_loss": 1e-4}),
    "masked labels": Kind(bf16(1), {"eod_mask_loss": "true", "packing": "best_fit"}, 2),
    "clipping": Kind(bf16(2), {"adaptive_clipping": 90, "adaptive_clipping_window": 2,
                               "gradient_value_clipping": 0.5}, 2),
    "growing batch and length": Kind(bf16(1), {"batch_schedule": "0:4,512:8", "seq_length_schedule": "0:32,256:64"}, 2),
    "dropout": Kind(bf16(3), {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}, 2),
    "muP": Kind(bf16(1), {"mup_base_width": 32, "init_method": "normal"}),
    "noise scale": Kind(bf16(1), {"noise_scale_interval": 2}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_run_reaches_its_end(name: str, dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(kind.json))
    output = train(dry_gpu, tmp_path / "run", path, {**flags(corpus, steps=STEPS), **kind.flags}, devices=kind.devices,
                   DRY_GPU_CAPABILITY=str(kind.capability))
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert kind.part in output, output[-3000:]


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
