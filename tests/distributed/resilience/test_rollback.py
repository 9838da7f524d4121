"""A rollback of a running engine equals a fresh resume from the same checkpoint and data position, bit for bit."""

import math
from pathlib import Path
from typing import Any

import pytest

from pretrain.engine.update_guard import VETO
from tests.conftest import selected_params
from tests.support.cases import CPU, DROPOUT, NO_NVME, case, config, flags, nvme, nvme_param
from tests.support.launch import run_worker

LAYOUTS = ["zero1", "zero3", "pipeline2_zero0_fp32", "zero2_fp16", "zero3_nvme"]
RAMP = "0:8,2560:16"  # after the bad steps and the skipped one, sample 40 begins the second stage
SLOW = ["zero0_fp32", "zero0", "zero2", "zero2_cpu", "zero3_cpu", "zero3_nvme_all", "pipeline2_zero0",
        "pipeline2_zero1", "pipeline2_zero1_fp16"]


def _config(name: str, swap: Path) -> dict[str, Any]:
    stages = 2 if "pipeline2" in name else 1
    stage = int(name.partition("zero")[2][0])
    precision = next((word for word in ("fp32", "fp16") if name.endswith(word)), "bf16")
    offload: dict[str, Any] = {}
    if "cpu" in name:
        offload = {"offload_optimizer": CPU, **({"offload_param": CPU} if stage == 3 else {})}
    if "nvme" in name:
        offload = {"offload_optimizer": nvme(swap), **({"offload_param": nvme_param(swap)} if "all" in name else {})}
    values = config(stage, precision=precision, stages=stages, **offload)
    if precision == "fp16":
        values["fp16"]["initial_scale_power"] = 8  # so that the spike is not also an overflow
    return values


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rollback")
    (folder / "swap").mkdir()
    names = [name for name in selected_params(request, "layout") if not (NO_NVME and "nvme" in name)]
    cases = []
    for name in names:
        extra: dict[str, Any] = {"hidden": 256} if "nvme" in name else {}  # only sub-groups above 1 MiB are swapped
        if "fp16" in name:
            extra["emulate_fp16"] = True
        if name == "zero3":
            extra["batch_schedule"] = RAMP
        values = flags(corpus, layers=2, overrides=DROPOUT, steps=20, spike_window=16, spike_policy="skip",
                       rollback_skip_steps=1, **extra)
        cases.append(case(name, "compare", _config(name, folder / "swap"), values))
    return run_worker("rollback_worker.py", cases, 2, folder)


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_rollback_equals_a_fresh_resume(layout: str, results: dict[str, Any]) -> None:
    if NO_NVME and "nvme" in layout:
        pytest.skip(f"NVMe offload: {NO_NVME}")
    result = results[layout]
    print(f"\n{layout}: the process grew by {result['grown_bytes'] / 2**20:.1f} MiB in the rollback")
    assert result["position"] == result["expected"]
    rolled_back, resumed = result["rows"]
    assert rolled_back == resumed
    assert result["hashes"][0] == result["hashes"][1]
    assert result["counters"][0] == result["counters"][1]
    assert result["ranks_agree"]
    assert all(math.isfinite(row[0]) for row in rolled_back)
    assert math.isnan(result["poisoned"][0][0])


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_update_of_a_spike_is_skipped(layout: str, results: dict[str, Any]) -> None:
    if NO_NVME and "nvme" in layout:
        pytest.skip(f"NVMe offload: {NO_NVME}")
    veto = results[layout]["veto"]
    assert veto["loss"] > 100
    assert veto["reason"] == VETO
    assert veto["hashes"][0] == veto["hashes"][1]
