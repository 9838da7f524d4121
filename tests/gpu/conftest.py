"""Tests on a CUDA GPU: `pytest -m gpu`. Without one they are skipped."""

import re

import pytest

from pretrain.distributed.device import wants_cpu

# The cases that say most about a GPU in 8 minutes, `pytest -m gpu_short`, as patterns of their names: 36 starts of
# about 12 s on one GPU and 16 cores. Six of them compare FusedAdam with torch's AdamW, and are skipped without nvcc.
SHORT = (
    r"test_every_layout_trains\[zero[0123]_bf16\]", r"test_every_layout_trains\[zero1_fp16\]",
    r"test_every_layout_trains\[zero2_offload_optimizer_cpu\]", r"test_losses_in_fp32_equal_those_of_the_cpu\[[03]\]",
    r"test_a_resumed_run_has_the_same_bits\[3\]", r"test_a_model_with_experts_trains_as_on_the_cpu\[2\]",
    r"test_memory_is_predicted_within_a_tenth\[(gpt2-[13]-usual|llama3-1b-2-recompute)\]",
    r"test_the_host_.*\[[0123]\]", r"test_the_chosen_operators_are_named",
    r"test_compiled_blocks_have_equal_losses\[(gpt2-1|llama3-1b-3)\]",
    r"test_both_kinds_of_fused_adamw_are_equal_and_read_each_other",
    r"test_flex_attention_equals_dense_masks\[(300-.*-64|0-0.0-True-.*-64|0-30.0-.*-256).*\]",
    r"test_the_fused_loss_waits_for_nothing_and_is_precise\[.*\]",
    r"test_grouped_experts_wait_for_nothing_and_are_precise",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "needs a CUDA GPU and a CUDA build of torch; DS_ACCELERATOR=cpu must not be set"
    mine = [item for item in items if "/gpu/" in item.nodeid]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if any(re.fullmatch(pattern, item.name) for pattern in SHORT):
            item.add_marker(pytest.mark.gpu_short)
        if wants_cpu():
            item.add_marker(pytest.mark.skip(reason=reason))
    unknown = [pattern for pattern in SHORT if not any(re.fullmatch(pattern, item.name) for item in mine)]
    if "gpu_short" in config.getoption("-m") and unknown:
        raise pytest.UsageError(f"tests/gpu has no cases {unknown}")
