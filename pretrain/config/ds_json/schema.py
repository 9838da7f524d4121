"""Legal keys of a DeepSpeed 0.19.8 JSON at every depth, and why others are rejected, without importing deepspeed.

Each reason was found in the source of DeepSpeed 0.19.8, or by running it; pretrain/pages/deepspeed_json.md lists them
all. A key that earlier supported versions do not have names its first version (`Key.since`).

`tests/config/test_schema.py` compares this tree with the models and constants of the installed DeepSpeed.
"""

from dataclasses import dataclass
from typing import Any, Union

from pretrain.distributed.requirements import EXPERTS_SINCE

DEFAULT_REDUCE_BUCKET_SIZE = 500_000_000  # elements; DeepSpeed's default
DEFAULT_PARTITION_METHOD = "flops"
PARTITION_METHODS = {"flops": "flops", "parameters": "parameters", "uniform": "uniform", "time": "time",
                     "best": DEFAULT_PARTITION_METHOD}  # DeepSpeed's name for the default


@dataclass(frozen=True)
class Key:
    """Legal values of one key of the JSON, and whether the key has an effect in this program."""

    kind: str = "any"  # bool, int, number, str, list (of strings), pair (two numbers), interval (number or inf)
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()  # legal strings
    other_names: tuple[tuple[str, str], ...] = ()  # (another legal string, the choice that it means)
    auto: bool = False  # "auto" is legal; flags, model or run length fill it
    null: bool = False
    rejected: str = ""  # why every value but the neutral ones is rejected, and what to do instead
    neutral: tuple[Any, ...] = ()  # values that request nothing (besides false, null, {} and "enabled": false)
    ignored: str = ""  # why no value has an effect here: the key is left out, with a note
    since: str = ""  # first version of DeepSpeed that has the key; "": all that are supported


Tree = dict[str, Union[Key, "Tree"]]

_BOOL = Key("bool")
_COUNT = Key("int", low=0)
_POSITIVE = Key("int", low=1)


def _rejected(reason: str, *neutral: Any) -> Key:
    """Return a key that is rejected, except with neutral values."""
    return Key(rejected=reason, neutral=neutral)


def _ignored(reason: str, *neutral: Any, kind: str = "bool", low: float | None = None,
            high: float | None = None) -> Key:
    """Return a key that has no effect in this program; a note gives the reason."""
    return Key(kind, low, high, null=True, neutral=neutral, ignored=f"no effect: {reason}")

_TEXT = Key("str", null=True)
_BATCH = Key("int", low=1, high=2**31 - 1, auto=True)
_PRECISION = ("fp16", "bf16", "fp32")
# runtime/config.py, DtypeEnum, which "data_types" has and "communication_data_type" does not
_DTYPE_NAMES = (("torch.float16", "fp16"), ("float16", "fp16"), ("half", "fp16"), ("torch.bfloat16", "bf16"),
                ("bfloat16", "bf16"), ("torch.float32", "fp32"), ("float32", "fp32"), ("float", "fp32"))
_NOT_YET = "not supported by this version"
_CHECKPOINTING = '"pipeline": {"activation_checkpoint_interval": k} recomputes every k blocks'
_SHARDS_ALREADY = "tensor-parallel ranks send their own shards of the sequences to the next pipeline stage"

