"""Checkpoints resume in any other layout, with identical weights and optimizer states and equal losses.

`pytest -m slow` tests the remaining pairs of layouts.
"""

import json
import os
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.export_hf import consolidate, export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.engine.build_ops import why_not_compilable
from tests.conftest import selected_params
from tests.support.cases import CPU, case, config, flags, nvme, nvme_param
from tests.support.layouts import (
    MODEL_WITH_EXPERTS,
    SAVED,
    STEPS,
    dp2,
    experts2,
    fp16,
    pp2,
    relative_difference,
    run_layouts,
    sequence2,
    tensor2,
)

NO_NVME = why_not_compilable("AsyncIOBuilder")


@dataclass(frozen=True)
class RunLayout:
    """A number of ranks and a DeepSpeed JSON. Every layout has 8 samples per step."""

    ranks: int
    config: dict[str, Any]
    has_experts: bool = False  # whether the model has


def _layouts(swap: Path) -> dict[str, RunLayout]:
    found = {
        "zero0": RunLayout(1, config(0, micro=4, accumulation=2)),
        "zero1": RunLayout(2, config(1, micro=2, accumulation=2)),
        "zero2": RunLayout(2, config(2, micro=2, accumulation=2)),
        "zero3": RunLayout(2, config(3, micro=2, accumulation=2)),
        "nvme": RunLayout(2, config(3, micro=2, accumulation=2, offload_optimizer=nvme(swap),
                                 offload_param=nvme_param(swap))),
        "pipeline2": RunLayout(2, config(1, micro=2, accumulation=4, stages=2)),
        "pipeline2_data2": RunLayout(4, config(1, micro=2, accumulation=2, stages=2)),
        "pipeline4": RunLayout(4, config(0, micro=2, accumulation=4, stages=4)),
        "tensor2_zero0": RunLayout(2, tensor2(0)),
        "tensor2_zero1": RunLayout(2, tensor2(1)),
        "tensor2_zero2": RunLayout(2, tensor2(2)),
        "tensor2_zero3": RunLayout(2, tensor2(3)),
        "tensor2_data2": RunLayout(4, tensor2(2, micro=2)),
        "tensor2_pipeline2": RunLayout(4, tensor2(1, micro=2, accumulation=4, stages=2)),
        "sequence2_zero1": RunLayout(2, sequence2(1)),
        "sequence2_zero3": RunLayout(2, sequence2(3)),
        "whole_experts": RunLayout(1, config(0, micro=4, accumulation=2), has_experts=True),
        "whole_experts_zero3": RunLayout(2, dp2(3), has_experts=True),
        "experts2_zero1": RunLayout(2, experts2(1), has_experts=True),
        "experts2_zero2": RunLayout(2, experts2(2), has_experts=True),
        "experts2_zero3": RunLayout(2, experts2(3), has_experts=True),
        "experts2_data2": RunLayout(4, experts2(2, accumulation=1), has_experts=True),
    }
    if NO_NVME:
        del found["nvme"]
    return found


MODEL_PARALLEL = ("tensor2_zero0", "tensor2_zero1", "tensor2_zero2", "tensor2_zero3", "tensor2_data2",
                  "tensor2_pipeline2", "sequence2_zero1", "sequence2_zero3")
FAST_PAIRS = [("zero0", "zero3"), ("zero0", "pipeline4"), ("zero1", "zero2"), ("zero1", "pipeline2_data2"),
              ("zero2", "zero0"), ("zero2", "nvme"), ("zero3", "zero1"), ("zero3", "pipeline2"),
              ("nvme", "pipeline2_data2"), ("pipeline2", "zero3"), ("pipeline2_data2", "zero0"), ("pipeline4", "nvme"),
              ("zero0", "tensor2_zero1"), ("tensor2_zero1", "tensor2_pipeline2"),
              ("tensor2_pipeline2", "zero3"), ("sequence2_zero3", "tensor2_zero3"),
              ("whole_experts", "experts2_zero2"), ("experts2_zero2", "experts2_data2")]
WITH_EXPERTS = ("whole_experts", "whole_experts_zero3", "experts2_zero1", "experts2_zero2", "experts2_zero3",
                "experts2_data2")
NAMES = (*MODEL_PARALLEL, "zero0", "zero1", "zero2", "zero3", "nvme", "pipeline2", "pipeline2_data2", "pipeline4")
PAIRS = [pytest.param(pair, id="-".join(pair), marks=[
    *([pytest.mark.slow] if pair not in FAST_PAIRS else []),
    *([pytest.mark.skip(reason=f"NVMe offload: {NO_NVME}")] if NO_NVME and "nvme" in pair else [])])
    for pair in (*permutations(NAMES, 2), *permutations(WITH_EXPERTS, 2))]


