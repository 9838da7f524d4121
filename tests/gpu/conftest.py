"""Tests on a CUDA GPU: `pytest -m gpu`. Without one they are skipped."""

import pytest

from pretrain.distributed.device import wants_cpu

# The cases that say most about a GPU in 8 minutes, `pytest -m gpu_short`: 36 starts of about 12 s on one GPU and 16
# cores, of which the cases of FusedAdam (6 starts) are skipped without nvcc
SHORT = (
    *(f"test_every_layout_trains[{layout}]" for layout in (
        "zero0_bf16", "zero1_bf16", "zero2_bf16", "zero3_bf16", "zero1_fp16", "zero2_offload_optimizer_cpu")),
    "test_losses_in_fp32_equal_those_of_the_cpu[0]", "test_losses_in_fp32_equal_those_of_the_cpu[3]",
    "test_a_resumed_run_has_the_same_bits[3]", "test_a_model_with_experts_trains_as_on_the_cpu[2]",
    "test_memory_is_predicted_within_a_tenth[gpt2-1-usual]", "test_memory_is_predicted_within_a_tenth[gpt2-3-usual]",
    "test_memory_is_predicted_within_a_tenth[llama3-1b-2-recompute]",
    *(f"test_the_host_waits_only_in_deepspeeds_checks[{stage}]" for stage in range(4)),
    "test_the_chosen_operators_are_named", "test_compiled_blocks_have_equal_losses[gpt2-1]",
    "test_compiled_blocks_have_equal_losses[llama3-1b-3]",
    "test_both_kinds_of_fused_adamw_are_equal_and_read_each_other",
    *(f"test_flex_attention_equals_dense_masks[{case}]" for case in (
        "300-0.0-False-True-2-64", "0-0.0-True-False-8-64", "0-30.0-False-False-2-256")),
    "test_the_fused_loss_waits_for_nothing_and_is_precise[terms0]",
    "test_the_fused_loss_waits_for_nothing_and_is_precise[terms1]",
    "test_grouped_experts_wait_for_nothing_and_are_precise",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "needs a CUDA GPU and a CUDA build of torch; DS_ACCELERATOR=cpu must not be set"
    mine = [item for item in items if "/gpu/" in item.nodeid]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if item.name in SHORT:
            item.add_marker(pytest.mark.gpu_short)
        if wants_cpu():
            item.add_marker(pytest.mark.skip(reason=reason))
    if "gpu_short" in config.getoption("-m") and (unknown := set(SHORT) - {item.name for item in mine}):
        raise pytest.UsageError(f"tests/gpu has no cases {sorted(unknown)}")
