"""A run that resumes in the same layout equals the uninterrupted run bit for bit: losses, weights, optimizer states."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.engine.build_ops import why_not_compilable
from tests.support.cases import CPU, DROPOUT, case, config, flags, nvme, nvme_param
from tests.support.launch import run_cases
from tests.support.layouts import MODEL_WITH_EXPERTS, experts2, sequence2, tensor2

NO_NVME = why_not_compilable("AsyncIOBuilder")


def _with_experts(corpus: str, folder: Path) -> dict[str, Any]:
    """Return the flags of a model with experts and dropout."""
    path = folder / "experts.json"
    path.write_text(json.dumps(MODEL_WITH_EXPERTS))
    return {**flags(corpus, steps=6), "model": str(path), "model_overrides": "attention_dropout=0.1"}


def _cases(corpus: str, swap: Path, ranks: int) -> list[dict[str, Any]]:
    small = flags(corpus, overrides=DROPOUT, steps=6)
    wide = flags(corpus, overrides=DROPOUT, steps=6, hidden=256)  # only sub-groups of more than 1 MiB are swapped
    if ranks == 4:
        return [case("pipeline2_data2", "resume", config(1, precision="bf16", stages=2), small),
                case("zero3_hpz2", "resume", config(3, precision="bf16", zero_hpz_partition_size=2), small),
                case("tensor2_pipeline2", "resume", tensor2(1, precision="bf16", stages=2), small)]
    layouts = {
        "fp32_zero0": config(0), "zero0": config(0, precision="bf16"), "zero1": config(1, precision="bf16"),
        "zero2": config(2, precision="bf16"), "zero3": config(3, precision="bf16"),
        "zero2_cpu": config(2, precision="bf16", offload_optimizer=CPU),
        "zero3_cpu": config(3, precision="bf16", offload_optimizer=CPU, offload_param=CPU),
        "pipeline2_zero0": config(0, precision="bf16", stages=2), "pipeline2_zero1": config(1, stages=2),
        "tensor2_zero1": tensor2(1), "tensor2_zero3": tensor2(3, precision="bf16"),
        "sequence2_zero3": sequence2(3, precision="bf16"),
    }
    cases = [case(name, "resume", values, small) for name, values in layouts.items()]
    cases.append(case("experts2_zero2", "resume", experts2(2, precision="bf16"), _with_experts(corpus, swap)))
    lengths = {**small, "seq_length_schedule": "0:16,2048:32,4096:64"}  # a step has 1024 tokens
    cases.append(case("seq_length_schedule", "resume", config(1, precision="bf16", stages=2), lengths))
    cases += [case(name, "resume", config(stage, precision="fp16", stages=stages), {**small, "emulate_fp16": True})
              for name, stage, stages in (("fp16_pipeline2_zero0", 0, 2), ("fp16_zero2", 2, 1))]
    if not NO_NVME:
        disk = nvme(swap)
        offloads = {"nvme_optimizer": {"offload_optimizer": disk},
                    "nvme_all": {"offload_optimizer": disk, "offload_param": nvme_param(swap)},
                    "nvme_param_cpu_optimizer": {"offload_optimizer": CPU, "offload_param": nvme_param(swap)}}
        cases += [case(f"zero3_{name}{size}", "resume", config(3, precision="bf16", **offload), run_flags)
                  for name, offload in offloads.items() for size, run_flags in (("", small), ("_wide", wide))
                  if size or name == "nvme_optimizer"]
    return cases


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "swap").mkdir()
    found = {}
    for ranks in (2, 4):
        found.update(run_cases(_cases(corpus, folder / "swap", ranks), ranks, folder / str(ranks)))
    return found


def test_resume_is_bit_exact(results: dict[str, dict[str, Any]], subtests: pytest.Subtests) -> None:
    assert len(results) >= 16
    _check_bit_exact(results, subtests)


@pytest.mark.slow
def test_resume_of_more_parallel_layouts_is_bit_exact(corpus: str, tmp_path: Path,
                                                      subtests: pytest.Subtests) -> None:
    small = flags(corpus, overrides=DROPOUT, steps=6)
    two = {"tensor2_zero0": tensor2(0), "tensor2_zero0_bf16": tensor2(0, precision="bf16"),
           "tensor2_zero1_bf16": tensor2(1, precision="bf16"), "tensor2_zero2": tensor2(2),
           "tensor2_zero2_cpu": tensor2(2, offload_optimizer=CPU),
           "sequence2_zero0": sequence2(0), "sequence2_zero1": sequence2(1), "sequence2_zero2": sequence2(2)}
    four = {"tensor2_data2_zero1": tensor2(1), "tensor2_data2_zero2": tensor2(2, precision="bf16"),
            "tensor2_data2_zero3": tensor2(3), "tensor2_pipeline2_zero0": tensor2(0, stages=2),
            "sequence2_data2_zero1": sequence2(1), "sequence2_data2_zero3": sequence2(3)}
    two |= {"experts2_zero1": experts2(1), "experts2_zero3": experts2(3, precision="bf16"),
            "experts2_zero2_cpu": experts2(2, offload_optimizer=CPU)}
    four |= {"experts2_data2_zero1": experts2(1, precision="bf16"), "experts2_data2_zero2": experts2(2),
             "experts4_zero2": {**experts2(2), "expert_parallel": {"enabled": True, "autoep_size": 4}}}
    with_experts = _with_experts(corpus, tmp_path)
    eight = {**with_experts, "model_overrides": "num_experts=8,attention_dropout=0.1"}
    for ranks, layouts in ((2, two), (4, four)):
        cases = [case(name, "resume", values, small if "experts" not in name else eight if "experts4" in name
                      else with_experts) for name, values in layouts.items()]
        _check_bit_exact(run_cases(cases, ranks, tmp_path / str(ranks)), subtests)


def _check_bit_exact(results: dict[str, dict[str, Any]], subtests: pytest.Subtests) -> None:
    for name, result in results.items():
        with subtests.test(name):
            at_save, loaded, at_end, resumed_end = result["state"]
            assert loaded == at_save, "the load changed weights or optimizer state"
            assert result["resumed"] == result["tail"], "losses, norms or rates differ after the resume"
            assert resumed_end == at_end, "weights or optimizer state differ at the end"
            assert at_end != at_save, "nothing was trained after the checkpoint"
            assert len(set(result["tail"]["loss"])) == 3
            for files in result["read_files"]:
                assert files, "the rank loaded nothing"
                assert len(files) == len(set(files)), "the rank read a file twice"


@pytest.mark.skipif(bool(NO_NVME), reason=f"NVMe offload: {NO_NVME}")
def test_nvme_cases_ran(results: dict[str, dict[str, Any]]) -> None:
    assert sum("nvme" in name for name in results) == 4
