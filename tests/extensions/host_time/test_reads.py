"""Values that DeepSpeed reads from the device in a step, with and without this extension; collectives over one rank."""

from typing import Any

import pytest

from pretrain.distributed.requirements import deepspeed_version, is_at_least
from tests.support.cases import case, flags
from tests.support.launch import ROOT, run_worker
from tests.support.traffic_layouts import (
    CONFIGS,
    FLAGS,
    MASKED,
    MASKED_CONFIGS,
    RANKS,
    SHARED_CONFIGS,
    reads,
    shared_flags,
)

IN_PAGE = ("zero0_bf16", "zero0_fp16", "zero1", "zero1_masked", "zero2", "zero2_offload", "zero3", "pipeline2",
           "pipeline2_masked", *SHARED_CONFIGS)
# values of a step: the norms of all gradients, those of two groups over the ranks, and the total
DEEPSPEED_READS = {"zero0_fp32": 0, "zero2_offload": 4}
PLAIN = "host_time late_skip"  # see update_worker.py
PLAIN_READS = {"zero0_bf16": 2, "zero0_fp16": 103, "zero1": 4, "zero2_offload": 106}
LAYOUTS = {name: values for name, values in (CONFIGS | MASKED_CONFIGS | SHARED_CONFIGS).items()
           if name in (*IN_PAGE, "zero0_fp32", "zero1_fp32_accumulation", "zero3_fp32")}


@pytest.fixture(scope="module")
def measured(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the counts of the second step, for each case and rank."""
    folder = tmp_path_factory.mktemp("reads")

    def flags_of(name: str) -> dict[str, Any]:
        if name in SHARED_CONFIGS:
            return shared_flags(name, corpus, folder)
        return flags(corpus, **FLAGS, **(MASKED if "masked" in name else {}),
                     **({"emulate_fp16": True} if "fp16" in name else {}))

    cases = [case(name, "", values, flags_of(name)) for name, values in LAYOUTS.items()]
    cases += [{**each, "name": f"{each['name']}_plain", "plain": PLAIN}
              for each in cases if each["name"] in PLAIN_READS]
    return run_worker("traffic_worker.py", cases, RANKS, folder)


def deepspeed_reads(rank: dict[str, Any]) -> int:
    """Return the number of values that DeepSpeed reads, or this extension instead."""
    return reads(rank, "deepspeed/") + rank["reads"].get("pretrain/extensions/host_time/reads.py", 0)


@pytest.mark.skipif(not is_at_least("0.19.8"), reason="older versions keep their reads")
@pytest.mark.parametrize("name", LAYOUTS)
def test_deepspeed_reads_the_norm_once_or_never(name: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """With torch's fused AdamW, the device decides whether the update is skipped (engine/patches/late_skip.py)."""
    expected = 0 if "fused" in LAYOUTS[name]["optimizer"]["params"] else DEEPSPEED_READS.get(name, 1)
    assert {deepspeed_reads(rank) for rank in measured[name]} == {expected}


@pytest.mark.parametrize("name", PLAIN_READS)
@pytest.mark.skipif(not is_at_least("0.19.8"), reason="older versions read other values")
def test_deepspeed_still_reads_more(name: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """If this fails, DeepSpeed reads fewer values: delete parts of reads.py."""
    for rank in measured[f"{name}_plain"]:
        assert deepspeed_reads(rank) == pytest.approx(PLAIN_READS[name], abs=6)  # ranks own different parameters


@pytest.mark.skipif(str(deepspeed_version()) != "0.19.8", reason="the file has the counts of DeepSpeed 0.19.8")
def test_the_counts_are_those_of_the_measurements(measured: dict[str, list[dict[str, Any]]]) -> None:
    rows = [f"{name},{rank['collectives']},{rank['small']},{deepspeed_reads(rank)},{reads(rank, 'pretrain/')}"
            for name in IN_PAGE for rank in measured[name][:1]]
    assert "\n".join(rows) in (ROOT / "pretrain/pages/measurements/gpu_collectives.csv").read_text(encoding="utf-8")
