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
from tests.dry_gpu.kinds import FLAGS, NEW, NOTHING, RUN, STEPS, Kind, bf16, text_flags
from tests.support.cases import config, flags
from tests.support.extensions import entries_of_extensions
from tests.support.launch import ROOT


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


def optimizer(kind: str, **others: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **others}}}


def llama(model: str, **others: Any) -> dict[str, str]:
    """Return the flags of a small model of the family of a preset."""
    sizes = {"vocab_size": 256, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **others}
    return {"model": model, "model_overrides": ",".join(f"{key}={value}" for key, value in sizes.items())}


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
    "TF32": Kind(config(1, micro=2), {"tf32": "true"}, 2),
    "asynchronous saves": Kind(bf16(2), {"async_save": "true", "save_interval": 2}, 2, "saved"),
    "asynchronous saves of offloaded states": Kind(
        bf16(3, offload_optimizer={"device": "cpu", "pin_memory": True}, offload_param={
            "device": "cpu", "pin_memory": True}), {"async_save": "true", "save_interval": 2}, 2, "saved"),
    "deterministic": Kind(bf16(1), {"deterministic": "true"}, 2),
    "replicas": Kind(bf16(1), {"replica_check_interval": 2}, 2),
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
    "DeepSpeed's measurements of a pipeline": Kind(
        bf16(1, stages=2) | {**MEASURED, "wall_clock_breakdown": False, "flops_profiler": {"enabled": False}}, {}, 2),
    "Muon": Kind(bf16(1) | optimizer("Muon"), {}, 2, "MuonWithAuxAdam"),
    **{kind: Kind(bf16(1) | optimizer(kind), {}, 2)
       for kind in ("Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")},
    "fused SGD": Kind(bf16(1) | optimizer("SGD", fused=True, momentum=0.9), {}),
    "Adafactor at ZeRO-0": Kind(bf16(0) | optimizer("Adafactor"), {}, 2),
    "Adagrad at ZeRO-0": Kind(bf16(0) | optimizer("Adagrad"), {}, 2),
    "label smoothing and z-loss": Kind(bf16(1), {"label_smoothing": 0.1, "z_loss": 1e-4}),
    "masked labels": Kind(bf16(1), {"eod_mask_loss": "true", "packing": "best_fit"}, 2),
    "clipping": Kind(bf16(2), {"adaptive_clipping": 90, "adaptive_clipping_window": 2,
                               "gradient_value_clipping": 0.5}, 2),
    "growing batch and length": Kind(bf16(1), {"batch_schedule": "0:4,512:8", "seq_length_schedule": "0:32,256:64"}, 2),
    "dropout": Kind(bf16(3), {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}, 2),
    "muP": Kind(bf16(1), {"mup_base_width": 32, "model_overrides": "vocab_size=256,tie_word_embeddings=false"}),
    "noise scale": Kind(bf16(1), {"noise_scale_interval": 2}, 2),
    **entries_of_extensions("gpu_runs", "KINDS"),
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


@pytest.fixture(scope="module")
def trained(dry_gpu: DryGpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the flags of a trained run whose tokens have a tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "ds.json").write_text(json.dumps(bf16(1)))
    own = text_flags(folder)
    train(dry_gpu, folder / "run", folder / "ds.json", own, devices=1)
    return {**own, "save": folder / "run", "deepspeed_config": folder / "ds.json"}


# words -> exit code and a part of the output, here and on a GPU that computes nothing
COMMANDS: dict[str, tuple[list[str], tuple[int, str], tuple[int, str]]] = {
    "evaluate": (["evaluate", RUN], (0, "perplexity"), (1, NOTHING)),
    "train": (["--num_accelerators=1", *FLAGS, "--resume=required"], (0, "complete"), (1, NOTHING)),
    "bench": (["tools/bench.py", "--device=cuda", "--preset=cpu-small", "--rounds=1"], (0, "plain PyTorch"),
              (1, NOTHING)),
    "compare": (["compare", "measure", "--model=tiny", "--world_size=1", "--configs=zero2_bf16", "--seq_length=64"],
                (0, ""), (2, NOTHING)),
    "check": (["check", "--world_size=2", *FLAGS], (0, "model"), (0, "model")),
    "export": (["export", RUN, "--output", NEW], (0, ""), (0, "")),
    "verify": (["checkpoint", "verify", RUN], (0, ""), (0, "")),
    "summary": (["summary", RUN], (0, "4 of 4"), (0, "4 of 4")),
    **entries_of_extensions("gpu_runs", "COMMANDS"),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True], ids=["dry", "broken"])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_end_and_say_that_the_device_computes_nothing(
        name: str, broken: bool, dry_gpu: DryGpu, trained: dict[str, Any], tmp_path: Path) -> None:
    """Commands end as on a GPU. Where the device is no dry GPU but a broken one, those that compute say so."""
    words, *expected = COMMANDS[name]
    given = {"FLAGS": [f"--{key}={value}" for key, value in trained.items()]}
    replaced = [text.replace("RUN", str(trained["save"])).replace("NEW", str(tmp_path / "new"))
                for word in words for text in given.get(word, [word])]
    program = [str(ROOT / replaced.pop(0))] if replaced[0].startswith("tools/") else ["-m", "pretrain"]
    done = dry_gpu(["python", *program, *replaced], **({"DRY_GPU_CHECKED": "1"} if broken else {}))
    code, part = expected[broken]
    assert (done.returncode, part in done.stdout) == (code, True), done.stdout[-4000:]
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_exported_and_imported_weights_train(dry_gpu: DryGpu, trained: dict[str, Any], tmp_path: Path) -> None:
    """A run is exported, imported, and continued from these weights in another layout."""
    for words in (["export", trained["save"], "--output", tmp_path / "hf"],
                  ["import", tmp_path / "hf", "--output", tmp_path / "imported"]):
        done = dry_gpu(["python", "-m", "pretrain", *map(str, words)])
        assert done.returncode == 0, done.stdout[-3000:]
    (tmp_path / "ds.json").write_text(json.dumps(bf16(3)))
    own = {name: value for name, value in trained.items() if name not in ("save", "deepspeed_config")}
    train(dry_gpu, tmp_path / "run", tmp_path / "ds.json", {**own, "init_from": tmp_path / "imported"}, devices=2)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
