"""Load a checkpoint into an engine, in the layout of the run that wrote it or in another one.

For another layout, each rank reads the fragments that its own tensors need. It copies fp32 weights and optimizer states
from the memory-mapped files directly into the engine's tensors. No tensor is gathered or stored in an intermediate
format.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch._utils import _unflatten_dense_tensors
from torch.optim.lr_scheduler import LambdaLR

from pretrain.checkpoint.format.fragments import FlatTensor, base_optimizer, complete_shape, flat_tensors, group_of
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.pickles import load_pickle, rng_file, set_rng_state
from pretrain.checkpoint.format.shard_index import (
    FP32,
    index_json,
    index_name,
    is_elementwise,
    own_buffers,
    parse_shard_indexes,
    read_index_texts,
    state_name,
)
from pretrain.checkpoint.load.hf_folder import HFFolder
from pretrain.checkpoint.load.odd_weights import WeightCheck, element
from pretrain.checkpoint.load.reader import SCHEDULED_SETTINGS, CheckpointReader, HFWeights, WeightsReader
from pretrain.checkpoint.load.resume import same_layout
from pretrain.checkpoint.save.save_checkpoint import FileEngine
from pretrain.config.ds_json.optimizers import divisible_families, optimizer_family
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import any_rank, from_rank_0, rejected_together
from pretrain.engine.optimizer import restore_settings
from pretrain.engine.patches import pipeline as pipeline_patches
from pretrain.engine.recipe import set_recipe_states
from pretrain.engine.steps import settle
from pretrain.errors import ConfigError
from pretrain.progress import ProgressBar
from pretrain.stored_json import parse_json, read_text

# attributes of DeepSpeed's optimizer that come from the JSON; its load_state_dict overwrites them with saved values
_JSON_SETTINGS = ("clip_grad", "loss_scaler", "dynamic_loss_scale", "loss_scale_config")


def load_checkpoint(engine: DeepSpeedEngine, plan: Plan, folder: Path, manifest: Manifest) -> list[str]:
    """Load weights, optimizer states, schedule, loss scale and counters; collective. Returns warnings about weights.

    If layout and shards are as in the run that wrote the checkpoint, DeepSpeed reads its own files, and the states
    of the random number generators are restored. With the same batch sizes and data, training then continues bit for
    bit. Otherwise each rank reads the fragments that it needs, and `load_resharded` seeds the generators again. The
    optimizer's settings (rates, betas, weight decay ...) come from the plan.
    """
    settle(engine)  # after a rollback, the last update belongs to the steps that are dropped
    if same_layout(manifest.layout, plan.layout) and same_shards(engine, folder):
        engine.checkpoint_engine = FileEngine()
        optimizer = engine.optimizer
        settings = {name: copy(getattr(optimizer, name)) for name in _JSON_SETTINGS if hasattr(optimizer, name)}
        pipeline_patches.load_checkpoint(engine, folder.parent, folder.name)
        engine.checkpoint_engine = FileEngine()  # release the content of the last file
        for name, value in settings.items():  # this run's JSON applies, not the saved run's
            setattr(optimizer, name, value)
        if manifest.expert_parallel_size > 1 and manifest.zero_stage < 3:
            # DeepSpeed 0.19.8 (runtime/engine.py, _save_moe_checkpoint) writes the model's weights of the first rank
            # only, so the other ranks have loaded its experts; their own are in the optimizer's files
            update_16bit_weights(engine)
        set_loss_scale(engine, manifest.loss_scale)
        set_rng_state(load_pickle(rng_file(folder, dist.get_rank())))
        warnings = _check_weights(engine, folder)
    else:
        warnings = load_resharded(engine, folder, manifest)
    if plan.args.seed != manifest.seed:  # --override seed
        seed_generators(plan.args.seed, manifest.step)
    restore_settings(engine)
    set_recipe_states(engine, manifest.recipe_states)
    assert engine.global_steps == manifest.step, (engine.global_steps, manifest.step)
    return warnings


def _check_weights(engine: DeepSpeedEngine, folder: Path) -> list[str]:
    """Return warnings about the weights that DeepSpeed has loaded; collective. Raises ConfigError."""
    flats = flat_tensors(engine)
    shapes = {fragment.name: fragment.shape for flat in flats for fragment in flat.fragments}
    check = WeightCheck(engine, folder, lambda name, index: element(name, shapes[name], index))
    with rejected_together():
        for flat in flats:
            check.add(flat)
    return check.warnings()


def load_resharded(engine: DeepSpeedEngine, folder: Path, manifest: Manifest) -> list[str]:
    """Load weights, optimizer states, learning rates, schedule, counters and loss scale; collective.

    Returns warnings about weights. Each rank's random number generators are seeded from (seed, step, rank). Raises the
    same ConfigError on every rank if the checkpoint has another model or optimizer, if the optimizer is not
    elementwise, or if a file is damaged.
    """
    with torch.no_grad(), rejected_together():
        reader = open_checkpoint(folder)
        _check_optimizer(engine, reader)
        _check_shapes(engine, reader)
        check = WeightCheck(engine, folder, reader.place)
        _fill_flat_tensors(engine, reader, check)
        _set_groups(engine, reader)
        _set_counters(engine, reader)
    with torch.no_grad():
        update_16bit_weights(engine)
    set_loss_scale(engine, manifest.loss_scale)
    seed_generators(manifest.seed, manifest.step)
    return check.warnings()


def seed_generators(seed: int, step: int) -> None:
    """Seed this rank's random number generators from (seed, step, rank)."""
    digest = hashlib.sha256(f"{seed} {step} {dist.get_rank()}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))


def load_weights(engine: DeepSpeedEngine, source: HFFolder | Path) -> list[str]:
    """Fill the fp32 and 16-bit weights of an engine that has made no step from a transformers or checkpoint folder.

    Returns warnings about weights. Optimizer, schedule, counters and random numbers remain as in a new run. Collective;
    raises the same ConfigError on every rank.
    """
    with torch.no_grad(), rejected_together():
        reader = HFWeights(source) if isinstance(source, HFFolder) else open_checkpoint(source)
        _check_shapes(engine, reader)
        _fill_buffers(engine, reader)
        _prepare_stage_3(engine)
        flats, check = flat_tensors(engine), WeightCheck(engine, reader.folder, reader.place)
        total = 4 * sum(flat.numel for flat in flats)
        with ProgressBar("loading weights", total, active=dist.get_rank() == 0) as progress:
            for flat in flats:
                with _swapped_in(engine, flat):
                    _copy_weights(flat, reader)
                    check.add(flat)
                progress.advance(4 * flat.numel, reader.folder.name)
    with torch.no_grad():
        update_16bit_weights(engine)
    return check.warnings()


def open_checkpoint(folder: Path) -> CheckpointReader:
    """Return the reader of a checkpoint whose shard indexes rank 0 reads and sends to all ranks; collective."""
    texts = from_rank_0(partial(read_index_texts, folder))
    return CheckpointReader(folder, parse_shard_indexes(folder, texts))


def same_shards(engine: DeepSpeedEngine, folder: Path) -> bool:
    """Return whether this engine has the same optimizer class and fragments as the checkpoint; collective.

    If not, DeepSpeed cannot load its own files into this engine.
    """
    path = folder / index_name(dist.get_rank())
    saved_index = read_text(path) if path.is_file() else "{}"
    return not any_rank(_fragments_in(saved_index) != _fragments_in(index_json(engine)))


def _fragments_in(index: str) -> Any:
    """Return the values of a shard index that `same_shards` compares; None for text that is no shard index."""
    try:
        values = parse_json(index)
        return [values.get("optimizer"), [[tensor[key] for key in ("group", "weights", "fragments")]
                                          for tensor in values.get("tensors", [])]]
    except (ValueError, AttributeError, KeyError, TypeError):
        return None


def _check_optimizer(engine: DeepSpeedEngine, reader: CheckpointReader) -> None:
    """Raise ConfigError unless both optimizers are the same, and elementwise."""
    saved, current = reader.optimizer, type(base_optimizer(engine)).__name__
    if optimizer_family(saved) not in divisible_families() or optimizer_family(saved) != optimizer_family(current):
        raise ConfigError(f"{reader.folder}: optimizer", found=f"{saved} in the checkpoint and {current} in this run",
                          expected=f"one of {', '.join(divisible_families())} in both",
                          remedy="with other optimizers, resume in the layout of the run that wrote the checkpoint")


def _check_shapes(engine: DeepSpeedEngine, reader: WeightsReader) -> None:
    """Raise ConfigError unless each parameter has the same shape in the checkpoint or folder."""
    for name, parameter in engine.module.named_parameters():
        shape = complete_shape(parameter)
        if reader.shapes.get(name) != shape:
            raise ConfigError(f"{reader.folder}: {name}", found=f"shape {reader.shapes.get(name)}",
                              expected=f"{shape}, as in this run's model")


def _fill_flat_tensors(engine: DeepSpeedEngine, reader: CheckpointReader, check: WeightCheck) -> None:
    """Fill the flat fp32 weights and their optimizer states, and at ZeRO stage 3 also the 16-bit weights."""
    _prepare_stage_3(engine)
    flats = flat_tensors(engine)
    template = _state_template(engine, flats[0].parameter) if reader.states != [FP32] else {}
    _check_states(engine, reader, template)
    bytes_per_element = 4 * len(reader.states)
    total = bytes_per_element * sum(flat.numel for flat in flats)
    with ProgressBar("changing the layout", total, active=dist.get_rank() == 0) as progress:
        for flat in flats:
            with _swapped_in(engine, flat):
                _copy_weights(flat, reader)
                check.add(flat)
                _fill_states(engine, flat, reader, template)
            progress.advance(bytes_per_element * flat.numel, reader.folder.name)


def _prepare_stage_3(engine: DeepSpeedEngine) -> None:
    """At ZeRO stage 3, partition parameters that are still gathered."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        engine.optimizer.checkpoint_event_prologue()


def _copy_weights(flat: FlatTensor, reader: WeightsReader) -> None:
    for fragment in flat.fragments:
        target = flat.parameter.detach().view(-1).narrow(0, fragment.offset, fragment.length)
        reader.copy(fragment.name, FP32, fragment.start, target, fragment.part)


@contextlib.contextmanager
def _swapped_in(engine: DeepSpeedEngine, flat: FlatTensor) -> Iterator[None]:
    """At ZeRO stage 3, swap an NVMe-offloaded tensor in before the block, and update the 16-bit weights after it."""
    optimizer = engine.optimizer
    stage_3 = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    swapped = stage_3 and optimizer._swappable_optimizer_subgroup(flat.number)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(flat.number)
    yield
    if stage_3:
        optimizer._reassign_or_swap_out_partitioned_parameters(flat.number)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(flat.number)


def _state_template(engine: DeepSpeedEngine, like: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer states of one tensor, with their names and types.

    If the optimizer has no states yet, they are created by a trial step on a tensor of two weights.
    """
    optimizer = base_optimizer(engine)
    live = next((state for state in optimizer.state.values() if state), None)
    if live is not None:
        return dict(live)
    dummy = torch.zeros(2, dtype=like.dtype, device=like.device, requires_grad=True)
    dummy.grad = torch.zeros_like(dummy)
    groups = [group["params"] for group in optimizer.param_groups]
    hooks = optimizer._optimizer_step_pre_hooks
    optimizer._optimizer_step_pre_hooks = type(hooks)()  # the trial step must not run DeepSpeed's hooks
    try:
        for i, group in enumerate(optimizer.param_groups):
            group["params"] = [dummy] if i == 0 else []
        type(optimizer).step(optimizer)  # not optimizer.step, which is patched to check the model's gradients
    finally:
        optimizer._optimizer_step_pre_hooks = hooks
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
    return dict(optimizer.state.pop(dummy, {}))


def _check_states(engine: DeepSpeedEngine, reader: CheckpointReader, template: dict[str, Any]) -> None:
    """Raise ConfigError if a state that this optimizer needs is missing, or an elementwise state is unknown."""
    class_name = type(base_optimizer(engine)).__name__
    tensors = {key for key, value in template.items() if torch.is_tensor(value) and value.dim() > 0}
    needed = {name for key in tensors if (name := state_name(class_name, key)) is not None}
    needed |= {key for key, value in template.items() if key not in tensors and value is not None}
    saved = {*reader.states, *reader.scalars} - {FP32}
    if not needed <= saved or (set(reader.states) - {FP32}) - needed:
        raise ConfigError(f"{reader.folder}: optimizer states", found=", ".join(sorted(saved)) or "none",
                          expected=f"{', '.join(sorted(needed)) or 'none'}, as this run's optimizer needs")


def _fill_states(engine: DeepSpeedEngine, flat: FlatTensor, reader: CheckpointReader, template: dict[str, Any]) -> None:
    """Fill every optimizer state of one flat tensor. States that do not exist yet are created like the template's."""
    optimizer = base_optimizer(engine)
    state = optimizer.state[flat.parameter]
    if not template:
        _clear_states(engine, state)
    for key, like in template.items():
        if torch.is_tensor(like) and like.dim() > 0:
            if not is_elementwise(state.get(key), flat):
                state[key] = torch.zeros_like(flat.parameter, dtype=like.dtype, device=like.device)
            if (name := state_name(type(optimizer).__name__, key)) is not None:
                for fragment in flat.fragments:
                    target = state[key].view(-1).narrow(0, fragment.offset, fragment.length)
                    reader.copy(fragment.name, name, fragment.start, target, fragment.part)
        elif torch.is_tensor(like):
            state[key] = torch.full_like(like, reader.scalars[key])
        elif like is not None:
            state[key] = type(like)(reader.scalars[key])


def _clear_states(engine: DeepSpeedEngine, state: dict[str, Any]) -> None:
    """Reset the states to those before the first step. With NVMe offload the tensors remain, filled with zeros."""
    if not getattr(engine.optimizer, "swap_optimizer", False):
        state.clear()
    for key, value in state.items():
        state[key] = value.zero_() if torch.is_tensor(value) else 0


def _set_groups(engine: DeepSpeedEngine, reader: CheckpointReader) -> None:
    """Set the scheduled settings of each parameter group.

    A group of which this rank holds only padding gets the settings of the checkpoint's first parameter.
    """
    names: dict[int, str] = {}  # parameter group -> one of its parameters
    for flat in flat_tensors(engine):
        if flat.fragments:
            names.setdefault(group_of(engine, flat), flat.fragments[0].name)
    for i, group in enumerate(base_optimizer(engine).param_groups):
        saved = reader.group(names.get(i, next(iter(reader.shapes))))
        for key in set(SCHEDULED_SETTINGS) & group.keys() & saved.keys():
            group[key] = type(group[key])(saved[key])


def _fill_buffers(engine: DeepSpeedEngine, reader: WeightsReader) -> None:
    """Copy saved values into the buffers of this rank's layers. Those without a saved value keep theirs."""
    saved = reader.buffers()
    for name, buffer in own_buffers(engine.module).items():
        if name in saved:
            buffer.copy_(saved[name])


def _set_counters(engine: DeepSpeedEngine, reader: CheckpointReader) -> None:
    """Restore the engine's step and sample counters and the scheduler's state."""
    saved = reader.engine_state()
    _fill_buffers(engine, reader)
    engine.global_steps = saved["global_steps"]
    engine.global_samples = saved["global_samples"]
    engine.skipped_steps = saved["skipped_steps"]
    if engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if isinstance(engine.lr_scheduler, LambdaLR):  # its state has a rate for each group of another layout
            engine.lr_scheduler.base_lrs = [group["initial_lr"] for group in base_optimizer(engine).param_groups]


def update_16bit_weights(engine: DeepSpeedEngine) -> None:
    """Copy the fp32 weights to the 16-bit weights; collective."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
    elif isinstance(optimizer, FP16_Optimizer):
        for flat, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            for parameter, values in zip(parameters, _unflatten_dense_tensors(flat, parameters), strict=True):
                parameter.data.copy_(values)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for tensors, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for parameter, values in zip(parameters, tensors, strict=True):
                parameter.data.copy_(values)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer._hp_optimizer_states_linked = False  # some states are new tensors, which DeepSpeed must link again
        optimizer.update_lp_params()


def set_loss_scale(engine: DeepSpeedEngine, saved: dict[str, float] | None) -> None:
    """Restore fp16's loss scale and its counters if both runs have a dynamic scale; otherwise keep the JSON's scale."""
    scaler = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
    dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    if engine.fp16_enabled() and dynamic and saved is not None and "cur_iter" in saved:
        for key, value in saved.items():
            if hasattr(scaler, key):
                setattr(scaler, key, value if key == "cur_scale" else int(value))
