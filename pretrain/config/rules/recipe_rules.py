"""Rules for the clipping of gradients, the gradient noise scale and early stopping."""

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError

_DEFAULTS = RunArguments()


def value_clipping(run: ResolvedConfig) -> None:
    if not run.args.gradient_value_clipping:
        return
    if run.layout.optimizer == "muon":
        raise ConfigError("--gradient_value_clipping", found="the optimizer Muon", expected="another optimizer",
                          remedy="Muon replaces the gradients before they could be clipped")
    if run.layout.offload_optimizer == "nvme":
        raise ConfigError("--gradient_value_clipping", found="offload_optimizer to nvme", expected="cpu, or no offload",
                          remedy="the gradients leave the memory before they could be clipped")


def adaptive_clipping(run: ResolvedConfig) -> None:
    window = run.args.adaptive_clipping_window
    if not run.args.adaptive_clipping and window != _DEFAULTS.adaptive_clipping_window:
        raise ConfigError("--adaptive_clipping_window", problem="it has no effect without --adaptive_clipping",
                          remedy="add --adaptive_clipping PERCENTILE, such as 90")


def noise_scale(run: ResolvedConfig) -> None:
    """Reject layouts in which the norms of the micro-batches' and of the global batch's gradient cannot be compared."""
    layout, flag = run.layout, "--noise_scale_interval"
    if not run.args.noise_scale_interval:
        return
    if layout.gradient_accumulation_steps * layout.data_parallel_size == 1:
        raise ConfigError(flag, found="one micro-batch in a step", expected="at least two, whose gradients differ",
                          remedy="use a smaller --micro_batch_size and more --gradient_accumulation_steps")
    if layout.optimizer == "muon":
        raise ConfigError(flag, found="the optimizer Muon", expected="another optimizer",
                          remedy="DeepSpeed reports the norm of Muon's updates, not that of the gradients")
    if run.args.gradient_value_clipping:
        raise ConfigError(flag, problem="--gradient_value_clipping changes the gradient before its norm is computed",
                          remedy="use one of the two flags")
    if layout.pipeline_stages > 1 and run.model.tie_word_embeddings:
        raise ConfigError(flag, found=f"tied embeddings on {layout.pipeline_stages} pipeline stages",
                          expected="untied embeddings, or one stage",
                          remedy="each stage has only a part of the gradient of the tied matrix")


def early_stopping(run: ResolvedConfig) -> None:
    """Reject early stopping without evaluations. `validate` also checks that there is validation data."""
    if not run.args.early_stopping_patience:
        if run.args.early_stopping_min_delta:
            raise ConfigError("--early_stopping_min_delta",
                              problem="it has no effect without --early_stopping_patience",
                              remedy="add --early_stopping_patience N")
        return
    if not run.args.eval_interval:
        raise ConfigError("--early_stopping_patience", problem="the run has no evaluations before its end",
                          remedy="add --eval_interval N")
