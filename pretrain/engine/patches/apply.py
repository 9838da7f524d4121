"""DeepSpeed's defects: the table of them, and the application of the work-arounds to an engine.

A to S, AE, AF and AG silently give wrong results. The others raise errors, hang, leave something behind, or change the
last digits. A work-around is applied only where `has_defect` is true. Each defect is tested twice: DeepSpeed alone
gives the wrong result (the reproducers), and with the work-around it is right (`tests/distributed/test_upstream*.py`).

Each work-around is one function of this folder, and cites the file of DeepSpeed and the test that guards it.

These work-arounds save time only, and are applied for each version of DeepSpeed:

    one data-parallel rank: gradients are copied twice and divided by 1   zero.skip_reduction_on_one_rank
    the host waits to decide whether an update is skipped                 late_skip.late_skip
    monitors wait for the device in every step                            monitors.take_monitors
    every run imports torch's compiler, 2 s                               engine/prepare.py, avoid_compiler_imports
    the launcher of a host imports torch and DeepSpeed, 1.3 s             cluster/without_torch.py
    every load of an operator measures the CPU's clock rate, 1 s          engine/prepare.py, read_features_from_proc
    every rank on a CPU runs a C compiler twice, 0.1 s                    engine/prepare.py, examine_one_operator
"""

import functools
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from packaging.version import Version

from pretrain.distributed.requirements import deepspeed_version
from pretrain.engine.patches.optimizers import (
    GrowingScale,
    UnscaledNorm,
    clip_only_adam_with_muon,
    convert_steps_of_muons_adam,
    keep_states_of_current_tensors,
    make_bias_correction_stateless,
    orthogonalize_in_fp32,
    scale_loss_at_stage_0,
    undo_step_at_construction,
)
from pretrain.engine.patches.pipeline import (
    clip_fp32_by_global_norm,
    divide_gradients_at_the_loss,
    has_different_groups,
    reduce_norm_once,
    reduce_tied_gradients,
)
from pretrain.engine.patches.skip import (
    checks_norm,
    clear_gradients_of_skipped_updates,
    keep_muon_momentum,
    skip_invalid_norms,
    skip_non_finite_fp32_updates,
)
from pretrain.engine.patches.zero import parameters_on_nvme, save_complete_nvme_checkpoints, sum_gradients_of_shards
from pretrain.engine.update import Update
from pretrain.errors import ConfigError, shorten

MEASURED = ("0.18.0", "0.18.9", "0.19.0", "0.19.4", "0.19.6", "0.19.8")  # versions on which all reproducers ran


@dataclass(frozen=True)
class Defect:
    """A defect of DeepSpeed.

    A version older than those of MEASURED has the defects of the oldest one, and a newer version those of the newest
    one.
    """

    letter: str
    title: str
    files: tuple[str, ...]  # of the defect, in DeepSpeed's folder `deepspeed`
    treatment: str  # function of `pretrain/engine/patches/`, or the place that rejects or avoids the defect
    first_in: str | None = None  # version that brought the defect; None: the oldest version of MEASURED has it
    fixed_in: str | None = None

    def exists_in(self, version: str) -> bool:
        """Return whether this version of DeepSpeed has the defect."""
        found = Version(Version(version).base_version)  # 0.19.6.dev0 is the source of 0.19.6
        return (self.first_in is None or found >= Version(self.first_in)) and (
            self.fixed_in is None or found < Version(self.fixed_in))


