"""The parts of a run's record that may be repeated, by a script or a program that trains it again.

The record may be from an untrusted source. These lists name the flags, environment variables and blocks of the
DeepSpeed JSON that describe the training. Everything else, such as a command for messages, an address, a folder that is
written to or a variable that loads a library, has to come from the command line of the user.
"""

import os
import re
from pathlib import Path
from typing import Any

from pretrain.active_extensions import extensions
from pretrain.cli import path_text
from pretrain.config.flags.arguments import DEFAULTS, FLAGS
from pretrain.errors import ConfigError, printable
from pretrain.own_code import is_own

_REPEATED_FLAGS = """
    init_from train_data valid_data test_data blend_schedule split sample_order packing dataset_args first_sample
    order_samples skip_samples reorder_samples tokenizer seq_length seq_length_schedule eod_mask_loss
    document_attention train_steps train_tokens batch_schedule lr_schedule lr_warmup_steps lr_warmup_tokens
    lr_decay_steps lr_decay_tokens lr_wsd_steps lr_wsd_tokens lr_decay_shape lr_milestones lr_milestone_tokens
    lr_milestone_factor min_lr_ratio min_lr lr_counts_from_0 lr_reference_batch lr_scaling seed label_smoothing
    z_loss router_aux_loss router_z_loss expert_capacity_factor no_weight_decay decay_vectors
    gradient_value_clipping adaptive_clipping adaptive_clipping_window noise_scale_interval early_stopping_patience
    early_stopping_min_delta init_method init_std output_init_method mup_base_width embedding_dropout attention_dropout
    residual_dropout log_interval eval_interval eval_steps note deepspeed_log_level
    save_interval exit_step async_save
    save_busy save_timeout keep_checkpoints keep_every keep_best override exit_after_minutes spike_policy
    spike_threshold spike_window max_bad_steps rollback_skip_steps max_rollbacks step_timeout first_step_timeout
    replica_check_interval allow_other_data micro_batch_size
    gradient_accumulation_steps global_batch_size learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
    gradient_clipping precision compile_blocks recompute recompute_every mlp_tiles tf32 plain_operators
    deterministic emulate_fp16 peak_tflops
"""
REPEATED_FLAGS = frozenset(_REPEATED_FLAGS.split()) | {name for name, flag in FLAGS.items() if flag.repeats}
# flags that a repetition sets itself, or that the launcher sets
SET_AGAIN = frozenset(("deepspeed_config", "model", "model_overrides", "save", "resume", "resume_from",
                       "local_rank"))
# flags that name code of the user, and what it has: the user gives them again
OWN_CODE = {"dataset_module": "Data", "model_code": "Model", "loss": "Loss"}
# why the other flags are never repeated from a record alone
NEVER_REPEATED = {
    **dict.fromkeys(OWN_CODE, "it is imported"),
    "nvme_path": "files are written there", "checkpoint_mirror": "checkpoints are written there",
    "trackio": "it sends the metrics", "extension": "it is imported",
    **{name: FLAGS[name].group.not_recorded or FLAGS[name].not_repeated or f"it belongs to the extension {each.name}"
       for each in extensions() for name in each.flags if not FLAGS[name].repeats}}

# variables that change results or speed, and name neither files nor code nor hosts
_REPEATED_VARIABLES = """
    OMP_NUM_THREADS OMP_DYNAMIC OMP_PROC_BIND OMP_PLACES OMP_SCHEDULE OMP_WAIT_POLICY MKL_NUM_THREADS MKL_DYNAMIC
    MKL_CBWR KMP_AFFINITY KMP_BLOCKTIME MALLOC_ARENA_MAX TOKENIZERS_PARALLELISM CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_LAUNCH_BLOCKING CUDA_DEVICE_ORDER CUDA_MODULE_LOADING CUBLAS_WORKSPACE_CONFIG PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ASYNC_ERROR_HANDLING
    TORCH_NCCL_HIGH_PRIORITY NCCL_ALGO NCCL_PROTO NCCL_NTHREADS NCCL_BUFFSIZE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS
    NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_IB_DISABLE
    NCCL_CROSS_NIC NCCL_DEBUG DS_ACCELERATOR DEEPSPEED_TIMEOUT
"""
REPEATED_VARIABLES = frozenset(_REPEATED_VARIABLES.split())
_PLAIN_VALUE = re.compile(r"[\w.,:;=+{}()-]{0,200}", re.ASCII)

