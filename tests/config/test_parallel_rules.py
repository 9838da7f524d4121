"""Combinations of parallel degrees, settings and models that are rejected, by the check of tools/check_config.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_validate import rejection, words
from tests.wrong_inputs.inputs import CPU, NVME, UNTESTED, z
from tests.wrong_inputs.world import make_world

TENSOR, SEQUENCE = {"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
STAGES = {"pipeline": {"stages": 2}}
TWO, FOUR, EIGHT = ({"world_size": ranks} for ranks in (2, 4, 8))
GROUPED = {"model_type": "llama", "vocab_size": 256, "hidden_size": 96, "intermediate_size": 192,
           "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 256,
           "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
MIXTURE = {**GROUPED, "model_type": "mixtral", "num_key_value_heads": 6, "num_local_experts": 4,
           "num_experts_per_tok": 2}
_LLAMA, _MIXTURE = {"model": "{world}/grouped.json"}, {"model": "{world}/mixture.json"}
_STAGE = "zero_optimization.stage"
_MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}


def _tensor(size: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size}}


# (changes of the JSON, flags, key or flag that the error begins with, text of the remedy)
REJECTED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    # ranks
    (TENSOR, {}, "tensor_parallel.autotp_size", "Launch 2 or 4 ranks"),
    (_tensor(3), FOUR, "tensor_parallel.autotp_size", "Launch 3 or 6 ranks"),
    (SEQUENCE, {}, "sequence_parallel_size", "Launch 2 or 4 ranks"),
    (TENSOR | STAGES, TWO, "tensor_parallel.autotp_size", "Launch 4 or 8 ranks"),
    (_tensor(2) | {"pipeline": {"stages": 4}}, FOUR, "tensor_parallel.autotp_size", "Launch 8 or 16 ranks"),
    ({"pipeline": {"stages": 3}}, FOUR, "pipeline.stages", "Launch 3, 6 or 9 ranks"),
    (EXPERTS, {}, "expert_parallel.autoep_size", "a number that divides these ranks"),
    ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, FOUR, "tensor_parallel.tp.tp_size",
     '"tensor_parallel": {"autotp_size": N}'),
    ({"expert_parallel": {"autoep_size": 2}}, TWO, "expert_parallel.autoep_size", "DeepSpeed ignores the degree"),
    (TENSOR | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, FOUR,
     "train_batch_size", "4 x 2 x 2"),
    # degrees with each other and with ZeRO stages
    (STAGES | {_STAGE: 2}, TWO, "pipeline.stages", "ZeRO stage 0 or 1"),
    (STAGES | TENSOR | {_STAGE: 3}, FOUR, "pipeline.stages", "ZeRO stage 0 or 1"),
    (SEQUENCE | STAGES, FOUR, "sequence_parallel_size", "without stages"),
    (SEQUENCE | TENSOR, FOUR, "sequence_parallel_size", "set one of"),
    (EXPERTS | STAGES, FOUR, "expert_parallel.autoep_size", "without stages"),
    (EXPERTS | TENSOR, EIGHT, "expert_parallel.autoep_size", "set one of the two degrees to 1"),
    (EXPERTS | SEQUENCE, FOUR, "expert_parallel.autoep_size", "set one of the two degrees to 1"),
    # the model
    (_tensor(8), EIGHT, "tensor_parallel.autotp_size", "each rank computes some of the heads"),
    (TENSOR, TWO | _LLAMA, "tensor_parallel.autotp_size", "each rank computes some of the heads"),
    ({"sequence_parallel_size": 8}, EIGHT, "sequence_parallel_size", "each rank computes some of the heads"),
    (EXPERTS, TWO, "expert_parallel.autoep_size", "choose a mixture-of-experts model"),
    ({"expert_parallel": {"enabled": True, "autoep_size": 3}}, {"world_size": 3} | _MIXTURE,
     "expert_parallel.autoep_size", "the model's 4 experts"),
    (TENSOR, TWO | _MIXTURE, "tensor_parallel.autotp_size", "use expert_parallel or ZeRO instead"),
    (SEQUENCE, TWO | _MIXTURE, "sequence_parallel_size", "use expert_parallel or ZeRO instead"),
    (EXPERTS | {_STAGE: 0}, TWO | _MIXTURE, "zero_optimization.stage", "stage 1 also needs less memory"),
    (EXPERTS | z("zero_hpz_partition_size", 2), FOUR | _MIXTURE, "zero_optimization.zero_hpz_partition_size",
     "remove the key"),
    (EXPERTS | z("zero_quantized_weights", True), TWO | _MIXTURE | {"device": "cuda"},
     "zero_optimization.zero_quantized_weights", "remove the key"),
    (EXPERTS | z("offload_optimizer", NVME), TWO | _MIXTURE | {"nvme_path": "{world}"},
     "zero_optimization.offload_optimizer.device", "DeepSpeed does not save experts"),
    (EXPERTS | _MUON, TWO | _MIXTURE, "optimizer.type", "use AdamW"),
    (EXPERTS, TWO | _MIXTURE | {"noise_scale_interval": 2, "gradient_accumulation_steps": 4}, "--noise_scale_interval",
     "leave the flag out"),
    # lengths
    (TENSOR, TWO | {"seq_length": 63}, "--seq_length", "divides each sequence evenly"),
    (TENSOR, TWO | {"seq_length": 60, "seq_length_schedule": "0:15,4096:60"}, "--seq_length_schedule",
     "divides each sequence evenly"),
    (SEQUENCE, TWO | {"seq_length": 63}, "--seq_length", "divides each sequence evenly"),
    (SEQUENCE, TWO | {"seq_length": 60, "seq_length_schedule": "0:15,4096:60"}, "--seq_length_schedule",
     "divides each sequence"),
    # optimizers that need complete matrices
    (TENSOR | _MUON, TWO, "optimizer.type", "use AdamW"),
    (TENSOR | {"optimizer.type": "Lamb"} | UNTESTED, TWO | {"device": "cuda"}, "optimizer.type", "use AdamW"),
    (TENSOR | {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}} | UNTESTED, TWO, "optimizer.type",
     "use AdamW"),
    # offload
    (TENSOR | z("offload_optimizer", CPU, stage=0), TWO, "zero_optimization.offload_optimizer.device",
     "set zero_optimization.stage to 1 or more"),
    (TENSOR | z("offload_optimizer", NVME, stage=1), TWO | {"nvme_path": "{world}"},
     "zero_optimization.offload_optimizer.device", "NVMe needs stage 3"),
    (z("offload_optimizer", {"device": "cpu", "ratio": 0.5}), TWO, "zero_optimization.offload_optimizer.ratio",
     "remove the key to offload everything"),
    (z("offload_optimizer", {"device": "cpu", "super_offload": True}), TWO | {"device": "cuda"},
     "zero_optimization.offload_optimizer.super_offload", "remove the key"),
    (z("zenflow", {"topk_ratio": 0.1}, stage=2), TWO, "zero_optimization.zenflow", "use offload_optimizer alone"),
    # ZeRO++
    (TENSOR | z("zero_hpz_partition_size", 2), FOUR, "zero_optimization.zero_hpz_partition_size", "Remove the key"),
    (TENSOR | z("zero_quantized_weights", True), FOUR | {"device": "cuda"},
     "zero_optimization.zero_quantized_weights", "remove the key"),
    (SEQUENCE | z("zero_quantized_gradients", True), TWO | {"device": "cuda"},
     "zero_optimization.zero_quantized_gradients", "remove the key"),
    (z("zero_quantized_weights", True), TWO, "zero_optimization.zero_quantized_weights", "need CUDA"),
    (z("zero_quantized_weights", True), {"world_size": 128, "device": "cuda", "model": "gpt2"},
     "zero_optimization.zero_quantized_weights", "pad the vocabulary"),
    (z("zero_hpz_partition_size", 3), FOUR, "zero_optimization.zero_hpz_partition_size", "a divisor of the 4 ranks"),
    # flags
    (SEQUENCE, TWO | {"compile_blocks": True}, "--compile_blocks", "leave --compile_blocks out"),
    (SEQUENCE, TWO | {"noise_scale_interval": 2, "gradient_accumulation_steps": 4}, "--noise_scale_interval",
     "shard of each micro-batch"),
    # other features
    ({"compile": {"deepcompile": True}}, TWO | {"device": "cuda"}, "compile.deepcompile", "use --compile_blocks"),
    ({"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}, TWO,
     "data_efficiency.data_sampling.curriculum_learning", "--seq_length_schedule"),
    (TENSOR | STAGES | {"wall_clock_breakdown": True}, FOUR, "wall_clock_breakdown", "DeepSpeed's timers crash"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    (folder / "grouped.json").write_text(json.dumps(GROUPED))
    (folder / "mixture.json").write_text(json.dumps(MIXTURE))
    return folder


@pytest.mark.parametrize(("changes", "flags", "key", "remedy"), REJECTED, ids=lambda value: value.replace(
    " ", "_") if isinstance(value, str) else "")
def test_the_combination_is_rejected_in_one_line(world: Path, capsys: pytest.CaptureFixture[str], key: str, remedy: str,
                                                 changes: dict[str, Any], flags: dict[str, Any]) -> None:
    line = rejection(words(world, changes, flags), capsys)
    assert line.startswith(f"{key}: ") if key.startswith("--") else f": {key}: " in line[:300], line
    assert remedy.lower() in line.lower()