DEFECTS = (
    Defect("A", "fp16 + ZeRO-0: the loss is never scaled, but gradients are divided by the scale",
           ("runtime/engine.py",), "optimizers.scale_loss_at_stage_0", first_in="0.18.3"),
    Defect("B", "pipeline + tied weights + another accumulation dtype: the gradients of tied weights are not summed",
           ("runtime/pipe/engine.py",), "pipeline.reduce_tied_gradients"),
    Defect("C", "optimizer on NVMe: a resume restores nothing, or only a part",
           ("runtime/zero/stage3.py", "runtime/engine.py"), "zero.save_complete_nvme_checkpoints"),
    Defect("D", "ZeRO-1/2 + offload to NVMe becomes offload to the CPU", ("runtime/zero/stage_1_and_2.py",),
           "rejected in config/layout_rules.py"),
    Defect("E", "torch_autocast in fp16 + ZeRO: wrong norm and clipping", ("runtime/zero/stage_1_and_2.py",),
           "rejected in config/ds_json/schema.py"),
    Defect("F", "nn.init in a parent's __init__ has no effect under zero.Init",
           ("runtime/zero/partition_parameters.py",), "model/init.py runs after construction"),
    Defect("G", "all pipeline stages start with the same RNG state", ("runtime/pipe/module.py",),
           "engine/build.py seeds each rank differently"),
    Defect("H", "unknown top-level JSON keys are ignored", ("runtime/config.py",),
           "rejected in config/ds_json/schema.py"),
    Defect("I", "sequence parallelism is ignored under a pipeline", ("runtime/pipe/engine.py",),
           "rejected in config/ds_json/schema.py"),
    Defect("J", "srun without RANK: every task trains alone", ("comm/comm.py",),
           "distributed/world.py derives the ranks"),
    Defect("K", "fp32 + ZeRO-0 + pipeline: gradients are clipped by the norm of the first pipeline stage",
           ("runtime/utils.py",), "pipeline.clip_fp32_by_global_norm"),
    Defect("L", "Adam on the CPU: the bias correction differs after a resume", ("../csrc/includes/cpu_adam.h",),
           "optimizers.make_bias_correction_stateless"),
    Defect("M", "fp32 + ZeRO-0: updates with non-finite gradients are applied", ("runtime/engine.py",),
           "skip.skip_non_finite_fp32_updates"),
    Defect("N", "ZeRO-1/2 + offload + fp32 accumulation: after one skipped update all updates are skipped",
           ("runtime/zero/stage_1_and_2.py",), "skip.clear_gradients_of_skipped_updates", first_in="0.19.8"),
    Defect("O", "Muon + ZeRO-3: a skipped update changes the momentum", ("runtime/zero/stage3.py",),
           "skip.keep_muon_momentum", first_in="0.18.9"),
    Defect("P", "fp16: halved gradients in each step after which the loss scale grows",
           ("runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py", "runtime/fp16/fused_optimizer.py",
            "runtime/fp16/unfused_optimizer.py"), "optimizers.GrowingScale"),
    Defect("Q", "Muon + gradient clipping: every update is divided by the norm of the orthogonalized matrices",
           ("runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py"), "optimizers.clip_only_adam_with_muon"),
    Defect("R", "sequence parallelism + ZeRO-3: gradients are divided by the ranks that share a sequence",
           ("runtime/zero/stage3.py",), "zero.sum_gradients_of_shards"),
    Defect("S", "zero.Init with a dtype, on a device without fp16: parameters are bf16, whatever the dtype",
           ("runtime/zero/partition_parameters.py",), "zero.keep_dtype_of_partitions"),
    Defect("T", "Muon on CPUs: orthogonalization in fp16 or fp32, by the CPU", ("runtime/zero/muon/original_muon.py",),
           "optimizers.orthogonalize_in_fp32", first_in="0.19.0"),
    Defect("U", "bf16 + ZeRO-0 + pipeline: checkpoints cannot be loaded (KeyError: 0)", ("runtime/engine.py",),
           "pipeline.load_checkpoint", first_in="0.18.5"),
    Defect("V", "pipeline + tensor parallelism: by default, stages send a part of each tensor, as if all "
           "tensor-parallel ranks had the same one", ("runtime/pipe/engine.py",),
           "engine/parallelism.py, engine_config"),
    Defect("W", "fp16 + ZeRO-0 + an optimizer without DeepSpeed's kernel: the norm is that of scaled gradients, and "
           "counts tied weights on each pipeline stage", ("runtime/fp16/unfused_optimizer.py",),
           "optimizers.UnscaledNorm"),
    Defect("X", "ZeRO-1 + pipeline: stages with different parameter groups wait for each other forever",
           ("runtime/zero/stage_1_and_2.py",), "pipeline.reduce_norm_once"),
    Defect("Y", "on CPUs each run leaves 66 MiB a rank in /dev/shm", ("../csrc/cpu/comm/shm.cpp",),
           "distributed/process_group.py"),
    Defect("Z", "process groups ignore DEEPSPEED_TIMEOUT", ("comm/torch.py",), "distributed/process_group.py"),
    Defect("AA", "a failing monitor ends the run", ("monitor/monitor.py",), "monitors.survive_failing_monitors"),
    Defect("AB", "CSV files of a resumed run get a second header", ("monitor/csv_monitor.py",),
           "monitors.survive_failing_monitors"),
    Defect("AC", "hpZ: the second engine of a process fails at an assertion", ("utils/groups.py",),
           "zero.forget_group_of_earlier_engine"),
    Defect("AD", "fp16: an overflow at the minimum loss scale raises a bare Exception",
           ("runtime/fp16/loss_scaler.py",), "skip.update_loss_scale_if"),
    Defect("AE", "bf16 or fp32 + ZeRO: an update with non-finite gradients is applied, or ends the run",
           ("runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py", "runtime/bf16_optimizer.py"),
           "skip.skip_invalid_norms", fixed_in="0.19.8"),
    Defect("AF", "fp16 + ZeRO-0: the optimizer takes a step with zero gradients at construction",
           ("runtime/fp16/fused_optimizer.py", "runtime/fp16/unfused_optimizer.py"),
           "optimizers.undo_step_at_construction"),
    Defect("AG", "pipeline: gradients are divided by the number of micro-batches once for each later stage, or never",
           ("runtime/engine.py",), "pipeline.divide_gradients_at_the_loss", fixed_in="0.19.6"),
    Defect("AH", "bf16 + ZeRO-0 + Adagrad: checkpoints cannot be saved (KeyError)", ("runtime/bf16_optimizer.py",),
           "optimizers.keep_states_of_current_tensors"),
)
_BY_LETTER = {defect.letter: defect for defect in DEFECTS}


