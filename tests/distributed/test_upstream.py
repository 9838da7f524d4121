"""Defects of DeepSpeed (`pretrain/engine/patches/apply.py`): results are right with this package.

`test_reproducers.py` shows the defects in DeepSpeed alone.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import check_run
from pretrain.distributed.device import Device
from pretrain.engine.operator_cache import cache_operators
from pretrain.engine.patches.optimizers import make_bias_correction_stateless
from tests.support.cases import NO_NVME
from tests.support.launch import run_worker
from tests.support.rejection import rejection

Results = dict[str, Any]

CPU = Device("cpu", fp16=False, bf16=True, memory_bytes=0)
SCALE = 2.0**8  # initial loss scale of the fp16 cases
ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
BF16 = {"bf16": {"enabled": True}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
TWO_STAGES = {"pipeline": {"stages": 2}}
BUCKETS = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
CPU_OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
EMULATE: dict[str, Any] = {"emulate_fp16": True, "train_steps": 6}
NEEDS_NVME = pytest.mark.skipif(bool(NO_NVME), reason=f"NVMe offload: {NO_NVME}")


def ds_config(stage: int, zero: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
            "optimizer": ADAM, "zero_optimization": {"stage": stage, **BUCKETS, **(zero or {})}, **changes}


def flags(corpus: str, **changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "model_overrides": "vocab_size=256,n_layer=2,n_embd=64", "train_data": corpus,
            "seq_length": 32, "train_steps": 4, "lr_schedule": "constant", "lr_warmup_steps": 0, "split": "9,1,0",
            "eval_steps": 1, **changes}


def one(name: str, config: dict[str, Any], given: dict[str, Any], job: str = "train") -> dict[str, Any]:
    return {"name": name, "job": job, "config": config, "flags": given}


def pipeline_cases(corpus: str) -> list[dict[str, Any]]:
    """Return cases for A, B, K, P, U and W: two pipeline stages with a tied embedding."""
    fp16, tied = flags(corpus, **EMULATE), flags(corpus)
    half = {"fp16": FP16, **TWO_STAGES}
    torch_adam = {**ADAM, "params": {**ADAM["params"], "torch_adam": True}}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "gradient_clipping": 0.5, **TWO_STAGES}
    unclipped = {**sgd, "gradient_clipping": 0, "zero_allow_untested_optimizer": True}
    return [
        one("fp16_stage_0", ds_config(0, **half), fp16),
        one("fp16_torch_adam", ds_config(0, **{**half, "optimizer": torch_adam}), fp16),
        one("fp16_stage_1", ds_config(1, **half), fp16),
        one("fp16_growing", ds_config(1, **unclipped, fp16={**FP16, "loss_scale_window": 1}), fp16),
        one("fp16_static", ds_config(1, **unclipped, fp16={"enabled": True, "loss_scale": SCALE}), fp16),
        one("fp16_construction", ds_config(0, **half), fp16, job="construction"),
        one("tied_bf16", ds_config(1, CPU_OPTIMIZER, **BF16, **FP32_SUM, **TWO_STAGES), tied),
        one("tied_bf16_optimizer", ds_config(1, **BF16, **FP32_SUM, **TWO_STAGES), tied),
        one("tied_fp16", ds_config(1, **half, **FP32_SUM), fp16),
        one("fp32_stage_0", ds_config(0, **sgd), tied),
        one("fp32_stage_1", ds_config(1, **sgd, zero_allow_untested_optimizer=True), tied),
        one("bf16_stage_0", ds_config(0, **BF16, **TWO_STAGES), tied, job="resume"),
        one("initial_pipeline", ds_config(1, **BF16, **TWO_STAGES), tied, job="initial_weights"),
    ]


def nvme_cases(corpus: str, folder: Path) -> list[dict[str, Any]]:
    """Return cases for C: sub-groups that remain in memory (under 1 MiB), swapped sub-groups, swapped parameters."""
    if NO_NVME:
        return []
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    large = flags(corpus, model_overrides="vocab_size=256,n_layer=4,n_embd=256")
    params = {**nvme, "buffer_size": 200_000, "max_in_cpu": 0}
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 1000, "sub_group_size": 1_000_000}
    swapped = ds_config(3, {**zero, "offload_optimizer": nvme}, **BF16)
    return [
        one("nvme_small", swapped, flags(corpus), job="nvme"),
        one("nvme_large", swapped, large, job="nvme"),
        one("nvme_params", ds_config(3, {**zero, "offload_param": params, **CPU_OPTIMIZER}, **BF16), large,
            job="resume"),
    ]


def other_cases(corpus: str) -> list[dict[str, Any]]:
    """Return cases for initial weights under ZeRO-3, R and S."""
    return [
        one("initial_zero3", ds_config(3, **BF16), flags(corpus), job="initial_weights"),
        *(one(f"sequence_zero{stage}", ds_config(stage, sequence_parallel_size=2), flags(corpus), job="losses")
          for stage in (2, 3)),
        {"name": "partition_dtypes", "job": "partition_dtypes"},
    ]


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of all cases by name. One launch of two ranks runs all cases."""
    folder, disk = (tmp_path_factory.mktemp(name) for name in ("upstream", "nvme"))
    cases = [*pipeline_cases(corpus), *nvme_cases(corpus, disk), *other_cases(corpus)]
    return run_worker("upstream_worker.py", cases, 2, folder)


