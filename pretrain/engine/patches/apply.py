"""Apply the work-arounds for DeepSpeed's defects to an engine. The table of the defects is `defects.py`.

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

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.engine.patches.defects import has_defect
from pretrain.engine.patches.fp16 import (
    GrowingScale,
    UnscaledNorm,
    scale_loss_at_stage_0,
    undo_step_at_construction,
)
from pretrain.engine.patches.optimizers import (
    clip_only_adam_with_muon,
    convert_steps_of_muons_adam,
    keep_states_of_current_tensors,
    make_bias_correction_stateless,
    orthogonalize_in_fp32,
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


def apply_patches(engine: DeepSpeedEngine, update: Update) -> None:
    """Patch a newly initialized engine and its update in place, against each defect that affects it."""
    optimizer = engine.optimizer
    zero_1_or_2, zero_3 = (isinstance(optimizer, kind) for kind in (DeepSpeedZeroOptimizer,
                                                                    DeepSpeedZeroOptimizer_Stage3))
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):  # of fp16, and of bf16 without a pipeline
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
