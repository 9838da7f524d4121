"""Updates with fewer passes over the parameters and fewer reads from the device: those of DeepSpeed, bit by bit."""

import math
from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags, fused
from tests.support.launch import run_worker

PLAIN = "host_time late_skip"  # see update_worker.py
LATE = "host_time"  # without the extension, the device decides about skipped updates
ONE_RANK: dict[str, dict[str, Any]] = {
    "stage0": config(0), "stage0_bf16": config(0, precision="bf16", accumulation=1),
    "stage0_sums": config(0, precision="bf16"), "zero1": config(1, precision="bf16"),
    "zero2": config(2, precision="bf16")}
TWO_RANKS: dict[str, dict[str, Any]] = {  # the pipeline stages share a matrix
    "zero0_bf16": config(0, precision="bf16"), "zero0_bf16_pipeline": config(0, precision="bf16", stages=2),
    "zero0_fp16": config(0, precision="fp16"), "zero1_fp16": config(1, precision="fp16"), "zero1_fp32": config(1),
    "zero2_offload": config(2, precision="bf16", offload_optimizer=CPU),
    "pipeline_fp16": config(1, precision="fp16", stages=2),
    "pipeline_offload": config(1, precision="bf16", stages=2, offload_optimizer=CPU),
    **{f"zero{stage}_fused": fused(config(stage, precision="bf16")) for stage in (0, 1, 2, 3)},
    "pipeline_fused": fused(config(1, precision="bf16", stages=2)), "zero1_fp32_fused": fused(config(1)),
    "zero0_fp16_fused": fused(config(0, precision="fp16")),
    "zero0_sequence_fused": fused(config(0, precision="bf16")) | {"sequence_parallel_size": 2},
}
FUSED = [name for name in TWO_RANKS if name.endswith("fused") and "fp16" not in name]


def cases_of(jsons: dict[str, dict[str, Any]], corpus: str) -> list[dict[str, Any]]:
    """Return each case twice: with this extension, and with DeepSpeed's functions."""
    given = flags(corpus, layers=2, steps=4, lr_schedule="constant", lr_warmup_steps=0)
    return [case(f"{name}_{plain}", "train", values, given | ({"emulate_fp16": True} if "fp16" in values else {}),
                 plain=plain) for name, values in jsons.items()
            for plain in ("", PLAIN, *([LATE] if name in FUSED else []))]


@pytest.fixture(scope="module")
def one_rank(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_worker("update_worker.py", cases_of(ONE_RANK, corpus), 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_worker("update_worker.py", cases_of(TWO_RANKS, corpus), 2, tmp_path_factory.mktemp("two"))


def check_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    """Compare all bits. Gradients of one step are infinite."""
    assert ours["skipped"] == plain["skipped"] == 1
    assert [math.isfinite(norm) for norm in ours["norms"]] == [True, True, False, True]
    for key in ("losses", "norms", "state"):
        assert repr(ours[key]) == repr(plain[key])  # equal NaN


@pytest.mark.parametrize("name", ONE_RANK)
def test_fewer_passes_on_one_rank_change_no_bit(name: str, one_rank: dict[str, Any]) -> None:
    check_equal(one_rank[f"{name}_"], one_rank[f"{name}_{PLAIN}"])


@pytest.mark.parametrize("name", TWO_RANKS)
def test_fewer_reads_from_the_device_change_no_bit(name: str, two_ranks: dict[str, Any]) -> None:
    check_equal(two_ranks[f"{name}_"], two_ranks[f"{name}_{PLAIN}"])


@pytest.mark.parametrize("name", FUSED)
def test_the_device_skips_updates_without_the_extension(name: str, two_ranks: dict[str, Any]) -> None:
    check_equal(two_ranks[f"{name}_{LATE}"], two_ranks[f"{name}_{PLAIN}"])


def test_stage_0_copies_no_gradients_on_one_rank(one_rank: dict[str, Any]) -> None:
    """If the second line fails, DeepSpeed copies none either: delete parts of passes.py."""
    ours, plain = (one_rank[f"stage0_{plain}"]["passes"].get("copy_", 0) for plain in ("", PLAIN))
    assert ours < 0.01
    assert plain >= 1


@pytest.mark.parametrize("name", ["stage0_bf16", "stage0_sums"])
def test_bf16_at_stage_0_computes_the_norms_in_one_operator(name: str, one_rank: dict[str, Any]) -> None:
    """If DeepSpeed calls none for each gradient, delete parts of reads.py and passes.py."""
    ours, plain = one_rank[f"{name}_"]["passes"], one_rank[f"{name}_{PLAIN}"]["passes"]
    for operator in ("linalg_vector_norm", "add_"):
        assert ours.get(operator, 0) + 0.99 < plain[operator], operator


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_does_not_place_the_parameters_in_each_step(name: str, one_rank: dict[str, Any]) -> None:
    """If this fails, DeepSpeed does not either: delete parts of passes.py."""
    ours, plain = one_rank[f"{name}_"]["passes"], one_rank[f"{name}_{PLAIN}"]["passes"]
    assert ours.get("slice", 0) < 0.01 <= plain["slice"]
