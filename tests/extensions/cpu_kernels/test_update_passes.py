"""Passes over the gradients between backward pass and Adam: the same updates as with DeepSpeed's passes, in fewer."""

import math
from pathlib import Path
from typing import Any

import pytest

from pretrain.extensions.cpu_kernels.library import has_library
from tests.support.cases import CPU, case, config, flags, fused
from tests.support.launch import run_worker

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")
WORKER = str(Path(__file__).parent / "workers" / "update_worker.py")
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
JSONS: dict[str, dict[str, Any]] = {  # with one rank
    "zero1": config(1, precision="bf16"), "zero2": config(2, precision="bf16"), "zero3": config(3, precision="bf16"),
    "zero1_overlap": config(1, precision="bf16", overlap_comm=True), "zero1_fp32": config(1),
    "zero2_sums": {**config(2, precision="bf16"), **FP32_SUMS},
    "zero1_offload": config(1, precision="bf16", offload_optimizer=CPU),
    "zero1_unclipped": {**config(1, precision="bf16", accumulation=1), "gradient_clipping": 0.0},
    "stage0": config(0), "stage0_bf16": config(0, precision="bf16", accumulation=1),
    "stage0_sums": config(0, precision="bf16"),
}
TWO_RANKS = {"zero1": config(1, precision="bf16"), "zero2": config(2, precision="bf16", overlap_comm=True),
             "pipeline": config(1, precision="bf16", stages=2)}
READS: dict[str, dict[str, Any]] = {  # with two ranks; the pipeline stages share a matrix
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


def cases_of(jsons: dict[str, dict[str, Any]], corpus: str, plain: str) -> list[dict[str, Any]]:
    """Return each case twice: with this project's passes and reads, and with those of DeepSpeed that `plain` names."""
    given = flags(corpus, layers=2, steps=4, lr_schedule="constant", lr_warmup_steps=0)
    return [case(f"{name}_{each}", "train", values, given | ({"emulate_fp16": True} if "fp16" in values else {}),
                 plain=each) for name, values in jsons.items() for each in ("", plain)]


@pytest.fixture(scope="module")
def one_rank(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_worker(WORKER, cases_of(JSONS, corpus, "passes"), 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = cases_of(TWO_RANKS, corpus, "passes") + cases_of(READS, corpus, "reads")
    return run_worker(WORKER, cases, 2, tmp_path_factory.mktemp("two"))


def check_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["skipped"] == plain["skipped"] == 1  # the step with an infinite loss
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-6, nan_ok=True)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5, nan_ok=True)
    assert len({*ours["losses"]}) > 2  # the updates have an effect


@pytest.mark.parametrize("name", JSONS)
def test_updates_on_one_rank_are_those_of_deepspeed(name: str, one_rank: dict[str, Any]) -> None:
    check_equal(one_rank[f"{name}_"], one_rank[f"{name}_passes"])


@pytest.mark.parametrize("name", TWO_RANKS)
def test_updates_on_two_ranks_are_those_of_deepspeed(name: str, two_ranks: dict[str, Any]) -> None:
    check_equal(two_ranks[f"{name}_"], two_ranks[f"{name}_passes"])


@pytest.mark.parametrize("name", ["zero1_unclipped", "stage0", "stage0_bf16", "stage0_sums"])
def test_states_are_equal_bit_by_bit(name: str, one_rank: dict[str, Any]) -> None:
    """With clipping, ZeRO's factor depends on the last bit of the norm, whose summands have another order."""
    assert one_rank[f"{name}_"]["state"] == one_rank[f"{name}_passes"]["state"]


@pytest.mark.parametrize("name", READS)
def test_fewer_reads_from_the_device_change_no_bit(name: str, two_ranks: dict[str, Any]) -> None:
    ours, plain = two_ranks[f"{name}_"], two_ranks[f"{name}_reads"]
    assert ours["skipped"] == plain["skipped"] == 1
    assert [math.isfinite(norm) for norm in ours["norms"]] == [True, True, False, True]
    for key in ("losses", "norms", "state"):
        assert repr(ours[key]) == repr(plain[key])  # equal NaN


def test_stage_0_copies_no_gradients_on_one_rank(one_rank: dict[str, Any]) -> None:
    """If the second line fails, DeepSpeed copies none either: delete parts of patches/host_time.py."""
    ours, plain = (one_rank[f"stage0_{plain}"]["passes"].get("copy_", 0) for plain in ("", "passes"))
    assert ours < 0.01
    assert plain >= 1


@pytest.mark.parametrize("name", ["stage0_bf16", "stage0_sums"])
def test_bf16_at_stage_0_has_the_norms_of_deepspeed_in_one_operator(name: str, one_rank: dict[str, Any]) -> None:
    """If DeepSpeed makes none for each gradient, delete parts of patches/host_reads.py and host_time.py."""
    ours, plain = one_rank[f"{name}_"], one_rank[f"{name}_passes"]
    for operator in ("linalg_vector_norm", "add_"):
        assert ours["passes"].get(operator, 0) + 0.99 < plain["passes"][operator], operator
    assert repr(ours["norms"]) == repr(plain["norms"])  # equal NaN


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_deepspeed_still_needs_more_passes(name: str, one_rank: dict[str, Any]) -> None:
    """If this fails, delete parts of patches/zero.py, gradient_passes.py, or patches/host_time.py (slice)."""
    plain, ours = one_rank[f"{name}_passes"]["passes"], one_rank[f"{name}_"]["passes"]
    assert ours["copy_"] == pytest.approx(2, rel=0.02)  # two tensors: the weights, and their master weights
    assert plain["copy_"] >= 2 * 3  # also gradients: into a bucket, and out of it
    assert {"div_", "amax", "amin", "linalg_vector_norm", "mul_"} <= plain.keys()
    for operator in ("div_", "amax", "amin", "linalg_vector_norm", "mul_", "_to_copy", "slice"):
        assert ours.get(operator, 0) < 0.01 <= plain[operator], operator
