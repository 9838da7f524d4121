"""Read a training_args.bin of transformers 4 or 5, and take over, ignore or reject each of its fields.

The file is a pickle of a `TrainingArguments`. A harmless class stands in for each class and function that it names, so
that nothing of it is imported or run. Each field is in one of three tables. test_trainer_settings.py compares them with
the installed class.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from pretrain.checkpoint.format.verify import pickle_globals
from pretrain.config.trainer_schedules import schedule_flags
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.foreign_run import Omission
from pretrain.model.config import model_config_from
from pretrain.model.own_models import transformers_config

# taken over: by flags, by the JSON, or with the optimizer's own settings in its file
TAKEN = frozenset("""
    per_device_train_batch_size gradient_accumulation_steps auto_find_batch_size learning_rate weight_decay adam_beta1
    adam_beta2 adam_epsilon optim optim_args adafactor lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio
    max_steps num_train_epochs max_grad_norm label_smoothing_factor bf16 fp16 seed data_seed deepspeed
    deepspeed_plugin hf_deepspeed_config mixed_precision""".split())  # noqa: SIM905 (readable)
# no effect on the numbers beyond their rounding, or on the order of the data alone, which README.md describes
NO_EFFECT = frozenset("""
    output_dir overwrite_output_dir do_train do_eval do_predict resume_from_checkpoint local_rank use_cpu no_cuda
    use_mps_device debug skip_memory_metrics log_level log_level_replica log_on_each_node logging_dir logging_strategy
    logging_first_step logging_steps logging_nan_inf_filter disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id include_num_input_tokens_seen include_tokens_per_second eval_strategy
    evaluation_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object
    eval_accumulation_steps per_device_eval_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size
    prediction_loss_only include_for_metrics include_inputs_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval
    save_strategy save_steps save_total_limit save_safetensors save_on_each_node save_only_model enable_jit_checkpoint
    restore_callback_states_from_checkpoint load_best_model_at_end metric_for_best_model greater_is_better
    ignore_data_skip push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    push_to_hub_model_id push_to_hub_organization push_to_hub_token full_determinism activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode torchdynamo jit_mode_eval use_ipex use_liger_kernel liger_kernel_config
    use_cache torch_empty_cache_steps dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend xpu_backend ddp_timeout fsdp fsdp_config
    fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap tpu_num_cores tpu_metrics_debug mp_parameters sharded_ddp
    ray_scope fp16_backend half_precision_backend fp16_opt_level dispatch_batches distributed_state
    use_legacy_prediction_loop fsdp_plugin_args xla_fsdp_config process_index local_process_index""".split())  # noqa: SIM905 (readable)
# the values that are equal here, and why others cannot be
DIFFERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "neftune_noise_alpha": ((None, 0), "it adds noise to the embeddings"),
    "optim_target_modules": ((None,), "its optimizer projects the gradients of these modules"),
    "train_sampling_strategy": (("random", "sequential"), "samples are grouped by their length"),
    "group_by_length": ((None, False), "samples are grouped by their length"),
    "average_tokens_across_devices": ((True,), "each rank has a mean of its own, which differs where ranks have "
                                               "different numbers of tokens"),
    "accelerator_config": ((), "batches are divided among the ranks (split_batches)"),
    "split_batches": ((None, False), "batches are divided among the ranks"),
    "parallelism_config": ((None,), "several ranks share a batch"),
    "past_index": ((None, -1), "states of earlier samples are used"),
    "tf32": ((None, False), "matrix products of fp32 are rounded to TF32"),
}
_PRIVATE = "_"
TRAINING_ARGS = "training_args.bin"
_ALWAYS = {"output_dir", "per_device_train_batch_size", "lr_scheduler_type"}  # attributes of any TrainingArguments
_DEEPEST = 3  # objects in objects
_MOST_STEPS = 2**63


@dataclass(frozen=True)
class Effects:
    """Settings of a program and its model that are taken over, besides optimizer, batch and schedule."""

    flags: dict[str, Any] = field(default_factory=dict)
    omissions: tuple[Omission, ...] = ()
    notes: tuple[str, ...] = ()


def effects_of_arguments(arguments: Mapping[str, Any], *, ranks: int) -> Effects:
    """Return what TrainingArguments come to, as far as they change the numbers."""
    flags, found = {}, []
    smoothing = arguments.get("label_smoothing_factor") or 0.0
    if isinstance(smoothing, (int, float)) and 0 < smoothing < 1:
        flags["label_smoothing"] = float(smoothing)
    elif smoothing:
        found.append(f"label_smoothing_factor {_shown(smoothing)}: it is not a number from 0 to 1")
    for name, (equal, reason) in DIFFERS.items():
        value = arguments.get(name)
        if name == "accelerator_config":
            value = (isinstance(value, dict) and value.get("split_batches")) or None
        is_alone = name == "average_tokens_across_devices" and ranks == 1
        if name in arguments and value is not None and value not in equal and not is_alone:
            found.append(f"{name} {_shown(value)}: {reason}")
    unknown = sorted(name for name, value in arguments.items() if name not in TAKEN | NO_EFFECT | DIFFERS.keys()
                     and not name.startswith(_PRIVATE) and value not in (None, False, 0, "", [], {}))
    notes = (f"settings of the Trainer that are not known here: {_shown(', '.join(unknown))}",) if unknown else ()
    return Effects(flags, tuple(Omission("settings", each) for each in found), notes)


def _shown(value: Any) -> str:
    """Return a value of a file as one short line."""
    return shorten(" ".join(str(value).split()))


def effects_of_module(config: dict[str, Any], *, with_labels: bool = True) -> Effects:
    """Return how a module of transformers differs in training from this program's model of the same config.json.

    `with_labels`: the module computes the loss, and not the program, as it does with label smoothing.
    """
    ours = model_config_from(config, "config.json")
    flags: dict[str, Any] = {}
    omissions: tuple[Omission, ...] = ()
    notes = []
    if ours.router_aux_loss and not (with_labels and config.get("output_router_logits")):
        flags["router_aux_loss"] = 0.0
        notes.append("router_aux_loss is 0: without output_router_logits in config.json, and with label smoothing, "
                     "transformers adds no auxiliary loss of the experts")
    elif ours.router_aux_loss:
        omissions = (Omission("settings", "output_router_logits true: the auxiliary loss of the experts is that of all "
                              "layers together, and here of each layer"),)
    token = config.get("pad_token_id")
    if token is not None and ours.implementation.trains_padding_row and _untrained_row(config) is not None:
        notes.append(f"pad_token_id {token}: transformers does not train the vector of this token in the embedding, "
                     "and this program does: losses differ if the data has the token")
    return Effects(flags, omissions, tuple(notes))


def _untrained_row(config: dict[str, Any]) -> int | None:
    """Return the token whose row in the embedding of transformers' module gets no gradient; None: there is none.

    Raises ConfigError if transformers rejects the config.
    """
    values = {key: value for key, value in config.items() if key != "auto_map"}
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers_config(values))
    except Exception as error:  # many types, also of huggingface_hub's dataclasses
        raise ConfigError("config.json", problem=f"transformers builds no model from it: {_shown(error)}",
                          remedy="use the config.json of the checkpoint") from None
    row: int | None = getattr(model.get_input_embeddings(), "padding_idx", None)
    return row


class _StandIn:
    """An object of any class: the arguments of its constructor, and its attributes."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> "_StandIn":
        found = super().__new__(cls)
        found.arguments = arguments
        return found

    def __init__(self, *arguments: Any) -> None:
        pass


