"""Rules for expert parallelism."""

from pretrain.config.parallel_degrees import EXPERT
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError

_ZERO = "zero_optimization"


def experts_of_model(run: ResolvedConfig) -> None:
    """Reject a degree that does not divide the model's experts."""
    size, num_experts = run.layout.expert_parallel_size, run.model.num_experts
    if size > 1 and num_experts == 0:
        raise run.error(EXPERT, expected="1, because the model has no experts",
                        remedy='remove the block "expert_parallel", or choose a mixture-of-experts model')
    if num_experts % size:
        raise run.error(EXPERT, expected=f"a divisor of the model's {num_experts} experts")


def zero_of_experts(run: ResolvedConfig) -> None:
    """Reject ZeRO settings with which DeepSpeed 0.19.8 reduces or divides experts wrongly, or not at all."""
    layout = run.layout
    if layout.expert_parallel_size == 1:
        return
    if layout.zero_stage == 0:  # runtime/utils.py, clip_grad_norm_
        raise run.error(f"{_ZERO}.stage", found=0, expected="1, 2 or 3 with expert parallelism",
                        remedy="at stage 0 DeepSpeed clips by the mean of the ranks' norms; stage 1 also needs less "
                               "memory")
    for block in ("offload_optimizer", "offload_param"):  # runtime/engine.py, _save_moe_checkpoint
        if run.get(f"{_ZERO}.{block}.device") == "nvme":
            raise run.error(f"{_ZERO}.{block}.device", expected='"cpu" or "none" with expert parallelism',
                            remedy="DeepSpeed does not save experts that are on NVMe")
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"):
        value = run.get(f"{_ZERO}.{name}", False)
        if value is True or value > 1:  # runtime/engine.py, _validate_zero3_moe_compatibility
            raise run.error(f"{_ZERO}.{name}", problem="DeepSpeed's ZeRO++ does not support expert parallelism",
                            remedy="remove the key")
    for name in ("contiguous_gradients", "reduce_scatter"):  # runtime/zero/stage_1_and_2.py, _configure_moe_settings
        if run.get(f"{_ZERO}.{name}", True) is False and layout.zero_stage < 3:
            raise run.error(f"{_ZERO}.{name}", expected="true with expert parallelism",
                            remedy="DeepSpeed reduces the experts' gradients in no other way; remove the key")


def noise_scale_of_experts(run: ResolvedConfig) -> None:
    """Reject the gradient noise scale: it compares the gradients of single micro-batches with that of all."""
    if run.args.noise_scale_interval and run.layout.expert_parallel_size > 1:
        raise ConfigError("--noise_scale_interval", found="expert parallelism", expected="a run without it",
                          remedy="the gradient of an expert is that of several ranks' micro-batches together; leave "
                                 "the flag out")
