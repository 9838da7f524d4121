"""Checkpoints resume in any other layout, with identical weights and optimizer states and equal losses.

By default, each layout saves once and loads once. `pytest -m slow` tests the remaining pairs and changes.
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
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from tests.conftest import selected_params
from tests.support.cases import CPU, NO_NVME, case, config, flags, nvme, nvme_param
from tests.support.layouts import (
    MODEL_WITH_EXPERTS,
    SAVED,
    STEPS,
    TENSOR2,
    dp2,
    experts2,
    fp16,
    pp2,
    relative_difference,
    run_layouts,
    sequence2,
    tensor2,
)


@dataclass(frozen=True)
class RunLayout:
    """A number of ranks and a DeepSpeed JSON. Every layout has 8 samples per step."""

    ranks: int
    config: dict[str, Any]
    has_experts: bool = False  # whether the model has


def _layouts(swap: Path) -> dict[str, RunLayout]:
    disk = {"offload_optimizer": nvme(swap), "offload_param": nvme_param(swap)}
    found = {
        "zero0": RunLayout(1, config(0, micro=4, accumulation=2)),
        **{f"zero{stage}": RunLayout(2, dp2(stage)) for stage in (1, 2, 3)},
        "nvme": RunLayout(2, dp2(3, **disk)),
        "pipeline2": RunLayout(2, pp2(1)),
        "pipeline2_data2": RunLayout(4, config(1, micro=2, accumulation=2, stages=2)),
        "pipeline4": RunLayout(4, config(0, micro=2, accumulation=4, stages=4)),
        **{f"tensor2_zero{stage}": RunLayout(2, tensor2(stage)) for stage in (0, 1, 2, 3)},
        "tensor2_data2": RunLayout(4, tensor2(2, micro=2)),
        "tensor2_pipeline2": RunLayout(4, tensor2(1, micro=2, accumulation=4, stages=2)),
        "sequence2_zero1": RunLayout(2, sequence2(1)),
        "sequence2_zero3": RunLayout(2, sequence2(3)),
        "whole_experts": RunLayout(1, config(0, micro=4, accumulation=2), has_experts=True),
        "whole_experts_zero3": RunLayout(2, dp2(3), has_experts=True),
        **{f"experts2_zero{stage}": RunLayout(2, experts2(stage), has_experts=True) for stage in (1, 2, 3)},
        "experts2_data2": RunLayout(4, experts2(2, accumulation=1), has_experts=True),
        **{f"experts2_tensor2_zero{stage}": RunLayout(2, {**experts2(stage, accumulation=4), **TENSOR2},
                                                      has_experts=True) for stage in (1, 2, 3)},
        "experts2_tensor2_data2": RunLayout(4, {**experts2(1), **TENSOR2}, has_experts=True),
        "experts2_pipeline2": RunLayout(4, experts2(1, stages=2), has_experts=True),
        "experts2_tensor2_pipeline2": RunLayout(4, {**experts2(1, accumulation=4, stages=2), **TENSOR2},
                                                has_experts=True),
    }
    if NO_NVME:
        del found["nvme"]
    return found


# each kind of layout saves once and loads once
FAST_PAIRS = [("zero0", "tensor2_zero1"), ("tensor2_zero1", "tensor2_pipeline2"), ("tensor2_pipeline2", "zero3"),
              ("zero3", "pipeline4"), ("pipeline4", "nvme"), ("nvme", "pipeline2_data2"), ("pipeline2_data2", "zero1"),
              ("zero1", "zero0"), ("sequence2_zero3", "tensor2_zero3"), ("whole_experts", "experts2_zero2"),
              ("experts2_zero2", "experts2_tensor2_pipeline2"), ("experts2_tensor2_pipeline2", "experts2_data2")]
ALL = _layouts(Path()) | {"nvme": RunLayout(2, {})}
PAIRS = [pytest.param(pair, id="-".join(pair), marks=[
    *([pytest.mark.slow] if pair not in FAST_PAIRS else []),
    *([pytest.mark.skip(reason=f"NVMe offload: {NO_NVME}")] if NO_NVME and "nvme" in pair else [])])
    for pair in permutations(ALL, 2) if ALL[pair[0]].has_experts == ALL[pair[1]].has_experts]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of saving in every layout, and of loading and saving in another layout."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "swap").mkdir()
    layouts = _layouts(folder / "swap")
    run_flags = {False: flags(corpus, hidden=128, steps=STEPS),  # large enough that tensors are swapped to NVMe
                 True: {**flags(corpus, steps=STEPS), "model": str(folder / "experts.json"),
                        "model_overrides": "vocab_size=256"}}
    (folder / "experts.json").write_text(json.dumps(MODEL_WITH_EXPERTS))
    pairs = [pair for pair in selected_params(request, "pair") if set(pair) <= layouts.keys()]

    def case_of(name: str, job: str, layout: RunLayout, **others: Any) -> tuple[int, dict[str, Any]]:
        return layout.ranks, case(name, job, layout.config, run_flags[layout.has_experts], saved_step=SAVED, **others)

    saved = run_layouts({name: case_of(name, "train_and_save", layouts[name]) for name in {pair[0] for pair in pairs}},
                        folder / "save")
    loads = {f"{a}-{b}": case_of(f"{a}-{b}", "resume", layouts[b], used=i % 2, source=saved[a]["folder"])
             for i, (a, b) in enumerate(pairs)}
    return {"saved": saved, "loaded": run_layouts(loads, folder / "load")}


@pytest.mark.parametrize("pair", PAIRS)
def test_resume_in_another_layout(pair: tuple[str, str], matrix: dict[str, Any]) -> None:
    before, after = matrix["saved"][pair[0]], matrix["loaded"]["-".join(pair)]
    assert diff(Path(before["folder"]), Path(after["folder"])) == []
    assert relative_difference(after["after"]["loss"], before["after"]["loss"]) <= 1e-5
    assert after["after"]["lr"] == before["after"]["lr"]
    assert len(set(after["seeds"])) == len(after["seeds"])
    assert after["counters"] == [STEPS, STEPS * 8, 0]
    assert len(set(after["after"]["loss"])) == STEPS - SAVED
    _check_that_nan_is_found(pair[0], before["finite"])


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.values[0][0] in ("zero0", "whole_experts") and
                                  pair.values[0][1].startswith(("tensor2", "sequence2", "experts2"))])
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
    model: dict[str, Any] = field(default_factory=dict)  # flags, or a config.json
    saved_step: int = SAVED
    is_slow: bool = False


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
UNEVEN = {"model_type": "llama", "vocab_size": 251, "hidden_size": 64, "intermediate_size": 162,
          "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
          "tie_word_embeddings": False}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 6}}}
CHANGES = {
    "bf16_to_fp32": Change(_with(dp2(1, precision="bf16"), **FP32_SUMS), dp2(2), 5e-3),
    "bf16_stage0_to_offload": Change(pp2(0, precision="bf16"), dp2(2, precision="bf16", **OFFLOADED), 5e-3),
    "bf16_offload_to_bf16_optimizer": Change(dp2(2, precision="bf16", **OFFLOADED),
                                             _with(pp2(1, precision="bf16"), **FP32_SUMS), 5e-3),
    "fp16_to_bf16": Change(fp16(pp2(1)), dp2(3, precision="bf16"), 5e-3, is_slow=True),
    "fp16_stage2_to_stage0": Change(fp16(dp2(2)), fp16(pp2(0)), 2e-3),
    "fp16_stage0_to_stage3": Change(fp16(pp2(0)), fp16(dp2(3)), 2e-3, is_slow=True),
    "fp16_unfused_to_stage2": Change(fp16(_with(pp2(0), **TORCH_ADAM)), fp16(_with(dp2(2), **TORCH_ADAM)), 2e-3),
    "fp16_stage2_to_unfused": Change(fp16(_with(dp2(2), **TORCH_ADAM)), fp16(_with(pp2(0), **TORCH_ADAM)), 2e-3),
    "offload_on": Change(pp2(1), dp2(3, **OFFLOADED, offload_param=CPU)),
    "offload_off": Change(dp2(3, **OFFLOADED), dp2(1), is_slow=True),
    "untied": Change(dp2(3), pp2(0), model={"overrides": "tie_word_embeddings=False"}),
    "lion": Change(_with(dp2(2, **OFFLOADED), **LION), _with(pp2(1, **OFFLOADED), **LION)),
    "sgd": Change(_with(pp2(0), **SGD), _with(dp2(2), **SGD)),
    "sgd_without_momentum": Change(_with(dp2(1), **_optimizer("SGD")), _with(dp2(3), **_optimizer("SGD"))),
    "nadam": Change(_with(dp2(1), **NADAM), _with(pp2(0), **NADAM), is_slow=True),
    "warmup": Change(_with(dp2(3), **WARMUP), _with(pp2(1), **WARMUP)),
    "torch_adam_to_fused": Change(_with(dp2(3), **TORCH_ADAM), _with(pp2(0), **_optimizer("AdamW")), 1e-4),
    "adagrad": Change(_with(pp2(0), **ADAGRAD), _with(dp2(0), **ADAGRAD)),
    # slow, because DeepSpeed compiles its Adagrad first
    "adagrad_offload": Change(_with(pp2(0), **ADAGRAD), _with(dp2(2, **OFFLOADED), **ADAGRAD), is_slow=True),
    "round_robin": Change(dp2(2, round_robin_gradients=True), dp2(3, checkpoint_every=1)),  # which recomputes, too
    "same_stage_other_order": Change(dp2(2), dp2(2, round_robin_gradients=True)),
    "aligned": Change(dp2(1, precision="bf16"), dp2(2, precision="bf16", parameter_alignment=True), 5e-3, is_slow=True),
    "small_sub_groups": Change(dp2(3, sub_group_size=10_000), dp2(3, sub_group_size=30_000, **OFFLOADED)),
    "other_stage_bounds": Change(pp2(1), _with(pp2(1), pipeline={"stages": 2, "partition_method": "uniform"})),
    "layers_of_all_ranks": Change(_with(dp2(0), checkpoint={"parallel_write": {"pipeline_stage": True}}), dp2(3)),
    "before_the_first_step": Change(dp2(1), dp2(3), saved_step=0),
    "padding": Change(dp2(3), dp2(1), model={"overrides": "n_inner=33"}),
    "uneven_to_data": Change(tensor2(1), dp2(3), model=UNEVEN, is_slow=True),
    "tensor2_bf16_stage0": Change(tensor2(0, precision="bf16"), dp2(3, precision="bf16"), 5e-3, is_slow=True),
    "tensor2_bf16_fp32_sums": Change(_with(tensor2(1, precision="bf16"), **FP32_SUMS), dp2(2), 5e-3, is_slow=True),
    "tensor2_fp16": Change(fp16(tensor2(2)), fp16(pp2(1)), 3e-3, is_slow=True),
    "tensor2_fp16_unfused": Change(fp16(_with(tensor2(0), **TORCH_ADAM)), fp16(_with(dp2(2), **TORCH_ADAM)), 3e-3,
                                   is_slow=True),
    "tensor2_lion": Change(_with(tensor2(2, **OFFLOADED), **LION), _with(pp2(1, **OFFLOADED), **LION), is_slow=True),
    "tensor2_round_robin": Change(tensor2(2, round_robin_gradients=True), sequence2(1), is_slow=True),
    "sequence2_bf16_stage0": Change(sequence2(0, precision="bf16"), pp2(0, precision="bf16"), 5e-3, is_slow=True),
    "to_sequence2_stage0": Change(dp2(1), sequence2(0), is_slow=True),
    "experts2_bf16": Change(experts2(2, precision="bf16"), dp2(3, precision="bf16"), 5e-3, MODEL_WITH_EXPERTS,
                            is_slow=True),
    "experts2_cpu": Change(experts2(2, **OFFLOADED), experts2(3), model=MODEL_WITH_EXPERTS, is_slow=True),
    "experts2_fp16": Change(fp16(experts2(2)), fp16(dp2(2)), 5e-3, MODEL_WITH_EXPERTS, is_slow=True),
    "experts2_sub_groups": Change(experts2(3, sub_group_size=3000), dp2(1), model=MODEL_WITH_EXPERTS, is_slow=True),
    # another gradient clipping and loss scale window
    **{f"other_settings_{i}": Change(fp16(values), _with(
        fp16(values), gradient_clipping=0.25, fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}),
        5e-2) for i, values in enumerate([dp2(2), dp2(3), pp2(0)])},
}
# the run that loads has an optimizer, a model or files that it must reject
REJECTED = {"optimizer": Change(dp2(1), _with(dp2(2), **SGD)), "shape": Change(dp2(1), dp2(2), model={"hidden": 32}),
            "damaged": Change(pp2(0), pp2(1))}
Outcomes = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return the results of the run that saves and of the run that loads, for each change and each rejected load."""
    folder = tmp_path_factory.mktemp("changes")
    changes = {name: CHANGES[name] for name in selected_params(request, "name")} | REJECTED

    def two_rank_case(name: str, job: str, values: dict[str, Any], **others: Any) -> tuple[int, dict[str, Any]]:
        change = changes[name]
        run_flags = flags(corpus, steps=STEPS, emulate_fp16="fp16" in values)
        if "model_type" in change.model:
            (folder / f"{name}.json").write_text(json.dumps(change.model))
            run_flags |= {"model": str(folder / f"{name}.json"),
                          "model_overrides": f"vocab_size={change.model['vocab_size']}"}
        elif job != "train_and_save" or name not in REJECTED:
            run_flags |= flags(corpus, steps=STEPS, **change.model)
        return 2, case(name, job, values, run_flags, saved_step=change.saved_step, **others)

    saved = run_layouts({name: two_rank_case(name, "train_and_save", change.before)
                         for name, change in changes.items()}, folder / "before")
    with open(Path(saved["damaged"]["folder"]) / "mp_rank_01_model_states.pt", "r+b") as file:
        file.seek(-100, os.SEEK_END)  # damage the content, and keep the size
        file.write(bytes(100))
    loaded = run_layouts({name: two_rank_case(name, "load_and_fail" if name in REJECTED else "resume", change.after,
                                              source=saved[name]["folder"])
                          for name, change in changes.items()}, folder / "after")
    return {name: (saved[name], loaded[name]) for name in loaded}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if change.is_slow else [])
                                  for name, change in CHANGES.items()])
