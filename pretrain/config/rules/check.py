"""The list of all rules, and their check."""

from collections.abc import Callable

from pretrain.config.resolve import ResolvedConfig
from pretrain.config.rules import (
    expert_parallel_rules,
    expert_rules,
    layout_rules,
    optimizer_rules,
    parallel_rules,
    pipeline_rules,
    profile_rules,
    recipe_rules,
    recompute_rules,
    run_rules,
    sequence_rules,
)

RULES: tuple[Callable[[ResolvedConfig], None], ...] = (
    parallel_rules.degrees_together, parallel_rules.even_shares, parallel_rules.optimizer_of_parts,
    parallel_rules.zero_plus_plus_of_parts, parallel_rules.compiled_parts,
    expert_rules.flags_of_experts, expert_rules.experts_on_shards, expert_rules.compiled_experts,
    expert_rules.experts_without_mup, expert_parallel_rules.experts_of_model, expert_parallel_rules.zero_of_experts,
    expert_parallel_rules.noise_scale_of_experts,
    pipeline_rules.partition_matches_layers, pipeline_rules.stages_have_blocks,
    layout_rules.precision_of_device, layout_rules.offload_needs_a_zero_stage, layout_rules.stage_3_names,
    layout_rules.zero_plus_plus, layout_rules.quantized_weights,
    layout_rules.even_allgather_bucket, layout_rules.accumulation_dtype,
    layout_rules.low_precision_master_weights, layout_rules.gradient_scaling, optimizer_rules.optimizer_of_device,
    optimizer_rules.eight_bit, optimizer_rules.muon, optimizer_rules.muon_learning_rates,
    optimizer_rules.optimizer_params, layout_rules.dynamic_loss_scale, layout_rules.libaio,
    layout_rules.operators_without_nvcc, layout_rules.nvme_buffer_size, optimizer_rules.scheduler_params,
    optimizer_rules.torch_optimizer_params, run_rules.measuring,
    run_rules.writable_folders, layout_rules.tf32_needs_fp32_on_cuda, run_rules.document_attention,
    run_rules.exit_step_within_run, recipe_rules.value_clipping, recipe_rules.adaptive_clipping,
    recipe_rules.noise_scale, recipe_rules.early_stopping,
    profile_rules.profiled_steps, profile_rules.pipeline_timeline, profile_rules.profiled_ranks,
    profile_rules.memory_snapshot,
    recompute_rules.one_setting_for_recomputation, recompute_rules.recompute_every, recompute_rules.mlp_tiles,
    recompute_rules.offload_needs_complete_blocks, sequence_rules.reduction_dtype,
    sequence_rules.noise_scale_of_shards,
)


def check_rules(run: ResolvedConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    for rule in RULES:
        rule(run)
