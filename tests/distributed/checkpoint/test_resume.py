"""A run that resumes in the same layout equals the uninterrupted run bit for bit: losses, weights, optimizer states."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CPU, DROPOUT, NO_NVME, case, config, flags, nvme, nvme_param
from tests.support.launch import run_cases
from tests.support.layouts import HAS_EXPERTS, MODEL_WITH_EXPERTS, TENSOR2, experts2, sequence2, tensor2

BF16 = {"precision": "bf16"}
# by number of ranks; a model with experts, or other flags, by the name of the layout
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"fp32_zero0": config(0), "zero1": config(1, **BF16), "zero3": config(3, **BF16),
        "zero2_cpu": config(2, **BF16, offload_optimizer=CPU),
        "tensor2_zero3": tensor2(3, **BF16), "sequence2_zero3": sequence2(3, **BF16),
        "experts2_zero2": experts2(2, **BF16), "seq_length_schedule": config(1, **BF16, stages=2),
        "fp16_pipeline2_zero0": config(0, precision="fp16", stages=2), "fp16_zero2": config(2, precision="fp16")},
    4: {"pipeline2_data2": config(1, **BF16, stages=2), "zero3_hpz2": config(3, **BF16, zero_hpz_partition_size=2),
        "tensor2_pipeline2": tensor2(1, **BF16, stages=2)},
}
SLOW: dict[int, dict[str, dict[str, Any]]] = {
    2: {"zero0": config(0, **BF16), "zero2": config(2, **BF16), "pipeline2_zero0": config(0, **BF16, stages=2),
        "pipeline2_zero1": config(1, stages=2),
        "zero3_cpu": config(3, **BF16, offload_optimizer=CPU, offload_param=CPU),
        "tensor2_zero0": tensor2(0, **BF16), "tensor2_zero1": tensor2(1), "tensor2_zero2": tensor2(2),
        "tensor2_zero2_cpu": tensor2(2, offload_optimizer=CPU),
        "sequence2_zero0": sequence2(0), "sequence2_zero1": sequence2(1), "sequence2_zero2": sequence2(2),
        "experts2_zero1": experts2(1), "experts2_zero3": experts2(3, **BF16),
        "experts2_zero2_cpu": experts2(2, offload_optimizer=CPU),
        **{f"experts2_tensor2_zero{stage}": {**experts2(stage, **BF16), **TENSOR2} for stage in (1, 2, 3)}},
    4: {"tensor2_data2_zero2": tensor2(2, **BF16), "tensor2_data2_zero3": tensor2(3),
        "tensor2_pipeline2_zero0": tensor2(0, stages=2), "sequence2_data2_zero1": sequence2(1),
        "sequence2_data2_zero3": sequence2(3), "experts2_data2_zero1": experts2(1, **BF16),
        "experts2_tensor2_pipeline2": {**experts2(1, **BF16, stages=2), **TENSOR2},
        "experts2_pipeline2": experts2(1, stages=2), "experts2_tensor2_data2_zero3": {**experts2(3), **TENSOR2},
        "experts4_zero2": {**experts2(2), "expert_parallel": {"enabled": True, "autoep_size": 4}}},
}


def _on_nvme(swap: Path) -> dict[str, dict[str, Any]]:
    disk, params = {"offload_optimizer": nvme(swap)}, {"offload_param": nvme_param(swap)}
    return {} if NO_NVME else {"nvme": config(3, **BF16, **disk), "wide_nvme": config(3, **BF16, **disk, **params),
                               "wide_nvme_param": config(3, **BF16, offload_optimizer=CPU, **params)}


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["", "more"])
def test_resume_is_bit_exact(layouts: dict[int, dict[str, dict[str, Any]]], corpus: str, tmp_path: Path,
                             subtests: pytest.Subtests) -> None:
    (tmp_path / "swap").mkdir()
    (tmp_path / "experts.json").write_text(json.dumps(MODEL_WITH_EXPERTS))
    small = flags(corpus, overrides=DROPOUT, steps=6)

    def flags_of(name: str) -> dict[str, Any]:
        if name.startswith("experts"):
            overrides = "attention_dropout=0.1" + ",num_experts=8" * name.startswith("experts4")
            return {**flags(corpus, steps=6), "model": str(tmp_path / "experts.json"), "model_overrides": overrides}
        if name.startswith("wide"):  # only sub-groups of more than 1 MiB are swapped
            return flags(corpus, overrides=DROPOUT, steps=6, hidden=256)
        if name == "seq_length_schedule":
            return {**small, "seq_length_schedule": "0:16,2048:32,4096:64"}  # a step has 1024 tokens
        return {**small, "emulate_fp16": name.startswith("fp16")}

    for ranks, own in layouts.items():
        own = {name: layout for name, layout in own.items() if HAS_EXPERTS or not name.startswith("experts")}
        values = {**own, **(_on_nvme(tmp_path / "swap") if layouts is LAYOUTS and ranks == 2 else {})}
        results = run_cases([case(name, "resume", layout, flags_of(name)) for name, layout in values.items()], ranks,
                            tmp_path / str(ranks))
        assert results.keys() == values.keys()
        for name, result in results.items():
            with subtests.test(name):
                _check_bit_exact(result)


def _check_bit_exact(result: dict[str, Any]) -> None:
    at_save, loaded, at_end, resumed_end = result["state"]
    assert loaded == at_save, "the load changed weights or optimizer state"
    assert result["resumed"] == result["tail"], "losses, norms or rates differ after the resume"
    assert resumed_end == at_end, "weights or optimizer state differ at the end"
    assert at_end != at_save, "nothing was trained after the checkpoint"
    assert len(set(result["tail"]["loss"])) == 3
    for files in result["read_files"]:
        assert files, "the rank loaded nothing"
        assert len(files) == len(set(files)), "the rank read a file twice"
