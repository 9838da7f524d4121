"""Names of settings in other training programs, and what has their meaning here. Used for hints in error messages.

The programs are transformers.Trainer and its examples, Megatron-LM, GPT-NeoX, torchtitan, litgpt and nanoGPT. A name of
a nested setting has a dot, as on the command line: training.steps. tests/config/test_other_programs.py compares the
tables with the settings of these programs, which tests/golden/other_programs.json lists.
"""

from pretrain.config.ds_json.schema import TREE, Key
from pretrain.model.families.table import FAMILIES

# Degrees as keys of the DeepSpeed JSON.
_DEGREES = {
    '"tensor_parallel": {"autotp_size": N}':
        "tp tp_size autotp_size model_parallel_size tensor_parallel_size tensor_model_parallel_size "
        "parallelism.tensor_parallel_degree",
    '"pipeline": {"stages": N}':
        "pp pp_size pipe_parallel_size pipeline_parallel_size pipeline_model_parallel_size "
        "parallelism.pipeline_parallel_degree",
    '"expert_parallel": {"enabled": true, "autoep_size": N}':
        "ep moe ep_size autoep_size moe_expert_parallel_size expert_parallel_size expert_model_parallel_size "
        "parallelism.expert_parallel_degree",
    '"sequence_parallel_size": N':
        "cp sp_size context_parallel_size ulysses_sequence_parallel_size parallelism.context_parallel_degree "
        "parallelism_config",
}
_FLAGS = {
    "--micro_batch_size": "per_device_train_batch_size batch_size device_batch_size train.micro_batch_size "
                          "train_micro_batch_size_per_gpu training.local_batch_size",
    "--micro_batch_size, in samples": "training.num_tokens_per_microbatch_per_dp_rank",
    "--global_batch_size": "train_batch_size train.global_batch_size training.global_batch_size",
    "--global_batch_size, in samples": "training.num_tokens_per_train_step total_batch_size",
    "--batch_schedule": "rampup_batch_size step_batch_size_schedule",
    "--train_steps": "max_steps train_iters max_iters train.max_steps training.steps num_train_steps num_iterations",
    "--train_steps or --train_tokens": "num_train_epochs train_epochs epochs train.epochs train_samples",
    "--train_tokens": "max_tokens train.max_tokens",
    "--learning_rate": "lr",
    "--lr_schedule": "lr_scheduler_type lr_decay_style lr_scheduler.decay_type decay_lr lr_scheduler_kwargs",
    "--lr_warmup_steps": "warmup_steps warmup_iters lr_warmup_iters train.lr_warmup_steps lr_scheduler.warmup_steps",
    "--lr_warmup_steps or --lr_warmup_tokens": "warmup warmup_ratio lr_warmup_fraction lr_warmup_samples "
                                               "train.lr_warmup_fraction",
    "--lr_decay_steps": "lr_decay_iters lr_scheduler.total_steps",
    "--lr_decay_steps or --lr_decay_tokens": "lr_decay_fraction lr_decay_samples",
    "--lr_schedule wsd with --lr_wsd_steps or --lr_wsd_tokens": "lr_wsd_decay_iters lr_wsd_decay_samples "
                                                                "wsd_decay_steps lr_scheduler.decay_ratio",
    "--lr_decay_shape": "lr_wsd_decay_style",
    "--min_lr": "train.min_lr",
    "--min_lr_ratio": "lr_scheduler.min_lr_factor",
    "--weight_decay": "wd",
    "--no_weight_decay": "no_weight_decay_cond_type",
    "--adam_beta1": "beta1",
    "--adam_beta2": "beta2",
    "--adam_epsilon": "adam_eps",
    "--gradient_accumulation_steps": "parallelism.num_pp_microbatches",
    "--gradient_clipping": "max_grad_norm clip_grad grad_clip max_norm train.max_norm training.max_norm "
                           "gradient_clip_val",
    "--precision": "bf16 fp16 dtype params_dtype training.dtype training.mixed_precision_param mixed_precision "
                   "autocast_dtype enable_autocast",
    "--label_smoothing": "label_smoothing_factor",
    "--router_aux_loss": "moe_aux_loss_coeff",
    "--router_z_loss": "moe_z_loss_coeff",
    "--expert_capacity_factor": "moe_expert_capacity_factor",
    "--residual_dropout and --embedding_dropout": "hidden_dropout dropout",
    "--init_std": "init_method_std",
    "--output_init_method": "output_layer_init_method",
    "--init_method xavier_uniform": "init_method_xavier_uniform",
    "--mup_base_width": "use_mup mup_base_hidden_size mup_width_mult mup_width_scale",
    "--seq_length": "block_size max_seq_len max_seq_length train.max_seq_length training.seq_len sequence_length "
                    "training.max_context_length model_max_length context_length decoder_seq_length",
    "--train_data": "data data_dir data_path data_args_path per_split_data_args_path train_data_path train_data_paths "
                    "train_data_weights train_file dataset dataset_name dataloader.dataset training.dataset",
    "--valid_data": "valid_data_path valid_data_paths validation_file",
    "--test_data": "test_data_path test_data_paths test_file",
    "--split": "validation_split_percentage",
    "--tokenizer": "tokenizer_model tokenizer_type tokenizer_name tokenizer_name_or_path tokenizer_dir tokenizer_path "
                   "vocab_file merge_file hf_assets_path",
    "--document_attention": "reset_attention_mask reset_position_ids dataloader_inter_document_masking",
    "--sample_order": "train_sampling_strategy",
    "--model": "model_name model_type model_config config_name",
    "--model, or --init_from to start from its weights": "model_name_or_path",
    "--init_from": "pretrained_checkpoint initial_checkpoint_dir finetune no_load_optim load_optim "
                   "checkpoint.initial_load_path checkpoint.initial_load_in_hf checkpoint.initial_load_model_only",
    "--save": "output_dir out_dir dump_folder save_dir checkpoint.folder",
    "--save_interval": "save_steps save_strategy checkpoint_interval checkpoint_factor checkpoint_scale "
                       "train.save_interval checkpoint.interval",
    "--save, from which a run resumes by itself (--resume), or --resume_from for another run":
        "load resume_from_checkpoint ckpt_step override_ckpt_iteration exit_on_missing_checkpoint checkpoint.load_step",
    "--keep_checkpoints": "save_total_limit keep_last_n_checkpoints most_recent_k checkpoint.keep_latest_k",
    "--keep_every": "save_retain_interval",
    "--keep_best": "load_best_model_at_end metric_for_best_model greater_is_better",
    "--async_save": "checkpoint.async_mode",
    "--checkpoint_mirror": "s3_path",
    "--override schedule": "override_opt_param_scheduler use_checkpoint_opt_param_scheduler override_lr_scheduler "
                           "use_checkpoint_lr_scheduler",
    "--log_interval": "logging_steps logging_strategy train.log_interval metrics.log_freq tensorboard_log_interval",
    "--eval_interval": "eval_strategy evaluation_strategy eval.interval validator.freq val_check_interval",
    "--eval_steps": "eval_iters eval.max_iters validator.steps",
    "--early_stopping_patience": "early_stopping",
    "--seed": "data_seed debug.seed random_seed",
    "--compile_blocks": "torch_compile torch_compile_backend torch_compile_mode compile compile.enable compile.backend "
                        "compile.components",
    "--recompute": "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
                   "activation_checkpointing_kwargs activation_checkpoint.mode checkpoint_activations "
                   "deepspeed_activation_checkpointing recompute_activations recompute_granularity recompute_method "
                   "recompute_modules moe_layer_recompute",
    "--recompute_every": "recompute_num_layers checkpoint_num_layers",
    "--exit_after_minutes": "exit_duration_in_mins train.max_time max_time",
    "--exit_step": "exit_interval",
    "--step_timeout": "ddp_timeout distributed_timeout_minutes comm.train_timeout_seconds "
                      "distributed_timeout_seconds_after_init",
    "--first_step_timeout": "comm.init_timeout_seconds",
    "--replica_check_interval": "check_weight_hash_across_dp_replicas_interval",
    "--spike_policy": "check_for_spiky_loss grad_norm_skip_threshold",
    "--max_bad_steps: updates that are not finite are always skipped":
        "check_for_nan_in_loss check_for_nan_in_grad check_for_nan_in_loss_and_grad "
        "no_check_for_nan_in_loss_and_grad logging_nan_inf_filter",
    "--noise_scale_interval": "log_gradient_noise_scale gradient_noise_scale_n_batches",
    "--profile_steps": "profile profile_step_start profile_step_end profile_step_stop use_pytorch_profiler "
                       "profiler.enable_profiling profiler.profile_freq",
    "--memory_snapshot": "record_memory_history memory_snapshot_path memory_profiling memory_profiling_path "
                         "profiler.enable_memory_snapshot profiler.memory_snapshot_freq",
    "--peak_tflops": "peak_theoretical_tflops",
    "--deepspeed_log_level": "log_level log_level_replica logging_level",
    "--deepspeed_config": "deepspeed deepscale_config",
    "--trackio": "project trackio_space_id trackio_bucket_id trackio_static_space_id",
}
_JSON = {
    **_DEGREES,
    '"zero_optimization": {"stage": N}':
        "zero_stage fsdp fsdp_config use_distributed_optimizer use_torch_fsdp2 use_megatron_fsdp use_custom_fsdp "
        "data_parallel_sharding_strategy parallelism.data_parallel_shard_degree "
        "parallelism.fsdp_reshard_after_forward",
    '"zero_optimization": {"zero_hpz_partition_size": N}':
        "parallelism.data_parallel_replicate_degree num_distributed_optimizer_instances",
    '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}':
        "optimizer_cpu_offload cpu_offload training.enable_cpu_offload use_torch_optimizer_for_cpu_offload",
    '"zero_optimization": {"overlap_comm": true}': "overlap_grad_reduce overlap_param_gather",
    '"zero_optimization": {"reduce_bucket_size": N}':
        "ddp_bucket_cap_mb bucket_size ddp_bucket_size zero_reduce_bucket_size",
    '"zero_optimization": {"reduce_scatter": true}': "zero_reduce_scatter",
    '"zero_optimization": {"contiguous_gradients": true}': "zero_contiguous_gradients",
    '"zero_optimization": {"allgather_bucket_size": N}': "zero_allgather_bucket_size",
    '"optimizer": {"type": NAME, "params": { ... }}':
        "optim optim_args optimizer optimizer_type use_bnb_optimizer sgd_momentum lion_beta1 lion_beta2 muon_momentum "
        "optimizer.name",
    '"optimizer": {"type": "AdamW8bit", ... }': "exp_avg_dtype exp_avg_sq_dtype use_precision_aware_optimizer",
    '"fp16": {"enabled": true, "loss_scale": 0, ... }':
        "loss_scale initial_loss_scale min_loss_scale min_scale loss_scale_window hysteresis dynamic_loss_scale",
    '"data_types": {"grad_accum_dtype": "fp32"}': "accumulate_allreduce_grads_in_fp32 main_grads_dtype",
    '"communication_data_type": "fp32"':
        "fp32_allreduce grad_reduce_in_bf16 grad_reduce_in_fp32 training.mixed_precision_reduce",
    '"pipeline": {"partition_method": ...}':
        "pipe_partition_method pipeline_model_parallel_layout decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_layers_per_stage",
    '"activation_checkpointing": {"cpu_checkpointing": true}':
        "cpu_offloading cpu_offloading_activations checkpoint_in_cpu fine_grained_activation_offloading",
    'the block of a monitor, such as "tensorboard": {"enabled": true} or "wandb": {"enabled": true},':
        "report_to tensorboard_dir log_dir logger_name use_wandb wandb_project wandb_group wandb_team wandb_entity "
        "run_name wandb_exp_name wandb_run_name log.project log.group log.run metrics.enable_wandb "
        "metrics.enable_tensorboard use_comet comet_workspace comet_project comet_experiment_name comet_experiment",
}
_OTHERS = {
    "it is a flag of the launcher: ds-pretrain --help lists them":
        "nnodes nproc_per_node num_nodes num_gpus num_accelerators devices hostfile include exclude master_addr "
        "master_port node_rank launcher launcher_args world_size distributed_backend ddp_backend check_only",
    "set the environment variable DS_ACCELERATOR=cpu": "use_cpu no_cuda",
    "SIGTERM saves and stops a run without a flag": "exit_signal exit_signal_handler enable_jit_checkpoint",
    "tools/export_hf.py exports the weights of a checkpoint":
        "save_only_model push_to_hub hub_model_id checkpoint.last_save_in_hf checkpoint.last_save_model_only",
    "tools/evaluate.py RUN --tasks evaluates a finished run": "eval_tasks",
    "tools/generate.py generates text": "temperature top_k top_p num_samples text_gen_type sample_input_file",
    "tensor-parallel ranks always share the sequences": "sequence_parallel parallelism.enable_sequence_parallel",
}
_MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_kv_heads num_query_groups group_query_attention
    kv_channels head_size intermediate_size mlp_multiple_of max_position_embeddings vocab_size padded_vocab_size
    pad_vocab_size make_vocab_size_divisible_by normalization norm layernorm_epsilon layer_norm_epsilon rms_norm_epsilon
    position_embedding_type no_position_embedding pos_emb rotary_base rotary_percent rotary_pct rotary_emb_base
    rotary_interleaved rotary_scaling_factor rope_scaling_factor use_rope_scaling rope_type
    use_rotary_position_embeddings swiglu squared_relu openai_gelu quick_geglu activation activation_func
    gated_linear_unit untie_embeddings_and_output_weights no_weight_tying tie_embeddings train.tie_embeddings
    add_bias_linear disable_bias_linear add_qkv_bias use_bias_in_norms use_bias_in_attn_linear use_bias_in_mlp bias
    gpt_j_residual qk_layernorm use_qk_layernorm window_size sliding_window_width num_experts num_moe_experts
    moe_num_experts moe_router_topk moe_top_k moe_ffn_hidden_size moe_layer_freq moe_expert_interval
    moe_shared_expert_intermediate_size layernorm_zero_centered_gamma decoder_num_layers softmax_scale n_embd n_layer
    n_head
"""


def _table() -> dict[str, str]:
    """Return name -> hint."""
    groups = {**{f"here it is {ours}": names for ours, names in _FLAGS.items()},
              **{f"write {ours} into the DeepSpeed JSON": names for ours, names in _JSON.items()}, **_OTHERS}
    hints = {name: hint for hint, names in groups.items() for name in names.split()}
    of_models = {*_MODEL.split(), *(key for family in FAMILIES.values() for key in family.keys)}
    of_json = [name for name, key in TREE.items() if not (isinstance(key, Key) and key.rejected)]
    return {**dict.fromkeys(of_json, "it is a key of the DeepSpeed JSON"),
            **dict.fromkeys(of_models, "it belongs into the config.json that --model names; --model_overrides changes "
                                     "keys of that file"), **hints}


HINTS = _table()
DEGREES = {name: degree for degree, names in _DEGREES.items() for name in names.split()}


def hint_for(name: str) -> str:
    """Return what a setting of another program is called here, or "". `name` may have leading and inner hyphens."""
    return HINTS.get(name.lstrip("-").replace("-", "_"), "")
