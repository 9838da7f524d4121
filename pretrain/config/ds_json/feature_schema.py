"""Legal keys of the JSON blocks for parallelism, compilation and data efficiency, and why the others are rejected.

Each reason was found in the source of DeepSpeed 0.19.8, or by running it; ds_configs/features.md lists them all.
"""

from pretrain.config.ds_json.key import BOOL, COUNT, POSITIVE, Key, Tree, ignored, rejected

# This program's own layers are tensor- and expert-parallel; the blocks give the degrees only.
_AUTO_TP = "AutoTP, which would replace linear layers, is not used: the layers here are tensor-parallel; remove the key"
_AUTO_EP = "AutoEP, which would replace layers, is not used: the layers here share the experts; remove the key"
_TP_SIZE: Tree = {
    "tp_size": POSITIVE,
    "tp_grain_size": rejected(_AUTO_TP, 1),
    "mpu": rejected("the engine gets its groups of ranks from the degrees; remove the key"),
    "tp_group": rejected("the engine gets its groups of ranks from the degrees; remove the key"),
}
TENSOR_PARALLEL: Tree = {
    "autotp_size": COUNT,
    "tensor_parallel": _TP_SIZE,
    "tp": _TP_SIZE,
    "dtype": rejected('"bf16" and "fp16" select the precision; remove the key'),
    "vocab_parallel_lm_head": rejected("the output matrix is always divided among the ranks; remove the key", True),
    "vocab_parallel_ce_backend": rejected("the loss has its own kernel; remove the key", "torch"),
    **{name: rejected(_AUTO_TP) for name in (
        "tp_overlap_comm", "injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host",
        "replace_with_kernel_inject", "kernel_inject")},
}
_ROUTER = "the model's config.json describes router and experts; remove the key"
EXPERT_PARALLEL: Tree = {
    "enabled": BOOL,
    "autoep_size": POSITIVE,
    "expert_tensor_parallel_size": rejected("each expert is complete on its rank; remove the key", 1),
    "load_balance_coeff": rejected("the config.json has router_aux_loss_coef; remove the key"),
    **{name: rejected(_ROUTER, "auto") for name in (
        "top_k", "score_func", "score_apply", "routed_scaling_factor", "route_norm", "num_expert_groups",
        "num_limited_groups", "has_shared_experts", "expert_activation")},
    "route_scale": rejected(_ROUTER, 1, 1.0),
    **{name: rejected(_AUTO_EP, *neutral) for name, neutral in {
        "preset_model": (), "moe_layer_pattern": (), "expert_pattern": (), "router_pattern": (), "expert_w1": (),
        "expert_w2": (), "expert_w3": (), "num_experts_attr": (), "top_k_attr": (), "shared_experts_pattern": (),
        "shared_experts_gate_pattern": (), "use_grouped_mm": (True,), "disable_triton_grouped_mm": (),
        "combine_impl": ("auto",), "row_weighting_impl": ("auto",), "gate_up_impl": ("separate",),
        "comm_backend": ("comm",), "comm_num_sm": (12,), "comm_qp_margin": (4,), "comm_max_tokens_per_rank": (0,),
        "validate_folding_routing": (), "async_split_plan": ()}.items()},
}
_DEEPCOMPILE = "DeepCompile is not supported: it needs CUDA and one graph of the complete model, which has ZeRO's " \
    "collectives inside; use --compile_blocks, and remove the block"
COMPILE: Tree = {
    **{name: rejected(_DEEPCOMPILE) for name in (
        "deepcompile", "free_activation", "offload_activation", "offload_opt_states", "offload_parameters",
        "symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
        "sync_after_allgather", "keep_all_input_tensors")},
    "autoep_non_moe": rejected(_AUTO_EP),
    **{name: rejected(_DEEPCOMPILE, default) for name, default in {
        "free_activation_threshold": 10 * 1024 * 1024, "offload_activation_pin_memory": True, "double_buffer": True,
        "keep_int_input_tensors": True}.items()},
    "passes": rejected(_DEEPCOMPILE, []),
    # keys of earlier versions of DeepSpeed, which compiled the model: read as --compile_blocks
    "enabled": BOOL,
    "disable": BOOL,
    "backend": Key("str", choices=("inductor",)),
    "kwargs": rejected("--compile_blocks takes no options; remove the key"),
}
_OFF = "no feature of the block is supported"
_SAMPLER = "batches come from --train_data and its own order, which resumes exactly; "
_CURRICULUM = f"{_SAMPLER}--seq_length_schedule trains with growing lengths, and --blend_schedule with changing data"
_RANDOM_LTD = "random layer-token dropping replaces layers by DeepSpeed's RandomLayerTokenDrop, which needs other " \
    "models; remove the block"
_SAMPLING = f"{_SAMPLER}remove the key"
DATA_EFFICIENCY: Tree = {
    "enabled": ignored(_OFF),
    "seed": ignored("--seed gives the seed", 1234, kind="int"),
    "data_sampling": {
        "enabled": ignored(_OFF),
        "num_epochs": rejected(_SAMPLING, 1000),
        "num_workers": rejected(_SAMPLING, 0),
        "pin_memory": rejected(_SAMPLING),
        "curriculum_learning": rejected(_CURRICULUM),
        "dynamic_batching": rejected(f"{_SAMPLER}--batch_schedule changes the batch size; remove the block"),
    },
    "data_routing": {"enabled": ignored(_OFF), "random_ltd": rejected(_RANDOM_LTD)},
}