# blocks of the DeepSpeed JSON, without monitors, profilers and reports
_REPEATED_BLOCKS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    optimizer scheduler gradient_clipping fp16 bf16 bfloat16 torch_autocast data_types zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer allgather_size pipeline activation_checkpointing
    communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
    gradient_allreduce_op disable_allgather checkpoint aio timers steps_per_print wall_clock_breakdown
    memory_breakdown disable_python_gc vocabulary_size dataloader_drop_last compile tensor_parallel expert_parallel
    sequence_parallel_size use_data_before_expert_parallelism
"""
REPEATED_BLOCKS = frozenset(_REPEATED_BLOCKS.split())
# recorded as they were given; data and tokenizer are absolute
_RELATIVE = ("init_from", *(name for name, flag in FLAGS.items() if flag.repeats and flag.parse is path_text))
_FOLDERS = ("nvme_path",)  # keys of blocks: the user's flag or variable names the folder


def repeated_flags(record: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that differ from their defaults, and the checkpoint that the start continued from.

    Relative paths begin at the folder in which the run was started.
    """
    given = {name: value for name, value in _given(record).items()
             if name in REPEATED_FLAGS and not (name == "lr_schedule" and is_own(value))}
    directory = directory_of(record)
    for name in _RELATIVE:
        path = directory / str(given.get(name, ""))
        if name in given and os.path.exists(path):  # otherwise perhaps a repository, org/name
            given[name] = str(path)
    if record.get("resumed_from"):
        given.pop("init_from", None)
        given["resume_from"] = record["resumed_from"]
    elif not record.get("first_step"):
        given.pop("override", None)
    return given


def left_out_flags(record: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a start that are never repeated from a record alone, without those that name code."""
    return {name: value for name, value in _given(record).items()
            if name not in REPEATED_FLAGS | SET_AGAIN | OWN_CODE.keys() or (name == "lr_schedule" and is_own(value))}


def why_left_out(name: str) -> str:
    """Return why a flag is not repeated."""
    return NEVER_REPEATED.get(name, "it is no flag here without an extension")


def _given(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record["flags"].items()
            if value is not None and value is not False and value != DEFAULTS.get(name)}


def repeated_variables(record: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of a start that change results or speed."""
    return {name: value for name, value in (record.get("environment") or {}).items()
            if name in REPEATED_VARIABLES and isinstance(value, str) and _PLAIN_VALUE.fullmatch(value)}


def repeated_config(record: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a start as it was given, without monitors, reports and folders."""
    config = record["given_deepspeed_config"]
    return {name: _without_folders(value) for name, value in config.items()
            if name in REPEATED_BLOCKS and not _is_own_block(name, value)}


def left_out_blocks(record: dict[str, Any]) -> list[str]:
    """Return the names of the blocks of the DeepSpeed JSON that are not repeated."""
    config = record["given_deepspeed_config"]
    return [str(name) for name, value in config.items()
            if name not in REPEATED_BLOCKS or _is_own_block(name, value)]


def _is_own_block(name: str, value: Any) -> bool:
    return name == "optimizer" and isinstance(value, dict) and is_own(value.get("type"))


def check_repeatable(record: dict[str, Any]) -> None:
    """Raise ConfigError for a start with an optimizer or a schedule of the user's code."""
    optimizer, schedule = record["given_deepspeed_config"].get("optimizer"), record["flags"].get("lr_schedule")
    for where, name in (("optimizer.type", optimizer.get("type") if isinstance(optimizer, dict) else None),
                        ("--lr_schedule", schedule)):
        if is_own(name):
            raise ConfigError(where, problem=f"the run used {printable(str(name))}, your own code, which a record "
                              "alone never imports, so that its steps cannot be repeated", remedy="start the run again "
                              "from one of its checkpoints: --resume_from")


def _without_folders(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: "auto" if name in _FOLDERS and each is not None else _without_folders(each)
            for name, each in value.items()}


def directory_of(record: dict[str, Any]) -> Path:
    """Return the folder in which a run was started. No program changes into it: relative paths begin there."""
    directory = (record.get("command") or {}).get("directory")
    return Path(directory) if isinstance(directory, str) and "\0" not in directory else Path()


def hosts_of(record: dict[str, Any]) -> list[str]:
    """Return the hosts of a start, such as "node1 slots=8". No program connects to them on a record's word."""
    return [f"{host.get('host')} slots={host.get('ranks')}" for host in record.get("hardware") or []]