def _case(name: str, job: str, layout: RunLayout, run_flags: dict[str, Any], **others: Any) -> dict[str, Any]:
    return case(name, job, layout.config, run_flags, saved_step=SAVED, **others)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of saving in every layout, of loading and saving in another layout, and of loading back."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "swap").mkdir()
    layouts = _layouts(folder / "swap")
    run_flags = {False: flags(corpus, hidden=128, steps=STEPS),  # large enough that tensors are swapped to NVMe
                 True: {**flags(corpus, steps=STEPS), "model": str(folder / "experts.json"),
                        "model_overrides": "vocab_size=256"}}
    (folder / "experts.json").write_text(json.dumps(MODEL_WITH_EXPERTS))
    pairs = [pair for pair in selected_params(request, "pair") if set(pair) <= layouts.keys()]
    saved = run_layouts({name: (layout.ranks, _case(name, "train_and_save", layout, run_flags[layout.has_experts]))
                         for name, layout in layouts.items() if any(name == pair[0] for pair in pairs)},
                        folder / "save")
    loads = {f"{a}-{b}": (layouts[b].ranks, _case(f"{a}-{b}", "resume", layouts[b], run_flags[layouts[b].has_experts],
                                                  used=i % 2, source=saved[a]["folder"]))
             for i, (a, b) in enumerate(pairs)}
    loaded = run_layouts(loads, folder / "load")
    backs = {f"{a}-{b}-{a}": (layouts[a].ranks, _case(f"{a}-{b}-{a}", "resume", layouts[a],
                                                      run_flags[layouts[a].has_experts], train=False,
                                                      source=loaded[f"{a}-{b}"]["folder"]))
             for a, b in pairs if layouts[a].ranks == 2}  # only layouts of two ranks: one launch instead of three
    return {"saved": saved, "loaded": loaded, "back": run_layouts(backs, folder / "back")}


@pytest.mark.parametrize("pair", PAIRS)
def test_resume_in_another_layout(pair: tuple[str, str], matrix: dict[str, Any]) -> None:
    before, after = matrix["saved"][pair[0]], matrix["loaded"]["-".join(pair)]
    assert diff(Path(before["folder"]), Path(after["folder"])) == []
    assert relative_difference(after["after"]["loss"], before["after"]["loss"]) <= 1e-5
    assert after["after"]["lr"] == before["after"]["lr"]
    assert len(set(after["seeds"])) == len(after["seeds"])
    assert after["counters"] == [STEPS, STEPS * 8, 0]
    assert len(set(after["after"]["loss"])) == STEPS - SAVED


@pytest.mark.parametrize("pair", PAIRS)
def test_load_back_in_the_first_layout(pair: tuple[str, str], matrix: dict[str, Any]) -> None:
    name = f"{pair[0]}-{pair[1]}-{pair[0]}"
    if name not in matrix["back"]:
        pytest.skip("only layouts of two ranks are loaded back")
    first, last = Path(matrix["saved"][pair[0]]["folder"]), Path(matrix["back"][name]["folder"])
    assert diff(first, last) == []
    assert CheckpointReader(first).scalars == CheckpointReader(last).scalars == {"step": SAVED}


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.values[0][0] in ("zero0", "whole_experts") and
                                  pair.values[0][1] in (*MODEL_PARALLEL, *WITH_EXPERTS)])
def test_exports_of_all_layouts_have_the_same_bytes(pair: tuple[str, str], matrix: dict[str, Any],
                                                    tmp_path: Path) -> None:
    folders = matrix["saved"][pair[0]]["folder"], matrix["loaded"]["-".join(pair)]["folder"]
    for write in (export_hf, consolidate):
        written = [tmp_path / f"{write.__name__}{i}" for i in range(2)]
        for folder, out in zip(folders, written, strict=True):
            write(plan_export(Path(folder), out, dtype="fp32", with_tokenizer=False))
        weights = [(out / "model.safetensors").read_bytes() for out in written]
        assert len(weights[0]) > 4 * 256 * 128
        assert weights[0] == weights[1]


@dataclass(frozen=True)
class Change:
    """Two layouts of two ranks. `within` is the allowed relative difference of the losses after the change."""

    before: dict[str, Any]
    after: dict[str, Any]
    within: float = 1e-5
    model: dict[str, Any] = field(default_factory=dict)
    saved_step: int = SAVED


