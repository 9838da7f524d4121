"""Rules for recomputation and for the offload of activations."""

from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError

_INTERVAL = "pipeline.activation_checkpoint_interval"
_OFFLOAD = "activation_checkpointing.cpu_checkpointing"


def one_setting_for_recomputation(run: ResolvedConfig) -> None:
    """Reject --recompute next to the JSON's interval: both say what is recomputed."""
    part, interval = run.args.recompute, run.layout.activation_checkpoint_interval
    if part is not None and interval:
        raise run.error(_INTERVAL, found=f"{interval} with --recompute {part}", expected="one of the two",
                        remedy="both say what is recomputed; leave --recompute out, or set the key to 0")


def recompute_every(run: ResolvedConfig) -> None:
    every, part, layers = run.args.recompute_every, run.args.recompute, run.model.num_layers
    if every > 1 and part in (None, "none"):
        raise ConfigError("--recompute_every", found=f"{every} without a part that is recomputed", expected="1",
                          remedy="add --recompute blocks, attention or mlp")
    if every > layers:
        raise ConfigError("--recompute_every", found=every, expected=f"at most {layers}, the model's layers")


def mlp_tiles(run: ResolvedConfig) -> None:
    tiles, tokens = run.args.mlp_tiles, run.args.seq_length * run.layout.micro_batch_size
    if tiles > 1 and run.args.recompute == "mlp":
        raise ConfigError("--mlp_tiles", found=f"{tiles} with --recompute mlp", expected="1, or another part",
                          remedy="tiles are recomputed already; leave --recompute out, or use --recompute blocks")
    if tiles > 1 and run.model.num_experts:
        raise ConfigError("--mlp_tiles", found=f"{tiles} with a model of experts", expected="1",
                          remedy="the experts of each token are chosen among all tokens of a micro-batch")
    if tiles > tokens:
        raise ConfigError("--mlp_tiles", found=tiles, expected=f"at most {tokens}, the tokens of a micro-batch")


def offload_needs_complete_blocks(run: ResolvedConfig) -> None:
    """Reject the offload of the inputs of parts: in most models, the other part keeps the same input on the device."""
    if run.get(_OFFLOAD) and run.args.recompute in ("attention", "mlp"):
        raise run.error(_OFFLOAD, expected=f"false with --recompute {run.args.recompute}",
                        remedy="it keeps the inputs of complete blocks in host memory: use --recompute blocks")
