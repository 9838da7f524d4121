"""Every file of ds_configs/ trains two steps with standard flags, on the number of ranks in its line `// ranks: N`."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import NO_NVME, case, flags
from tests.support.launch import ROOT, run_cases

FILES = sorted((ROOT / "ds_configs").glob("*.json"))
EXPERTS = {"model": "tiny-moe", "model_overrides": "vocab_size=256"}


def ranks_of(path: Path) -> int:
    match = re.search(r"//\s*ranks:\s*(\d+)", path.read_text())
    assert match, f"{path.name} has no line `// ranks: N`"
    return int(match.group(1))


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ds_configs")
    (folder / "swap").mkdir()
    found = {}
    for ranks in sorted({ranks_of(path) for path in FILES}):
        cases = [case(path.stem, "two_steps", str(path), {
                     **flags(corpus, steps=2, micro_batch_size=2, gradient_accumulation_steps=4, learning_rate=1e-3,
                             emulate_fp16="fp16" in path.stem), **(EXPERTS if "experts" in path.stem else {})})
                 for path in FILES if ranks_of(path) == ranks and not (NO_NVME and "nvme" in path.stem)]
        found.update(run_cases(cases, ranks, folder / str(ranks),
                               environ={"DS_PRETRAIN_NVME_PATH": str(folder / "swap")}))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trains_two_steps(path: Path, results: dict[str, dict[str, Any]]) -> None:
    if NO_NVME and "nvme" in path.stem:
        pytest.skip(f"NVMe offload: {NO_NVME}")
    row = results[path.stem]
    assert len(row["loss"]) == 2
    assert all(abs(loss - row["before"]) < 0.1 * row["before"] for loss in row["loss"]), row["loss"]
    assert all(0 < norm < 100 for norm in row["grad_norm"]), row["grad_norm"]
    assert row["skipped"][-1] == 0
    zero_stage = re.search(r"zero(\d)", path.stem)
    assert zero_stage is None or row["stage"] == int(zero_stage.group(1))
    assert row["stages"] == int((re.search(r"pipeline(\d)", path.stem) or [0, 1])[1])
    assert row["precision"] in path.stem or "16" not in path.stem


def test_each_layout_has_a_file() -> None:
    text = " ".join(path.stem for path in FILES)
    for word in ("zero0", "zero1", "zero2", "zero3", "fp16", "fp32", "static", "offload_optimizer_cpu",
                 "offload_all_cpu", "offload_optimizer_nvme", "offload_all_nvme", "pipeline2", "pipeline4",
                 "fp32_accumulation", "activation_checkpointing", "tensor2_zero1", "tensor2_zero3",
                 "tensor2_pipeline2", "experts2_zero2"):
        assert word in text, word
    assert len(FILES) >= 24