def _with(values: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return the JSON with other or additional top-level keys."""
    return {**values, **others}


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}, "zero_allow_untested_optimizer": True}


FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOADED = {"offload_optimizer": CPU}
LION, SGD = _optimizer("Lion"), _optimizer("SGD", momentum=0.9)
NADAM, ADAGRAD = _optimizer("NAdam"), _optimizer("Adagrad")
TORCH_ADAM = _optimizer("AdamW", torch_adam=True)
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 6}}}
CHANGES = {
    "bf16_to_fp32": Change(_with(dp2(1, precision="bf16"), **FP32_SUMS), dp2(2), 5e-3),
    "bf16_stage0_to_offload": Change(pp2(0, precision="bf16"), dp2(2, precision="bf16", **OFFLOADED), 5e-3),
    "bf16_offload_to_bf16_optimizer": Change(dp2(2, precision="bf16", **OFFLOADED),
                                             _with(pp2(1, precision="bf16"), **FP32_SUMS), 5e-3),
    "fp16_to_bf16": Change(fp16(pp2(1)), dp2(3, precision="bf16"), 5e-3),
    "fp16_stage2_to_stage0": Change(fp16(dp2(2)), fp16(pp2(0)), 2e-3),
    "fp16_stage0_to_stage3": Change(fp16(pp2(0)), fp16(dp2(3)), 2e-3),
    "fp16_unfused_to_stage2": Change(fp16(_with(pp2(0), **TORCH_ADAM)), fp16(_with(dp2(2), **TORCH_ADAM)),
                                     2e-3),
    "fp16_stage2_to_unfused": Change(fp16(_with(dp2(2), **TORCH_ADAM)), fp16(_with(pp2(0), **TORCH_ADAM)),
                                     2e-3),
    "offload_on": Change(pp2(1), dp2(3, **OFFLOADED, offload_param=CPU)),
    "offload_off": Change(dp2(3, **OFFLOADED), dp2(1)),
    "untied": Change(dp2(3), pp2(0), model={"overrides": "tie_word_embeddings=False"}),
    "lion": Change(_with(dp2(2, **OFFLOADED), **LION), _with(pp2(1, **OFFLOADED), **LION)),
    "sgd": Change(_with(pp2(0), **SGD), _with(dp2(2), **SGD)),
    "sgd_without_momentum": Change(_with(dp2(1), **_optimizer("SGD")), _with(dp2(3), **_optimizer("SGD"))),
    "nadam": Change(_with(dp2(1), **NADAM), _with(pp2(0), **NADAM)),
    "warmup": Change(_with(dp2(3), **WARMUP), _with(pp2(1), **WARMUP)),
    "torch_adam_to_fused": Change(_with(dp2(3), **TORCH_ADAM), _with(pp2(0), **_optimizer("AdamW")), 1e-4),
    "adagrad": Change(_with(pp2(0), **ADAGRAD), _with(dp2(2, **OFFLOADED), **ADAGRAD)),
    "round_robin": Change(dp2(2, round_robin_gradients=True), dp2(3)),
    "to_round_robin": Change(dp2(3), dp2(2, round_robin_gradients=True)),
    "same_stage_other_order": Change(dp2(2), dp2(2, round_robin_gradients=True)),
    "aligned": Change(dp2(1, precision="bf16"), dp2(2, precision="bf16", parameter_alignment=True), 5e-3),
    "small_sub_groups": Change(dp2(3, sub_group_size=10_000), dp2(3, sub_group_size=30_000, **OFFLOADED)),
    "other_stage_bounds": Change(pp2(1), _with(pp2(1), pipeline={"stages": 2, "partition_method": "uniform"})),
    "layers_of_all_ranks": Change(_with(dp2(0), checkpoint={"parallel_write": {"pipeline_stage": True}}),
                                  dp2(3)),
    "before_the_first_step": Change(dp2(1), dp2(3), saved_step=0),
    "padding": Change(dp2(3), dp2(1), model={"overrides": "n_inner=33"}),
    "tensor2_bf16_stage0": Change(tensor2(0, precision="bf16"), dp2(3, precision="bf16"), 5e-3),
}


def _other_settings(values: dict[str, Any]) -> Change:
    """Return a change of gradient clipping and loss scale window in the same layout."""
    return Change(fp16(values), _with(fp16(values), gradient_clipping=0.25,
                                      fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}), 5e-2)


OTHER_SETTINGS = {f"other_settings_{i}": _other_settings(values) for i, values in enumerate(
    [dp2(2), dp2(3), pp2(0)])}
CHANGES |= OTHER_SETTINGS

# name -> (JSON of the run that saves, JSON of the run that loads, hidden size in the run that loads)
REJECTED = {
    "optimizer": (dp2(1), _with(dp2(2), **SGD), 64),
    "shape": (dp2(1), dp2(2), 32),
    "damaged": (pp2(0), pp2(1), 64),
}


@pytest.fixture(scope="module")
def outcomes(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the results of the run that saves and of the run that loads, for each change and each rejected load."""
    folder = tmp_path_factory.mktemp("changes")
    before = {name: (change.before, change.model, change.saved_step) for name, change in CHANGES.items()}
    before |= {name: (values, {}, SAVED) for name, (values, _, _) in REJECTED.items()}
    after = {name: ("resume", change.after, change.model, change.saved_step) for name, change in CHANGES.items()}
    after |= {name: ("load_and_fail", values, {"hidden": hidden}, SAVED)
              for name, (_, values, hidden) in REJECTED.items()}

    def two_rank_case(name: str, job: str, values: dict[str, Any], model: dict[str, Any], saved_step: int,
                      source: str = "") -> tuple[int, dict[str, Any]]:
        run_flags = flags(corpus, steps=STEPS, emulate_fp16="fp16" in values, **model)
        return 2, case(name, job, values, run_flags, saved_step=saved_step, source=source)

    saved = run_layouts({name: two_rank_case(name, "train_and_save", *rest) for name, rest in before.items()},
                        folder / "before")
    with open(Path(saved["damaged"]["folder"]) / "mp_rank_01_model_states.pt", "r+b") as file:
        file.seek(-100, os.SEEK_END)  # damage the content, and keep the size
        file.write(bytes(100))
    loaded = run_layouts({name: two_rank_case(name, *rest, saved[name]["folder"]) for name, rest in after.items()},
                         folder / "after")
    return {name: (saved[name], loaded[name]) for name in loaded}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_resumes_after_a_change(name: str, outcomes: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    before, after = outcomes[name]
    distance = relative_difference(after["after"]["loss"], before["after"]["loss"])
    print(f"{name}: {before['optimizer']} -> {after['optimizer']}, losses within {distance:.1e}")
    assert diff(Path(before["folder"]), Path(after["folder"])) == []
    assert distance <= CHANGES[name].within
    assert after["after"]["lr"] == before["after"]["lr"]


NOT_WRITTEN = {("layers_of_all_ranks", "weights"), ("layers_of_all_ranks", "state"), ("sgd_without_momentum", "state")}


def _check_that_nan_is_found(name: str, finite: dict[str, list[bool]]) -> None:
    """Assert that the last rank found NaN or infinity in its weights and states, and that no rank found any before."""
    assert all(finite["nothing"]), name
    for place in ("weights", "state"):
        if (name, place) not in NOT_WRITTEN:
            assert finite[place][-1] is False, (name, finite)
    assert all(finite.get("padding", [True])), name


def test_nan_in_weights_and_states_is_found(matrix: dict[str, Any]) -> None:
    for name, result in matrix["saved"].items():
        _check_that_nan_is_found(name, result["finite"])


def test_nan_is_found_with_every_optimizer(outcomes: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for name in CHANGES:
        _check_that_nan_is_found(name, outcomes[name][0]["finite"])
    assert "padding" in outcomes["padding"][0]["finite"]


def test_the_resuming_run_sets_clipping_and_scale_window(
        outcomes: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for name in OTHER_SETTINGS:
        before, after = outcomes[name]
        assert after["settings"] == [0.25, 3]
        assert read_manifest(Path(before["folder"])).loss_scale == read_manifest(Path(after["folder"])).loss_scale
        assert after["after"]["loss_scale"] != before["after"]["loss_scale"]


def test_loss_scale_is_restored(outcomes: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for name, (before, after) in ((name, outcomes[name]) for name in CHANGES):
        if "fp16" in CHANGES[name].before and "fp16" in CHANGES[name].after and name not in OTHER_SETTINGS:
            saved, resumed = (read_manifest(Path(result["folder"])).loss_scale for result in (before, after))
            assert saved is not None
            assert resumed is not None
            assert {key: saved[key] for key in saved.keys() & resumed.keys()} == {
                key: resumed[key] for key in saved.keys() & resumed.keys()}, name
            assert saved["cur_iter"] == SAVED
            assert after["after"]["loss_scale"] == before["after"]["loss_scale"], name
            assert len(set(after["after"]["loss_scale"])) > 1, name


def test_all_ranks_reject_with_the_same_error(outcomes: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for name, message in (("optimizer", "found FusedAdam in the checkpoint and SGD in this run"),
                          ("shape", "found shape (256, 64); expected (256, 32)"),
                          ("damaged", "mp_rank_01_model_states.pt: found an unreadable file")):
        errors = outcomes[name][1]["errors"]
        assert message in errors[0], errors
        assert errors[1] == errors[0]
