"""The tables of pretrain/pages/layouts.md, and that of the optimizers in recipe.md, agree with the rules."""

import copy
import re
from typing import Any

import pytest

from pretrain.config import layout_rules, run_rules
from pretrain.config.ds_json.optimizers import OPTIMIZERS, divisible_families
from pretrain.config.ds_json.read import DsFile
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.run_rules import check_rules
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from tests.config.test_resolve import MIXTURE
from tests.support.launch import ROOT

CUDA = Device("cuda", fp16=True, bf16=True, memory_bytes=0)
CPU_ONLY = Device("cpu", fp16=False, bf16=True, memory_bytes=0)
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
                        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
DEGREES: dict[str, dict[str, Any]] = {
    "data": {}, "pipeline": {"pipeline": {"stages": 2}}, "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "sequence": {"sequence_parallel_size": 2}, "expert": {"expert_parallel": {"enabled": True, "autoep_size": 2}}}
ROWS = ("data", "pipeline", "tensor", "tensor + pipeline", "sequence", "sequence + pipeline", "sequence + tensor",
        "expert", "expert + pipeline", "expert + tensor", "expert + tensor + pipeline", "expert + sequence")
_CPU = {"device": "cpu"}
# Label -> (ZeRO stages of which one must work, changes of the JSON, flags)
SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "fp16": ((1, 3), {"bf16": {"enabled": False}, "fp16": {"enabled": True}}, {}),
    "fp32": ((1, 3), {"bf16": {"enabled": False}}, {}),
    "gradients accumulated in fp32": ((1, 3), {"data_types": {"grad_accum_dtype": "fp32"}}, {}),
    "optimizer on CPU": ((1, 3), {"zero_optimization": {"offload_optimizer": _CPU}}, {}),
    "parameters on CPU": ((3,), {"zero_optimization": {"offload_optimizer": _CPU, "offload_param": _CPU}}, {}),
    "optimizer on NVMe": ((3,), {"zero_optimization": {"offload_optimizer": {
        "device": "nvme", "nvme_path": "/tmp"}}}, {}),
    "hpZ": ((3,), {"zero_optimization": {"zero_hpz_partition_size": 2}}, {}),
    "quantized weights or gradients": ((3,), {"zero_optimization": {"zero_quantized_weights": True}}, {}),
    "Muon": ((1, 2), {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, {}),
    "8-bit AdamW": ((1, 3), {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3}}}, {}),
    "recomputation": ((1, 3), {"pipeline": {"activation_checkpoint_interval": 1}}, {}),
    "`--compile_blocks`": ((1, 3), {}, {"compile_blocks": True}),
    "`--document_attention`": ((1, 3), {}, {"document_attention": True}),
    "`--adaptive_clipping`": ((1, 3), {}, {"adaptive_clipping": 90.0}),
    "`--gradient_value_clipping`": ((1, 3), {}, {"gradient_value_clipping": 1.0}),
    "`--noise_scale_interval`": ((1, 3), {}, {"noise_scale_interval": 2}),
    "`--mup_base_width`": ((1, 3), {}, {"mup_base_width": 32}),
}


def _merge(*parts: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in copy.deepcopy(part).items():
            merged[name] = _merge(merged.get(name) or {}, value) if isinstance(value, dict) else value
    return merged


def is_accepted(degrees: str, zero_stage: int, changes: dict[str, Any], flags: dict[str, Any],
                device: Device = CUDA) -> bool:
    """Return whether the rules accept the degrees, each 2, on twice as many ranks as they need."""
    names = degrees.split(" + ")
    config = _merge(BASE, {"zero_optimization": {"stage": zero_stage}}, changes, *(DEGREES[name] for name in names))
    model = MIXTURE if "expert" in names else load_model_config("tiny", "tie_word_embeddings=false")
    args = RunArguments(save="run", train_steps=10, seq_length=64, **flags)
    try:
        check_rules(resolve_ds_config(DsFile("ds.json", config), args, model=model, world_size=4 * len(names),
                                      device=device))
    except ConfigError as error:
        print(f"{degrees}, ZeRO-{zero_stage}: {error}")
        return False
    return True


def combinations_table() -> list[str]:
    """Return the rows of the first table: which degrees can be combined at which ZeRO stage."""
    cells = {row: ["yes" if is_accepted(row, stage, {}, {}) else "no" for stage in range(4)] for row in ROWS}
    return [f"| {row} | {' | '.join(values)} |" for row, values in cells.items()]


def settings_table() -> list[str]:
    """Return the rows of the second table: which settings can be combined with which degree."""
    return [f"| {label} | " + " | ".join(
        "yes" if any(is_accepted(row, stage, changes, flags) for stage in stages) else "no"
        for row in ("pipeline", "tensor", "sequence", "expert")) + " |"
        for label, (stages, changes, flags) in SETTINGS.items()]


def optimizer_cells(kind: str) -> list[str]:
    """Return the row of an optimizer: "yes", "CUDA" (not on CPUs) or "no" for each column."""
    row = OPTIMIZERS[kind.lower()]
    own = {"optimizer": {"type": kind, "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": not row.elementwise}
    complete = {"reduce_scatter": False} if kind == "Muon" else {}

    def cell(degree: str, *stages: int, **zero: Any) -> str:
        changes = _merge(own, {"zero_optimization": zero})
        if all(is_accepted(degree, stage, changes, {}, CPU_ONLY) for stage in stages):
            return "yes"
        return "CUDA" if all(is_accepted(degree, stage, changes, {}) for stage in stages) else "no"

    return [cell("data", 0), cell("data", 1, 2), cell("data", 3, **complete), cell("pipeline", 1),
            cell("data", 1, 2, 3, offload_optimizer=_CPU, **complete),
            "yes" if (row.family or row.name) in divisible_families() else "no"]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every package and library seem installed: the tables do not depend on this machine."""
    monkeypatch.setattr(run_rules, "find_spec", lambda name: name)
    monkeypatch.setattr(layout_rules, "find_library", lambda name: name)


def test_the_tables_are_those_of_the_rules() -> None:
    """On a difference, write what `python -m tests.config.test_parallelism_page` prints into the page."""
    page = (ROOT / "pretrain/pages/layouts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+(?:\| (?:yes|no) )+\|$", page, re.MULTILINE)
    assert rows == [*combinations_table(), *settings_table()]


def test_the_table_of_the_optimizers_is_that_of_the_rules(subtests: pytest.Subtests) -> None:
    page = (ROOT / "pretrain/pages/recipe.md").read_text(encoding="utf-8")
    table = page.partition("| | ZeRO 0 |")[2].partition("\n\n")[0].splitlines()[2:]
    others = [row.name for row in OPTIMIZERS.values() if row.from_torch and row.elementwise]
    seen = set()
    for line in table:
        label, *cells = line.strip("| ").split(" | ")
        names = others if "torch.optim" in label else re.findall(r"`(\w+)`", label)
        seen |= set(names)
        for name in names:
            with subtests.test(name):
                assert [cell.split()[0].strip(",:") for cell in cells] == optimizer_cells(name)
    assert seen == {row.name for row in OPTIMIZERS.values()}


if __name__ == "__main__":
    run_rules.find_spec = layout_rules.find_library = lambda name: name  # type: ignore[assignment]
    print("\n".join(["", *combinations_table(), "", *settings_table()]))