def rejection_of(config: dict[str, Any], corpus: str, folder: Path, ranks: int = 2) -> str:
    """Return the error of a run with this DeepSpeed JSON."""
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    words = [f"--{name}={value}" for name, value in flags(corpus, save=folder / "run").items()]
    run = [f"--deepspeed_config={path}", *words]
    return rejection(lambda: check_run(parse_arguments(run), world_size=ranks, device=CPU))


def close(values: list[float], tolerance: float) -> Any:
    return pytest.approx(values, rel=tolerance)


# --- A, P, W, AF

def test_a_fp16_stage_0_scales_the_loss(results: Results) -> None:
    ours, stage_1 = results["fp16_stage_0"], results["fp16_stage_1"]
    assert ours["optimizer"] == "FP16_Optimizer"
    assert ours["loss_scale"][0] == SCALE
    assert ours["loss"] == close(stage_1["loss"], 5e-4)
    assert ours["grad_norm"] == close(stage_1["grad_norm"], 5e-3)


def test_a_fp16_stage_0_divides_by_the_scale_that_was_used(results: Results) -> None:
    ours, stage_1 = results["fp16_stage_0"], results["fp16_stage_1"]
    grows = 2  # index of the first step after which the loss scale has doubled
    for rows in (ours, stage_1):
        assert rows["loss_scale"][grows] == 2 * rows["loss_scale"][grows - 1] == 2 * SCALE
    assert ours["grad_norm"][grows] == pytest.approx(stage_1["grad_norm"][grows], rel=5e-3)


def test_w_fp16_stage_0_with_another_adam_has_the_same_norm(results: Results) -> None:
    ours, stage_1 = results["fp16_torch_adam"], results["fp16_stage_1"]
    assert ours["optimizer"] == "FP16_UnfusedOptimizer"
    assert ours["loss"] == close(stage_1["loss"], 5e-4)
    assert ours["grad_norm"] == close(stage_1["grad_norm"], 5e-3)


def test_af_fp16_stage_0_takes_no_step_at_construction(results: Results) -> None:
    assert results["fp16_construction"] == {"difference": 0.0, "adam_steps": 0}


def test_p_fp16_divides_by_the_scale_that_was_used(results: Results) -> None:
    assert results["fp16_growing"]["loss_scale"][-1] > 4 * SCALE
    assert results["fp16_growing"]["loss"] == close(results["fp16_static"]["loss"], 5e-4)


# --- B

@pytest.mark.parametrize(("name", "reference"), [("tied_bf16", "tied_bf16_optimizer"), ("tied_fp16", "fp16_stage_1")])
def test_b_tied_gradients_are_summed_over_the_stages(results: Results, name: str, reference: str) -> None:
    ours, right = results[name], results[reference]
    assert ours["optimizer"] == "DeepSpeedZeroOptimizer"
    assert ours["tied_difference"] == 0
    assert ours["loss"] == close(right["loss"], 1e-4)
    assert ours["grad_norm"] == close(right["grad_norm"], 1e-3)


# --- C

