"""Rules for models with a mixture of experts."""

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.parallel_degrees import SEQUENCE, TENSOR
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError

_FLAGS = ("router_aux_loss", "router_z_loss", "expert_capacity_factor")
_DEFAULTS = RunArguments()


def flags_of_experts(run: ResolvedConfig) -> None:
    """Reject the flags of routers and experts for a model that has none."""
    for name in _FLAGS:
        if not run.model.num_experts and getattr(run.args, name) != getattr(_DEFAULTS, name):
            raise ConfigError(f"--{name}", problem="the model has no experts", remedy="leave the flag out, or choose a "
                              "model with experts, such as --model tiny-moe")


def experts_on_shards(run: ResolvedConfig) -> None:
    """Reject experts if the ranks divide each sequence, or each matrix."""
    for key, size in ((TENSOR, run.layout.tensor_parallel_size), (SEQUENCE, run.layout.sequence_parallel_size)):
        if run.model.num_experts and size > 1:
            raise run.error(key, expected="1 for a model with experts",
                            remedy="each rank would route only its part of a sequence, and the load-balancing loss "
                                   "would depend on the ranks; use expert_parallel or ZeRO instead")


def compiled_experts(run: ResolvedConfig) -> None:
    if run.args.compile_blocks and run.model.num_experts:
        raise ConfigError("--compile_blocks", found="a model with experts", expected="a model without",
                          remedy="the number of tokens of an expert differs between steps, and each number would be "
                                 "compiled; leave --compile_blocks out")


def experts_without_mup(run: ResolvedConfig) -> None:
    if run.args.mup_base_width is not None and run.model.num_experts:
        raise ConfigError("--mup_base_width", found="a model with experts", expected="a model without",
                          remedy="Tensor Programs V gives no rule for routers; leave --mup_base_width out")
