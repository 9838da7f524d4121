"""Passes over the gradients between backward pass and Adam: the same updates as with DeepSpeed's passes, in fewer."""

from pathlib import Path
from typing import Any

import pytest

from pretrain.extensions.cpu_kernels.library import has_library
from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_worker

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")
WORKER = str(Path(__file__).parent / "workers" / "update_worker.py")
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
JSONS: dict[str, dict[str, Any]] = {  # on one rank
    "zero1": config(1, precision="bf16"), "zero2": config(2, precision="bf16"), "zero3": config(3, precision="bf16"),
    "zero1_overlap": config(1, precision="bf16", overlap_comm=True), "zero1_fp32": config(1),
    "zero2_sums": {**config(2, precision="bf16"), **FP32_SUMS},
    "zero1_offload": config(1, precision="bf16", offload_optimizer=CPU),
    "zero1_unclipped": {**config(1, precision="bf16", accumulation=1), "gradient_clipping": 0.0},
}
TWO_RANKS = {"zero1": config(1, precision="bf16"), "zero2": config(2, precision="bf16", overlap_comm=True),
             "pipeline": config(1, precision="bf16", stages=2)}


def cases_of(jsons: dict[str, dict[str, Any]], corpus: str) -> list[dict[str, Any]]:
    """Return each case twice: with the passes of extensions, and with those of DeepSpeed."""
    given = flags(corpus, layers=2, steps=4, lr_schedule="constant", lr_warmup_steps=0)
    return [case(f"{name}_{plain}", "train", values, given, plain=plain)
            for name, values in jsons.items() for plain in ("", "all")]


@pytest.fixture(scope="module")
def one_rank(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_worker(WORKER, cases_of(JSONS, corpus), 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_worker(WORKER, cases_of(TWO_RANKS, corpus), 2, tmp_path_factory.mktemp("two"))


def check_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["skipped"] == plain["skipped"] == 1  # the step with an infinite loss
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-6, nan_ok=True)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5, nan_ok=True)
    assert len({*ours["losses"]}) > 2  # the updates have an effect


@pytest.mark.parametrize("name", JSONS)
def test_updates_on_one_rank_are_those_of_deepspeed(name: str, one_rank: dict[str, Any]) -> None:
    check_equal(one_rank[f"{name}_"], one_rank[f"{name}_all"])


@pytest.mark.parametrize("name", TWO_RANKS)
def test_updates_on_two_ranks_are_those_of_deepspeed(name: str, two_ranks: dict[str, Any]) -> None:
    check_equal(two_ranks[f"{name}_"], two_ranks[f"{name}_all"])


def test_states_without_clipping_are_equal_bit_by_bit(one_rank: dict[str, Any]) -> None:
    """With clipping, ZeRO's factor depends on the last bit of the norm, whose summands have another order."""
    assert one_rank["zero1_unclipped_"]["state"] == one_rank["zero1_unclipped_all"]["state"]


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_deepspeed_still_needs_more_passes(name: str, one_rank: dict[str, Any]) -> None:
    """If this fails, delete parts of patches/zero.py, or gradient_passes.py."""
    plain, ours = one_rank[f"{name}_all"]["passes"], one_rank[f"{name}_"]["passes"]
    assert ours["copy_"] == pytest.approx(2, rel=0.02)  # two tensors: the weights, and their master weights
    assert plain["copy_"] >= 2 * 3  # also gradients: into a bucket, and out of it
    assert {"div_", "amax", "amin", "linalg_vector_norm", "mul_"} <= plain.keys()
    for operator in ("div_", "amax", "amin", "linalg_vector_norm", "mul_", "_to_copy"):
        assert ours.get(operator, 0) < 0.01 <= plain[operator], operator
