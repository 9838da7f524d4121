"""Every optimizer trains, saves and resumes in each precision and layout that the rules accept.

The matrix is generated from the table of the optimizers: a new row is tested without a change of this file. The rules
decide which of its rows must work.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.ds_json.optimizers import KNOWN_NAMES, OPTIMIZERS
from pretrain.config.ds_json.read import DsFile
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.run_rules import check_rules
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from tests.support.cases import CPU, NO_NVME, case, flags, nvme, nvme_param
from tests.support.launch import run_worker
from tests.support.layouts import dp2, fp16, pp2, relative_difference

SAVED, STEPS = 2, 4
# name -> type and parameters: each optimizer with its own defaults, and those whose parameters add or change states
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"lr": 1e-3}) for name in KNOWN_NAMES},
    "AdamW-torch": ("AdamW", {"lr": 1e-3, "torch_adam": True}), "SGD-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "RMSprop-centered": ("RMSprop", {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "Adagrad-start": ("Adagrad", {"lr": 1e-3, "initial_accumulator_value": 0.1, "lr_decay": 0.1})}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}},
                                         "bf16_fp32": {"bf16": {"enabled": True}, **FP32_SUMS}, "fp16": fp16({})}
WITHIN = {"fp32": 1e-5, "bf16": 5e-3, "bf16_fp32": 5e-3, "fp16": 3e-3}
OFFLOADED = {"offload_optimizer": CPU}


def _layouts(swap: Path) -> dict[str, dict[str, Any]]:
    found = {**{f"zero{stage}": dp2(stage) for stage in range(4)}, "pipeline2_zero0": pp2(0), "pipeline2_zero1": pp2(1),
             **{f"cpu{stage}": dp2(stage, **OFFLOADED) for stage in (1, 2, 3)},
             "cpu3_parameters": dp2(3, **OFFLOADED, offload_param=CPU), "pipeline2_cpu": pp2(1, **OFFLOADED),
             "nvme": dp2(3, offload_optimizer=nvme(swap), offload_param=nvme_param(swap))}
    return {name: values for name, values in found.items() if name != "nvme" or not NO_NVME}


@dataclass(frozen=True)
class Row:
    """An accepted combination, and the one under which its checkpoint is resumed, too."""

    kind: str
    precision: str
    layout: str
    values: dict[str, Any]  # the DeepSpeed JSON
    other: "Row | None" = None  # None: only the same layout can resume the states

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.precision}-{self.layout}"


def _values(kind: str, precision: str, layout: dict[str, Any]) -> dict[str, Any]:
    name, params = KINDS[kind]
    values = {**layout, **PRECISIONS[precision], "optimizer": {"type": name, "params": params},
              "zero_allow_untested_optimizer": True}
    if name == "Muon" and layout["zero_optimization"]["stage"] == 3:
        values["zero_optimization"] = {**layout["zero_optimization"], "reduce_scatter": False}
    return values


def _rows(folder: Path) -> Iterator[Row]:
    """Yield the accepted rows. A row of a divisible optimizer is also resumed in the optimizer's next row."""
    layouts = _layouts(folder)
    for kind in KINDS:
        rows = [Row(kind, precision, layout, values) for precision, layout in product(PRECISIONS, layouts)
                if _is_accepted(values := _values(kind, precision, layouts[layout]))]
        if OPTIMIZERS[KINDS[kind][0].lower()].divisible:
            rows = [Row(**{**vars(row), "other": other}) for row, other in pairwise([*rows, rows[0]])]
        yield from rows


def _is_accepted(values: dict[str, Any]) -> bool:
    args = RunArguments(save="run", train_steps=STEPS, seq_length=32, emulate_fp16="fp16" in values)
    try:
        check_rules(resolve_ds_config(DsFile("ds.json", values), args, world_size=2, device=cpu_device(),
                                      model=load_model_config("tiny", "vocab_size=256,n_layer=2,n_embd=32")))
    except ConfigError:
        return False
    return True


def _train(rows: list[Row], corpus: str, folder: Path) -> dict[str, Any]:
    cases = []
    for row in rows:
        run_flags = {**flags(corpus, layers=2, hidden=32, seq_length=32, steps=STEPS), "lr_warmup_steps": 1,
                     "emulate_fp16": row.precision == "fp16"}
        resumed_in = {"again": row.values} | ({"other": row.other.values} if row.other else {})
        cases.append(case(row.name, "round_trip", row.values, run_flags, saved_step=SAVED, resumed_in=resumed_in))
    return run_worker("layout_worker.py", cases, 2, folder)


def _assert_resumes(row: Row, result: dict[str, Any]) -> None:
    saved, again = result["saved"], result["again"]
    assert all(math.isfinite(loss) for loss in saved["before"]["loss"] + saved["after"]["loss"])
    assert saved["before"]["skipped"][-1] == 0, "a skipped update would hide what the optimizer does"
    assert len({*saved["before"]["loss"], *saved["after"]["loss"]}) == STEPS
    assert (again["after"], again["differences"]) == (saved["after"], [])
    if row.other is not None:
        other, within = result["other"], max(WITHIN[row.precision], WITHIN[row.other.precision])
        assert other["differences"] == []
        assert other["after"]["lr"] == saved["after"]["lr"]
        assert relative_difference(other["after"]["loss"], saved["after"]["loss"]) <= within


def _selection(rows: list[Row]) -> list[Row]:
    """Return one row of each kind: those with the most precisions, layouts and pairs of them that no row has yet.

    Of equal ones, the layout that the fewest kinds have.
    """
    covered, frequency = set[str](), Counter(row.layout for row in rows)

    def parts(row: Row) -> set[str]:
        return {row.precision, row.layout, f"{row.precision} {row.layout}"}

    chosen: list[Row] = []
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        if kind == "Adagrad":  # DeepSpeed's defect AH
            own = [row for row in own if (row.precision, row.layout) == ("bf16", "zero0")]
        new = {row.name: len(parts(row) - covered) for row in own}
        chosen.append(max(own, key=lambda row, new=new: (new[row.name], -frequency[row.layout])))
        covered |= parts(chosen[-1])
    return chosen


def _check(rows: list[Row], corpus: str, folder: Path, subtests: pytest.Subtests) -> None:
    results = _train(rows, corpus, folder)
    for row in rows:
        with subtests.test(row.name):
            _assert_resumes(row, results[row.name])


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    (tmp_path / "swap").mkdir()
    return list(_rows(tmp_path / "swap"))


def test_each_optimizer_resumes_bit_exactly_and_in_another_layout(rows: list[Row], corpus: str, tmp_path: Path,
                                                                  subtests: pytest.Subtests) -> None:
    assert {*KINDS} - {row.kind for row in rows} <= {"AdamW8bit", "Lamb", "Lion"}, "these need CUDA or a compiler"
    chosen = _selection(rows)
    assert {row.precision for row in chosen} == {*PRECISIONS}
    assert {row.layout for row in rows} - {row.layout for row in chosen} <= {"pipeline2_cpu"}
    _check(chosen, corpus, tmp_path, subtests)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_accepted_optimizer_precision_and_layout(precision: str, rows: list[Row], corpus: str, tmp_path: Path,
                                                       subtests: pytest.Subtests) -> None:
    _check([row for row in rows if row.precision == precision], corpus, tmp_path, subtests)
