"""Changes between parallel layouts with other precisions, optimizers, offload and uneven parts. All are slow tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.convert.diff import diff
from tests.distributed.checkpoint.test_layouts import (
    FP32_SUMS,
    LION,
    NO_NVME,
    SGD,
    TORCH_ADAM,
    _with,
)
from tests.support.cases import CPU, case, flags, nvme
from tests.support.layouts import (
    MODEL_WITH_EXPERTS,
    SAVED,
    STEPS,
    dp2,
    experts2,
    fp16,
    pp2,
    relative_difference,
    run_layouts,
    sequence2,
    tensor2,
)

UNEVEN = {"model_type": "llama", "vocab_size": 251, "hidden_size": 64, "intermediate_size": 162,
          "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
          "tie_word_embeddings": False}
MODELS = {"uneven": UNEVEN, "experts": MODEL_WITH_EXPERTS}
pytestmark = pytest.mark.slow


def _bf16(layout: Any, stage: int) -> dict[str, Any]:
    values: dict[str, Any] = layout(stage, precision="bf16")
    return values


# name -> JSON of the run that saves, JSON of the run that loads, allowed relative difference of the losses
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "uneven_to_data": (tensor2(1), dp2(3), 1e-5),
    "uneven_from_data": (dp2(2), tensor2(3), 1e-5),
    "uneven_to_other_stage": (tensor2(0), tensor2(2), 1e-5),
    "tensor2_bf16_fp32_sums": (_with(_bf16(tensor2, 1), **FP32_SUMS), dp2(2), 5e-3),
    "tensor2_fp16": (fp16(tensor2(2)), fp16(pp2(1)), 3e-3),
    "fp16_to_tensor2": (fp16(pp2(0)), fp16(tensor2(3)), 3e-3),
    "tensor2_fp16_stage0": (fp16(tensor2(0)), fp16(dp2(2)), 3e-3),
    "tensor2_fp16_unfused": (fp16(_with(tensor2(0), **TORCH_ADAM)), fp16(_with(dp2(2), **TORCH_ADAM)), 3e-3),
    "tensor2_cpu": (tensor2(2, offload_optimizer=CPU), pp2(1), 1e-5),
    "tensor2_lion": (_with(tensor2(2, offload_optimizer=CPU), **LION),
                     _with(pp2(1, offload_optimizer=CPU), **LION), 1e-5),
    "tensor2_sgd": (_with(tensor2(0), **SGD), _with(dp2(2), **SGD), 1e-5),
    "tensor2_round_robin": (tensor2(2, round_robin_gradients=True), sequence2(1), 1e-5),
    "sequence2_stage0": (sequence2(0), dp2(1), 1e-5),
    "sequence2_bf16_stage0": (_bf16(sequence2, 0), _bf16(pp2, 0), 5e-3),
    "to_sequence2_stage0": (dp2(1), sequence2(0), 1e-5),
    "experts2_bf16": (_bf16(experts2, 2), _bf16(dp2, 3), 5e-3),
    "experts2_bf16_fp32_sums": (_with(_bf16(experts2, 1), **FP32_SUMS), _bf16(experts2, 2), 5e-3),
    "experts2_cpu": (experts2(2, offload_optimizer=CPU), experts2(3), 1e-5),
    "experts2_round_robin": (experts2(2, round_robin_gradients=True), dp2(2), 1e-5),
    "experts2_fp16": (fp16(experts2(2)), fp16(dp2(2)), 5e-3),
    "experts2_sub_groups": (experts2(3, sub_group_size=3000), dp2(1), 1e-5),
}


def test_a_run_resumes_after_a_change(corpus: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    changes = dict(CHANGES)
    if not NO_NVME:
        (tmp_path / "swap").mkdir()
        disk = nvme(tmp_path / "swap")
        changes |= {"tensor2_nvme": (tensor2(3, offload_optimizer=disk), dp2(1), 1e-5),
                    "to_tensor2_nvme": (dp2(1), tensor2(3, offload_optimizer=disk), 1e-5)}

    def two_rank_case(name: str, job: str, values: dict[str, Any], **others: Any) -> tuple[int, dict[str, Any]]:
        run_flags = flags(corpus, steps=STEPS, emulate_fp16="fp16" in values)
        for kind, model in MODELS.items():
            if name.startswith(kind):
                (tmp_path / f"{kind}.json").write_text(json.dumps(model))
                run_flags |= {"model": str(tmp_path / f"{kind}.json"),
                              "model_overrides": f"vocab_size={model['vocab_size']}"}
        return 2, case(name, job, values, run_flags, saved_step=SAVED, **others)

    saved = run_layouts({name: two_rank_case(name, "train_and_save", before)
                         for name, (before, _, _) in changes.items()}, tmp_path / "before")
    loaded = run_layouts({name: two_rank_case(name, "resume", after, source=saved[name]["folder"])
                          for name, (_, after, _) in changes.items()}, tmp_path / "after")
    for name, (_, _, within) in changes.items():
        with subtests.test(name):
            assert diff(Path(saved[name]["folder"]), Path(loaded[name]["folder"])) == []
            assert relative_difference(loaded[name]["after"]["loss"], saved[name]["after"]["loss"]) <= within
            assert all(saved[name]["finite"]["nothing"])