def find_defect(letter: str) -> Defect:
    """Return a row of the table. Raises ConfigError."""
    if letter not in _BY_LETTER:
        raise ConfigError("defect", found=shorten(letter), expected=f"one of {', '.join(_BY_LETTER)}")
    return _BY_LETTER[letter]


@functools.cache
def has_defect(letter: str) -> bool:
    """Return whether the installed DeepSpeed has the defect."""
    return _BY_LETTER[letter].exists_in(str(deepspeed_version()))


def apply_patches(engine: DeepSpeedEngine, update: Update) -> None:
    """Patch a newly initialized engine and its update in place, against each defect that affects it."""
    optimizer = engine.optimizer
    zero_1_or_2, zero_3 = (isinstance(optimizer, kind) for kind in (DeepSpeedZeroOptimizer,
                                                                    DeepSpeedZeroOptimizer_Stage3))
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):  # fp16, and bf16 without a pipeline
        if has_defect("AF"):
            undo_step_at_construction(optimizer)
        if has_defect("A") and engine.fp16_enabled():
            scale_loss_at_stage_0(engine)
        if has_defect("W") and engine.fp16_enabled() and isinstance(optimizer, FP16_UnfusedOptimizer):
            update.add(UnscaledNorm(optimizer))
    if has_defect("P") and engine.fp16_enabled():
        update.add(GrowingScale(optimizer))
    if isinstance(engine, PipelineEngine):
        if has_defect("AG"):
            divide_gradients_at_the_loss(engine)
        if has_defect("B"):
            reduce_tied_gradients(engine)
        if has_defect("X") and zero_1_or_2 and has_different_groups(engine):
            reduce_norm_once(engine)
    if has_defect("C") and (engine.zero_nvme_offload_optimizer() or parameters_on_nvme(engine)):
        save_complete_nvme_checkpoints(engine)
    if engine.zero_optimization_stage() == 0 and not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        clip_fp32_by_global_norm(engine)  # without defect K, too: it reports the norm
        if has_defect("M"):
            update.step = skip_non_finite_fp32_updates(engine, update.step)
    # Where DeepSpeed skips no update (AE), skip_invalid_norms does, and defect N shows: test_skipped_updates on 0.18.9.
    if (has_defect("N") or has_defect("AE")) and zero_1_or_2 and optimizer.cpu_offload:
        clear_gradients_of_skipped_updates(engine)
    if has_defect("O") and zero_3 and optimizer.use_muon:
        keep_muon_momentum(engine)
    if has_defect("R") and zero_3 and engine.sequence_parallel_size > 1:
        sum_gradients_of_shards(engine)
    if engine.optimizer_name() == "muon":
        convert_steps_of_muons_adam(engine)
        if has_defect("Q"):
            clip_only_adam_with_muon(engine)
        if has_defect("T") and engine.device.type == "cpu":
            orthogonalize_in_fp32()
    if not isinstance(optimizer, torch.optim.Optimizer) and not checks_norm(optimizer):
        update.step = skip_invalid_norms(engine, update.step)
    if has_defect("AH") and engine.zero_optimization_stage() == 0:
        keep_states_of_current_tensors(getattr(optimizer, "optimizer", optimizer))
    if has_defect("L"):
        make_bias_correction_stateless(getattr(optimizer, "optimizer", optimizer))