@NEEDS_NVME
@pytest.mark.parametrize(("name", "swapped"), [("nvme_small", [False, False]), ("nvme_large", [True, True, False])])
def test_c_nvme_checkpoints_are_complete(results: Results, name: str, swapped: list[bool]) -> None:
    ours = results[name]
    assert ours["swapped"] == swapped
    assert ours["consolidated"] == 0, "zero_to_fp32 gives other weights"
    for offload in ("nvme", "cpu"):
        assert ours[offload] == {"loaded": 0.0, "tail": ours["tail"], "final": 0.0}


@NEEDS_NVME
def test_c_nvme_parameters_can_be_resumed(results: Results) -> None:
    assert_resumed(results["nvme_params"])


def assert_resumed(result: Results) -> None:
    at_save, loaded, at_end, at_end_again = result["state"]
    assert (loaded, at_end_again) == (at_save, at_end)
    assert result["resumed"] == result["tail"]


# --- D to I

@pytest.mark.parametrize("stage", [1, 2])
def test_d_nvme_below_stage_3_is_rejected(stage: int, corpus: str, tmp_path: Path) -> None:
    config = ds_config(stage, {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}, **BF16)
    assert "offload_optimizer.device" in rejection_of(config, corpus, tmp_path)


def test_e_autocast_is_rejected(corpus: str, tmp_path: Path) -> None:
    config = ds_config(2, torch_autocast={"enabled": True, "dtype": "float16"})
    assert "torch_autocast" in rejection_of(config, corpus, tmp_path)


def test_f_zero3_starts_with_the_weights_of_a_plain_module(results: Results) -> None:
    assert results["initial_zero3"]["difference"] == 0


def test_g_pipeline_stages_start_with_different_weights(results: Results) -> None:
    ours = results["initial_pipeline"]
    assert ours["difference"] == 0, "a stage differs from the model in one process"
    assert ours["first_blocks"] > 1e-2
    assert len(set(ours["seeds"])) == 2, "dropout is the same on both stages"


def test_h_unknown_keys_are_rejected(corpus: str, tmp_path: Path) -> None:
    config = ds_config(2, **BF16)
    config["zero_optimisation"] = config.pop("zero_optimization")
    message = rejection_of(config, corpus, tmp_path)
    assert "zero_optimisation" in message
    assert "zero_optimization" in message, "no suggestion"


def test_i_sequence_parallelism_in_a_pipeline_is_rejected(corpus: str, tmp_path: Path) -> None:
    message = rejection_of(ds_config(1, **BF16, **TWO_STAGES, sequence_parallel_size=2), corpus, tmp_path, ranks=4)
    assert "sequence_parallel_size: found 2; expected 1 with pipeline stages" in message


# --- K, L, R, S, U

def test_k_fp32_stage_0_clips_by_the_norm_of_every_stage(results: Results) -> None:
    ours, stage_1 = results["fp32_stage_0"], results["fp32_stage_1"]
    assert min(stage_1["grad_norm"]) > 0.5, "nothing was clipped"
    assert ours["grad_norm"] == close(stage_1["grad_norm"], 1e-4)
    assert ours["loss"] == close(stage_1["loss"], 1e-5)


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
def test_l_adam_on_the_cpu_resumes_bit_exactly(kind: type[torch.optim.Optimizer]) -> None:
    cache_operators()  # otherwise DeepSpeed compiles the operator again
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = kind([parameter], lr=0.01, betas=(0.9, 0.95))
    make_bias_correction_stateless(optimizer)
    before = {}  # step -> weights and optimizer state before this step
    final = []
    for first in (0, *range(2, 20)):  # 0: an uninterrupted run; others: a run that resumes at this step
        if first > 0:
            parameter.data.copy_(before[first][0])
            optimizer.load_state_dict(before[first][1])
        for step in range(first, 30):
            before.setdefault(step, (parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())))
            parameter.grad = torch.sin(torch.arange(1000.0) + step)
            optimizer.step()
        final.append(parameter.detach().clone())
    assert all(torch.equal(final[0], weights) for weights in final)


def test_r_zero_3_sums_the_gradients_of_a_sequence(results: Results) -> None:
    assert results["sequence_zero3"]["grad_norm"] == close(results["sequence_zero2"]["grad_norm"], 1e-4)


def test_s_partitions_have_the_dtype_that_the_caller_names(results: Results) -> None:
    assert results["partition_dtypes"] == ["torch.float32", "torch.float16"]


def test_u_bf16_stage_0_pipeline_checkpoint_can_be_loaded(results: Results) -> None:
    assert_resumed(results["bf16_stage_0"])
