"""Defects of DeepSpeed 0.19.8 that silently give wrong results, and the place of each work-around or rejection.

Each work-around is one function. `tests/distributed/test_upstream*.py` test each defect twice: DeepSpeed alone gives
the wrong result, and with the work-around the result is right. The first test fails once DeepSpeed has fixed the
defect; then the function can be deleted. All defects were found in DeepSpeed 0.19.8, the only supported version.

    A  fp16 + ZeRO-0: the loss is never scaled; a stray optimizer step
       at construction                                                    fp16.scale_loss_at_stage_0
    B  pipeline + tied weights + another accumulation dtype:
       the gradients of tied weights are not summed                       pipeline.reduce_tied_gradients
    C  optimizer on NVMe: a resume restores nothing, or only a part       nvme.save_complete_nvme_checkpoints
    D  ZeRO-1/2 + offload to NVMe becomes offload to the CPU              rejected in config/layout_rules.py
    E  torch_autocast fp16 + ZeRO or pipeline: wrong norm and clipping,
       or a crash                                                         rejected in config/ds_json/schema.py
    F  nn.init in a parent's __init__ has no effect under zero.Init       model/init.py runs after construction
    G  all pipeline stages start with the same RNG state                  engine/build.py seeds each rank differently
    H  unknown top-level JSON keys are ignored                            rejected in config/ds_json/schema.py
    I  sequence parallelism is ignored under a pipeline                   rejected in config/ds_json/schema.py
    J  srun without RANK: every task trains alone                         distributed/world.py derives the ranks
    K  fp32 + ZeRO-0 + pipeline: gradients are clipped by the norm of the
       first pipeline stage                                               pipeline.clip_fp32_by_global_norm
    L  Adam on the CPU: the bias correction differs after a resume        optimizers.make_bias_correction_stateless
    M  fp32 + ZeRO-0: updates with non-finite gradients are applied       skip.skip_non_finite_fp32_updates
    N  ZeRO-1/2 + offload + fp32 accumulation: after one skipped update
       all updates are skipped                                            skip.clear_gradients_of_skipped_updates
    O  Muon + ZeRO-3: a skipped update changes the momentum               skip.keep_muon_momentum
    P  fp16: halved gradients in each step after which the loss scale
       grows                                                              fp16.GrowingScale
    Q  Muon + gradient clipping: every update is divided by the norm of
       the orthogonalized matrices                                        optimizers.clip_only_adam_with_muon
    R  sequence parallelism + ZeRO-3: gradients are divided by the ranks
       that share a sequence                                              zero.sum_gradients_of_shards
    S  zero.Init with a dtype, on a device without fp16: parameters are
       bf16, whatever the dtype                                           zero.keep_dtype_of_partitions

Defects that raise an error, only waste resources or change the last digits:
    Muon on CPUs: orthogonalization in fp16 or fp32, by the CPU           optimizers.orthogonalize_in_fp32
    bf16 + ZeRO-0 + pipeline: checkpoints cannot be loaded (KeyError: 0)  pipeline.load_checkpoint
    pipeline + tensor parallelism: by default, stages send a part of each
       tensor, as if all tensor-parallel ranks had the same one            engine/parallelism.py, engine_config
    fp16 + ZeRO-0 + an optimizer without DeepSpeed's kernel: the norm
       counts matrices of one tensor-parallel rank only                   fp16.scale_loss_at_stage_0
    ZeRO-1 + pipeline: stages with different parameter groups wait for
       each other forever                                                 pipeline.reduce_norm_once
    on CPUs each run leaves 66 MiB a rank in /dev/shm                     distributed/process_group.py
    process groups ignore DEEPSPEED_TIMEOUT                               distributed/process_group.py
    a failing monitor or profiler ends the run                            monitors.survive_failing_monitors,
                                                                          monitors.patch_flops_profiler
    monitors get one point for each batch of an evaluation in a pipeline,
       no loss without one, and wait for the device in every step         monitors.take_monitors
    CSV files of a resumed run get a second header                        monitors.survive_failing_monitors
    hpZ: the second engine of a process fails at an assertion             zero.forget_group_of_earlier_engine
    one data-parallel rank: gradients are copied twice and divided by 1   zero.skip_reduction_on_one_rank
    every run imports torch's compiler, 2 s                               engine/prepare.py, avoid_compiler_imports
    the launcher of a host imports torch and DeepSpeed, 1.3 s             cluster/without_torch.py
    every load of an operator measures the CPU's clock rate, 1 s          engine/prepare.py, read_features_from_proc
"""

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.engine.patches.fp16 import GrowingScale, scale_loss_at_stage_0
from pretrain.engine.patches.nvme import parameters_on_nvme, save_complete_nvme_checkpoints
from pretrain.engine.patches.optimizers import (
    clip_only_adam_with_muon,
    make_bias_correction_stateless,
    orthogonalize_in_fp32,
)
from pretrain.engine.patches.pipeline import (
    clip_fp32_by_global_norm,
    has_different_groups,
    reduce_norm_once,
    reduce_tied_gradients,
)
from pretrain.engine.patches.skip import (
    clear_gradients_of_skipped_updates,
    keep_muon_momentum,
    skip_non_finite_fp32_updates,
)
from pretrain.engine.patches.zero import skip_reduction_on_one_rank, sum_gradients_of_shards
from pretrain.engine.update import Update


def apply_patches(engine: DeepSpeedEngine, update: Update) -> None:
    """Patch a newly initialized engine and its update in place, against each defect that affects it."""
    if isinstance(engine.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        scale_loss_at_stage_0(engine, update)
    if engine.fp16_enabled():
        update.growing_scale = GrowingScale(engine.optimizer)
    if isinstance(engine, PipelineEngine):
        reduce_tied_gradients(engine)
        if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and has_different_groups(engine):
            reduce_norm_once(engine)
    if engine.zero_nvme_offload_optimizer() or parameters_on_nvme(engine):
        save_complete_nvme_checkpoints(engine)
    if engine.zero_optimization_stage() == 0 and not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        clip_fp32_by_global_norm(engine)
        update.step = skip_non_finite_fp32_updates(engine, update.step)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and engine.optimizer.cpu_offload:
        clear_gradients_of_skipped_updates(engine)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3) and engine.optimizer.use_muon:
        keep_muon_momentum(engine)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3) and engine.sequence_parallel_size > 1:
        sum_gradients_of_shards(engine)
    if engine.optimizer_name() == "muon":
        clip_only_adam_with_muon(engine)
        if engine.device.type == "cpu":
            orthogonalize_in_fp32()
    skip_reduction_on_one_rank(engine)
    make_bias_correction_stateless(getattr(engine.optimizer, "optimizer", engine.optimizer))
