"""--fp8: which runs may have it, and what they say about it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.commands.check import plan_lines
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_run
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.extensions.fp8 import extension
from tests.support.cases import config, flags

CPU = Device("cpu", fp16=False, bf16=True, memory_bytes=0)
H100 = Device("cuda", fp16=True, bf16=True, memory_bytes=0, capability=9.0)
A100 = Device("cuda", fp16=True, bf16=True, memory_bytes=0, capability=8.0)
DEGREES = {"pipeline": {"pipeline": {"stages": 2}}, "sequence": {"sequence_parallel_size": 2},
           "tensor": {"tensor_parallel": {"autotp_size": 2}}}


@pytest.fixture
def plan_of(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(extension, "find_spec", lambda name: name)
    monkeypatch.setattr(extension, "version", lambda name: "2.13")

    def plan(device: Device, changes: dict[str, Any] | None = None, **more: Any) -> Plan:
        (tmp_path / "ds.json").write_text(json.dumps(config(1, precision="bf16") | (changes or {})))
        given = {"deepspeed_config": tmp_path / "ds.json", "save": tmp_path / "run", **flags(corpus), "fp8": "rowwise",
                 **more}
        return check_run(parse_arguments([f"--{name}={value}" for name, value in given.items()]), world_size=2,
                         device=device)

    return plan


def test_it_needs_a_gpu_with_capability_8_9_and_is_emulated_on_cpus(plan_of: Any) -> None:
    plan = plan_of(H100)
    assert plan.layout.model_extensions == ("fp8",)
    assert any("without --compile_blocks" in note for note in plan.notes)
    assert any("FP8 (rowwise)" in line for line in plan_lines(plan))
    assert not any("--fp8" in note for note in plan_of(H100, compile_blocks=True).notes)
    assert any("emulated" in note for note in plan_of(CPU).notes)
    with pytest.raises(ConfigError, match="--fp8: this GPU has no products in FP8"):
        plan_of(A100)


@pytest.mark.parametrize(("degree", "is_accepted"), [("pipeline", True), ("sequence", True), ("tensor", False)])
def test_the_degrees_of_the_page(degree: str, is_accepted: bool, plan_of: Any) -> None:
    if is_accepted:
        assert plan_of(H100, DEGREES[degree]).layout.model_extensions
    else:
        with pytest.raises(ConfigError, match="--fp8: found"):
            plan_of(H100, DEGREES[degree])