def read_training_arguments(folder: Path) -> dict[str, Any]:
    """Return the settings in a folder's training_args.bin that are JSON values, members of enums, or simple objects.

    A member of an enum is its value, and another object a dict of its attributes. Returns {} if there is no such
    file, if it cannot be read in this way, or if its object is no TrainingArguments.
    """
    path = folder / TRAINING_ARGS
    if not path.is_file():
        return {}
    try:
        names = [name.replace(" ", ".").replace("__builtin__", "builtins") for name in pickle_globals(path)]
        stand_ins: list[Any] = [(_StandIn, name) for name in names if not name.startswith(("torch.", "collections."))]
        with torch.serialization.safe_globals(stand_ins):
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # damaged bytes make the unpickler raise many types of exceptions
        return {}
    found = _plain(value)
    if not (isinstance(found, dict) and found.keys() >= _ALWAYS):
        return {}
    return {key: each for key, each in found.items() if each is None or
            isinstance(each, (bool, int, float, str, dict, list))}


def _plain(value: Any, depth: int = 0) -> Any:
    """Return the value of an enum's member, for which the stand-in has the constructor's argument; others as they are.

    Another object is a dict of its attributes.
    """
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value] if depth < _DEEPEST else None
    if not isinstance(value, _StandIn):
        return value
    if value.arguments and isinstance(value.arguments[-1], str):
        return value.arguments[-1].lower()
    attributes = {key: each for key, each in vars(value).items() if key != "arguments"}
    return {key: _plain(each, depth + 1) for key, each in attributes.items()} if depth < _DEEPEST else None


def schedule_of(arguments: Mapping[str, Any], total_steps: int,
                step: int) -> tuple[dict[str, Any], tuple[Omission, ...]]:
    """Return `ForeignRun.schedule` as the Trainer's arguments describe it after `step`; ({}, ()) if they do not.

    A schedule that no flags describe is an omission.
    """
    kind, given = arguments.get("lr_scheduler_type"), arguments.get("lr_scheduler_kwargs")
    if not isinstance(kind, str):
        return {}, ()
    # warmup_ratio: before transformers 5
    numbers = [value for name in ("warmup_steps", "warmup_ratio")
               if isinstance(value := arguments.get(name), (int, float)) and 0 < value < _MOST_STEPS]
    warmup = numbers[0] if numbers else 0
    steps = int(warmup) if warmup >= 1 else math.ceil(total_steps * warmup)
    flags, reason = schedule_flags(kind, given if isinstance(given, dict) else {}, warmup=steps, total=total_steps,
                                   passed=step)
    found = {"type": kind, "warmup_steps": steps, "total_steps": total_steps, "flags": flags}
    if not reason:
        return found, ()
    return found, (Omission("schedule", f"{shorten(reason, 200)}; the flags --lr_... give another one"),)