_OFFLOAD_PARAM: Tree = {
    "device": Key("str", choices=("none", "cpu", "nvme")),
    "nvme_path": Key("str", auto=True, null=True),
    "buffer_count": Key("int", low=1),
    "buffer_size": _COUNT,
    "max_in_cpu": _COUNT,
    "pin_memory": _BOOL,
}
_OFFLOAD_OPTIMIZER: Tree = {
    "device": Key("str", choices=("none", "cpu", "nvme")),
    "nvme_path": Key("str", auto=True, null=True),
    "buffer_count": Key("int", low=4),  # weights, two optimizer states and the gradient of a sub-group at once
    "pin_memory": _BOOL,
    "pipeline_read": _BOOL,
    "pipeline_write": _BOOL,
    "fast_init": _BOOL,
    "ratio": _rejected("DeepSpeed 0.19.8 neither saves the optimizer states of the part on the device, nor schedules "
                       "its learning rate; remove the key to offload everything", 1, 1.0),
    "super_offload": _rejected("DeepSpeed 0.19.8 keeps SuperOffload's optimizer states in another process, and does "
                               "not save them; remove the key"),
    "cpuadam_cores_perc": _ignored('it belongs to "super_offload"', 0.8, kind="number", low=0, high=1),
}
_GATHER = _ignored("`ds-pretrain checkpoint consolidate` writes the complete weights")
_STAGE3: Tree = {
    "prefetch_bucket_size": Key("int", low=0, auto=True),
    "param_persistence_threshold": Key("int", low=0, auto=True),
    "model_persistence_threshold": _COUNT,
    "max_live_parameters": _COUNT,
    "max_reuse_distance": _COUNT,
    "gather_16bit_weights_on_model_save": _GATHER,
    "module_granularity_threshold": _COUNT,
    "use_all_reduce_for_fetch_params": _BOOL,
    "allgather_sequential": _BOOL,
}
# Keys of earlier versions, which DeepSpeed still reads: "cpu_offload": true is "offload_optimizer": {"device": "cpu"}.
OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
ZERO: Tree = {
    "stage": Key("int", low=0, high=3),
    "contiguous_gradients": _BOOL,
    "reduce_scatter": _BOOL,
    "reduce_bucket_size": Key("int", low=1, auto=True),
    "use_multi_rank_bucket_allreduce": _BOOL,
    "allgather_partitions": _BOOL,
    "allgather_bucket_size": Key("int", low=1),
    "overlap_comm": Key("bool", null=True),
    "compute_grad_norm": _ignored("every log line has the gradient norm", True),
    "load_from_fp32_weights": _BOOL,
    "elastic_checkpoint": _ignored("checkpoints resume on any number of ranks"),
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": _rejected("DeepSpeed 0.19.8 neither saves ZenFlow's second optimizer, nor keeps "
                         "gradient_accumulation_steps with it; use offload_optimizer alone"),
    "sub_group_size": _COUNT,
    "cpu_offload_param": Key("bool", null=True),
    "cpu_offload_use_pin_memory": _ignored('DeepSpeed reads "pin_memory" in the offload blocks'),
    "cpu_offload": Key("bool", null=True),
    **_STAGE3,
    **{f"stage3_{name}": key for name, key in _STAGE3.items()},
    "stage3_gather_fp16_weights_on_model_save": _GATHER,
    "ignore_unused_parameters": _BOOL,
    "legacy_stage1": _rejected("DeepSpeed has removed it; remove the key"),
    "round_robin_gradients": _BOOL,
    "parameter_alignment": Key("bool", since="0.19.7"),
    "zero_hpz_partition_size": _COUNT,
    "zero_quantized_weights": _BOOL,
    "zero_quantized_nontrainable_weights": _ignored("every parameter is trained"),
    "zero_quantized_gradients": _BOOL,
    "memory_efficient_linear": _BOOL,
    "pipeline_loading_checkpoint": _rejected(f"{_NOT_YET}; remove the key"),
    "override_module_apply": _BOOL,
    "log_trace_cache_warnings": _BOOL,
    "enable_sanity_checks": _BOOL,
    "save_muon_momentum_buffer_in_memory": _BOOL,
    "leaf_module": _rejected("the models here have no such modules; remove the block"),
}
FP16: Tree = {
    "enabled": Key("bool", auto=True),
    "auto_cast": _ignored("the model's inputs are token numbers, which are not cast"),
    "loss_scale": Key("number", low=0),
    "initial_scale_power": Key("int", low=0, high=32),
    "loss_scale_window": _COUNT,
    "hysteresis": _POSITIVE,
    "consecutive_hysteresis": _BOOL,
    "min_loss_scale": _COUNT,
    "fp16_master_weights_and_grads": _BOOL,
}
BF16: Tree = {
    "enabled": Key("bool", auto=True),
    "immediate_grad_update": _BOOL,
    "check_grad_overflow": _ignored("an update with a non-finite gradient is always skipped", True),
    "bf16_master_weights_and_grads": _BOOL,
    "bf16_optimizer_states": _BOOL,
}
PIPELINE: Tree = {
    "stages": _POSITIVE,
    "partition": Key("str"),
    "partition_method": Key("str"),
    "activation_checkpoint_interval": _COUNT,
    "use_reentrant": _rejected("re-entrant checkpointing fails with these models; write false"),
    "seed_layers": _rejected("initial weights depend on --seed and the parameter's name alone; remove the key"),
    "pipe_partitioned": _ignored(_SHARDS_ALREADY, False),
    "grad_partitioned": _ignored(_SHARDS_ALREADY, False),
}
DATA_TYPES: Tree = {
    "grad_accum_dtype": Key("str", choices=_PRECISION, other_names=_DTYPE_NAMES, null=True),
    "param_dtype": Key("str", choices=_PRECISION, other_names=_DTYPE_NAMES, null=True),
    "buffer_dtype": _rejected("the models keep their few buffers in fp32; remove the key"),
    "keep_in_fp32_modules": _rejected("the models keep their few buffers in fp32; remove the key", "auto", []),
}
CHECKPOINT: Tree = {
    "tag_validation": Key("str", choices=("WARN", "IGNORE", "FAIL")),
    "checkpoint_serialization": _BOOL,
    "parallel_write": {"pipeline_stage": _BOOL},
    "load_universal": _rejected(f"universal checkpoints are {_NOT_YET}; remove the key"),
    "use_node_local_storage": _rejected("all machines share the run folder (--save); remove the key"),
    "writer": _rejected("these writers cannot read their own files back in DeepSpeed 0.19.8; remove the block"),
}
MONITORS: Tree = {
    "tensorboard": {"enabled": _BOOL, "output_path": Key("str"), "job_name": Key("str")},
    "csv_monitor": {"enabled": _BOOL, "output_path": Key("str"), "job_name": Key("str")},
    "wandb": {"enabled": _BOOL, "group": _TEXT, "team": _TEXT, "project": Key("str")},
    "comet": {
        "enabled": _BOOL, "samples_log_interval": _POSITIVE, "project": _TEXT, "workspace": _TEXT, "api_key": _TEXT,
        "experiment_name": _TEXT, "experiment_key": _TEXT, "online": Key("bool", null=True),
        "mode": Key("str", choices=("get", "create", "get_or_create"), null=True),
    },
}
# The block configures how layers are recomputed; it turns nothing on. DeepSpeed's own checkpointing functions are not
# called. model/run_layers.py does what cpu_checkpointing asks for.
ACTIVATION_CHECKPOINTING: Tree = {
    "number_checkpoints": _ignored(_CHECKPOINTING, kind="int", low=0),
    "cpu_checkpointing": Key("bool", null=True),
    **{name: _ignored(_CHECKPOINTING)
       for name in ("partition_activations", "contiguous_memory_optimization", "synchronize_checkpoint_boundary",
                    "profile")},
}
# Blocks of other programs' JSONs that DeepSpeed does not read. They only ask for reports, so that no value changes the
# training. A monitor that is on would stay silent, and is rejected.
_MONITORS_ELSEWHERE = 'DeepSpeed reads monitors at the top level only; move the block out of "monitor_config"'
UNREAD: Tree = {
    "comms_config": {"verbose": _ignored('DeepSpeed reads "comms_logger" instead'),
                     "comms_logger": _rejected('DeepSpeed reads "comms_logger" at the top level only; move it there')},
    "monitor_config": {"enabled": _ignored("DeepSpeed reads the block of each monitor at the top level"),
                       "tag": _ignored("DeepSpeed does not read it", kind="str"),
                       **{name: _rejected(_MONITORS_ELSEWHERE) for name in MONITORS}},
}
# This program's own layers are tensor- and expert-parallel; the blocks give the degrees only.
_AUTO_TP = "AutoTP, which would replace linear layers, is not used: the layers here are tensor-parallel; remove the key"
_AUTO_EP = "AutoEP, which would replace layers, is not used: the layers here share the experts; remove the key"
_TP_SIZE: Tree = {
    "tp_size": _POSITIVE,
    "tp_grain_size": _rejected(_AUTO_TP, 1),
    "mpu": _rejected("the engine gets its groups of ranks from the degrees; remove the key"),
    "tp_group": _rejected("the engine gets its groups of ranks from the degrees; remove the key"),
}
TENSOR_PARALLEL: Tree = {
    "autotp_size": _COUNT,
    "tensor_parallel": _TP_SIZE,
    "tp": _TP_SIZE,
    "dtype": _rejected('"bf16" and "fp16" select the precision; remove the key'),
    "vocab_parallel_lm_head": _rejected("the output matrix is always divided among the ranks; remove the key", True),
    "vocab_parallel_ce_backend": _rejected("the loss has its own kernel; remove the key", "torch"),
    **{name: _rejected(_AUTO_TP) for name in (
        "tp_overlap_comm", "injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host",
        "replace_with_kernel_inject", "kernel_inject")},
}
_ROUTER = "the model's config.json describes router and experts; remove the key"
EXPERT_PARALLEL: Tree = {
    "enabled": _BOOL,
    "autoep_size": Key("int", low=1, since=EXPERTS_SINCE),
    "expert_tensor_parallel_size": _rejected("each expert is complete on its rank; remove the key", 1),
    "load_balance_coeff": _rejected("the config.json has router_aux_loss_coef; remove the key"),
    **{name: _rejected(_ROUTER, "auto") for name in (
        "top_k", "score_func", "score_apply", "routed_scaling_factor", "route_norm", "num_expert_groups",
        "num_limited_groups", "has_shared_experts", "expert_activation")},
    "route_scale": _rejected(_ROUTER, 1, 1.0),
    **{name: _rejected(_AUTO_EP, *neutral) for name, neutral in {
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
    **{name: _rejected(_DEEPCOMPILE) for name in (
        "deepcompile", "free_activation", "offload_activation", "offload_opt_states", "offload_parameters",
        "symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
        "sync_after_allgather", "keep_all_input_tensors")},
    "autoep_non_moe": _rejected(_AUTO_EP),
    **{name: _rejected(_DEEPCOMPILE, default) for name, default in {
        "free_activation_threshold": 10 * 1024 * 1024, "offload_activation_pin_memory": True, "double_buffer": True,
        "keep_int_input_tensors": True}.items()},
    "passes": _rejected(_DEEPCOMPILE, []),
    # keys of earlier versions of DeepSpeed, which compiled the model: read as --compile_blocks
    "enabled": _BOOL,
    "disable": _BOOL,
    "backend": Key("str", choices=("inductor",)),
    "kwargs": _rejected("--compile_blocks takes no options; remove the key"),
}
_OFF = "no feature of the block is supported"
_SAMPLER = "batches come from --train_data and its own order, which resumes exactly; "
_CURRICULUM = f"{_SAMPLER}--seq_length_schedule trains with growing lengths, and --blend_schedule with changing data"
_RANDOM_LTD = "random layer-token dropping replaces layers by DeepSpeed's RandomLayerTokenDrop, which needs other " \
    "models; remove the block"
_SAMPLING = f"{_SAMPLER}remove the key"
DATA_EFFICIENCY: Tree = {
    "enabled": _ignored(_OFF),
    "seed": _ignored("--seed gives the seed", 1234, kind="int"),
    "data_sampling": {
        "enabled": _ignored(_OFF),
        "num_epochs": _rejected(_SAMPLING, 1000),
        "num_workers": _rejected(_SAMPLING, 0),
        "pin_memory": _rejected(_SAMPLING),
        "curriculum_learning": _rejected(_CURRICULUM),
        "dynamic_batching": _rejected(f"{_SAMPLER}--batch_schedule changes the batch size; remove the block"),
    },
    "data_routing": {"enabled": _ignored(_OFF), "random_ltd": _rejected(_RANDOM_LTD)},
}
TREE: Tree = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "managed_gradient_accumulation": _rejected("the engine counts a step's micro-batches; remove the key", True),
    "optimizer": {"type": Key("str"), "params": {},
                  "legacy_fusion": _rejected("it is for checkpoints of old versions; remove the key")},
    "scheduler": {"type": Key("str"), "params": {}},
    "gradient_clipping": Key("number", low=0, auto=True),
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "torch_autocast": _rejected("it clips scaled gradients under ZeRO and crashes with a pipeline; use bf16 or fp16"),
    "data_types": DATA_TYPES,
    "zero_optimization": ZERO,
    "zero_allow_untested_optimizer": _BOOL,
    "zero_force_ds_cpu_optimizer": _ignored("the JSON or the flags choose the optimizer", True),
    "allgather_size": _ignored('it belongs to "zero_optimization": true, of old versions', kind="int", low=1),
    "pipeline": PIPELINE,
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
    "communication_data_type": Key("str", choices=_PRECISION, null=True),
    "seq_parallel_communication_data_type": Key("str", choices=_PRECISION, null=True),
    "prescale_gradients": _BOOL,
    "gradient_predivide_factor": Key("number", low=1),  # a smaller one would overflow sums in fp16
    "gradient_allreduce_op": _rejected('the loss is a mean over the tokens of all ranks; use "mean"', "mean"),
    "disable_allgather": _ignored("DeepSpeed 0.19.8 does not read it"),
    "checkpoint": CHECKPOINT,
    **MONITORS,
    "flops_profiler": {
        "enabled": _BOOL, "recompute_fwd_factor": Key("number", low=0), "profile_step": _POSITIVE,
        "module_depth": Key("int", low=-1), "top_modules": _POSITIVE, "detailed": _BOOL, "output_file": _TEXT,
    },
    "comms_logger": {
        "enabled": _BOOL, "prof_all": _BOOL, "prof_ops": Key("list"), "verbose": _BOOL, "debug": _BOOL,
    },
    "aio": {
        "block_size": _POSITIVE, "queue_depth": _POSITIVE, "intra_op_parallelism": _POSITIVE,
        "thread_count": Key("int", low=1, ignored='no effect: DeepSpeed 0.19.8 reads "intra_op_parallelism" instead'),
        "single_submit": _BOOL, "overlap_events": _BOOL, "use_gds": _BOOL,
    },
    "timers": {"throughput": {"enabled": _BOOL, "synchronized": _BOOL}},
    "steps_per_print": Key("interval", low=1, null=True, auto=True),
    "wall_clock_breakdown": _BOOL,
    "memory_breakdown": _BOOL,
    "dump_state": _BOOL,
    "disable_python_gc": Key("bool", since="0.19.8"),
    "log_level": _rejected("use --deepspeed_log_level"),
    "vocabulary_size": _ignored("the vocabulary is that of --model", kind="int", low=1),
    "dataloader_drop_last": _ignored("every batch of --train_data is complete"),
    "data_efficiency": DATA_EFFICIENCY,
    "autotuning": _rejected("DeepSpeed's autotuner is not supported; `ds-pretrain compare` predicts memory and step "
                            "time of each layout, and writes the JSON of the best; remove the block"),
    "compile": COMPILE,
    "hybrid_engine": _rejected("it generates text for RLHF, not for pretraining; remove the block"),
    "weight_quantization": _rejected("it affects inference only; remove the block"),
    "tensor_parallel": TENSOR_PARALLEL,
    "expert_parallel": EXPERT_PARALLEL,
    "sequence_parallel_size": _POSITIVE,
    "use_data_before_expert_parallelism": _rejected("neighboring ranks share the experts, so that tokens travel "
                                                    "inside of a host; remove the key"),
    "datastates_ckpt": _rejected("this checkpoint engine cannot be imported in DeepSpeed 0.19.8; remove the block"),
}

# Blocks that DeepSpeed reads with pydantic models, which treat "auto" as a missing key.
BLOCKS_WITH_DEFAULTS = ("zero_optimization", "fp16", "bf16", "bfloat16", "tensorboard", "csv_monitor", "wandb", "comet",
                        "comms_logger")

# Keys that DeepSpeed has removed, with its reason. DeepSpeed rejects every value. This program accepts values that turn
# nothing on.
REMOVED: dict[str, str] = {
    "nebula": "Nebula checkpointing has been removed",
    "compression_training": "the DeepSpeed compression library has been removed",
    "amp": "NVIDIA Apex AMP integration has been removed; use fp16 or bf16",
    "quantize_training": "Mixture-of-Quantization has been removed",
    "sparse_gradients": "sparse compression of dense embedding gradients has been removed",
    "eigenvalue": "eigenvalue-based Mixture-of-Quantization has been removed",
    "sparse_attention": "DeepSpeed Sparse Attention has been removed",
    "elasticity": "elastic training has been removed; set the batch sizes directly",
    "graph_harvesting": "graph harvesting has been removed",
    "curriculum_learning": "the legacy curriculum has been removed",
    "progressive_layer_drop": "Progressive Layer Dropping has been removed",
    "zero_optimization.mics_shard_size": "MiCS has been removed; use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS has been removed; use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "LoCo-Zero++ has been removed",
}