def test_a_run_resumes_after_a_change(name: str, outcomes: Outcomes) -> None:
    before, after = outcomes[name]
    distance = relative_difference(after["after"]["loss"], before["after"]["loss"])
    print(f"{name}: {before['optimizer']} -> {after['optimizer']}, losses within {distance:.1e}")
    assert diff(Path(before["folder"]), Path(after["folder"])) == []
    assert distance <= CHANGES[name].within
    assert after["after"]["lr"] == before["after"]["lr"]
    _check_that_nan_is_found(name, before["finite"])
    assert (name == "padding") <= ("padding" in before["finite"])
    if name.startswith("other_settings"):
        assert after["settings"] == [0.25, 3], "the resuming run sets clipping and scale window"
        assert after["after"]["loss_scale"] != before["after"]["loss_scale"]
    if "fp16" in CHANGES[name].before and "fp16" in CHANGES[name].after:
        _check_that_the_loss_scale_is_restored(before, after, same_window=not name.startswith("other_settings"))


def _check_that_nan_is_found(name: str, finite: dict[str, list[bool]]) -> None:
    """Assert that the last rank found NaN or infinity in its weights and states, and that no rank found any before."""
    not_written = {"layers_of_all_ranks": ("weights", "state"), "sgd_without_momentum": ("state",)}.get(name, ())
    assert all(finite["nothing"])
    assert all(finite.get("padding", [True]))
    for place in {"weights", "state"}.difference(not_written):
        assert finite[place][-1] is False, finite


def _check_that_the_loss_scale_is_restored(before: dict[str, Any], after: dict[str, Any], *, same_window: bool) -> None:
    saved, resumed = (read_manifest(Path(result["folder"])).loss_scale for result in (before, after))
    assert saved is not None
    assert resumed is not None
    common = saved.keys() & resumed.keys()
    assert {key: saved[key] for key in common} == {key: resumed[key] for key in common}
    assert saved["cur_iter"] == SAVED
    assert len(set(after["after"]["loss_scale"])) > 1
    if same_window:
        assert after["after"]["loss_scale"] == before["after"]["loss_scale"]


def test_all_ranks_reject_with_the_same_error(outcomes: Outcomes) -> None:
    for name, message in (("optimizer", "found FusedAdam in the checkpoint and SGD in this run"),
                          ("shape", "found shape (256, 64); expected (256, 32)"),
                          ("damaged", "mp_rank_01_model_states.pt: found an unreadable file")):
        errors = outcomes[name][1]["errors"]
        assert message in errors[0], errors
        assert errors[1] == errors[0]
