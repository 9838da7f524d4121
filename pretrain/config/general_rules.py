"""Settings that a model of the general family does not have: its layers are transformers' own modules."""

from collections.abc import Iterator

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout_rules import EXPERT, SEQUENCE, TENSOR, ZERO, Rule
from pretrain.config.model_of_run import DROPOUTS
from pretrain.config.plan import Plan

_INITIAL_VALUES = ("init_method", "output_init_method", "init_std", "mup_base_width")
_OF_EXPERTS = ("router_aux_loss", "router_z_loss", "expert_capacity_factor")


def general_family(run: Plan) -> Iterator[Rule]:
    """Parallelism inside of layers, and flags that change what a layer computes or how it starts."""
    args, layout, model = run.args, run.layout, run.model
    if not model.described:
        return
    its = f"the layers of {model.architecture} are transformers' own modules"
    for key, size in ((TENSOR, layout.tensor_parallel_size), (SEQUENCE, layout.sequence_parallel_size),
                      (EXPERT, layout.expert_parallel_size)):
        yield Rule(size > 1, key, problem=f"{its}, which cannot be divided among ranks",
                   remedy='use ZeRO, or "pipeline": {"stages": N}; remove the key')
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        yield Rule(run.get(f"{ZERO}.{name}"), f"{ZERO}.{name}", problem=f"{its}, of which DeepSpeed's quantization "
                   "does not support all shapes", remedy="remove the key")
    yield Rule(args.document_attention, "--document_attention", problem=f"{its}, which see all tokens of a sample",
               remedy="leave the flag out; --eod_mask_loss and --packing best_fit have an effect")
    yield Rule(args.compile_blocks, "--compile_blocks", problem=f"{its}, which may not be one graph",
               remedy="leave the flag out")
    yield Rule(args.recompute in ("attention", "mlp"), "--recompute", "blocks or none",
               f"{its}, which are recomputed as a whole")
    yield Rule(args.mlp_tiles > 1, "--mlp_tiles", "1", its)
    for name in _INITIAL_VALUES:
        yield Rule(getattr(args, name) != getattr(RunArguments, name), f"--{name}", problem="it has no effect: the "
                   f"_init_weights of {model.architecture} in transformers draws the initial weights",
                   remedy="leave the flag out; --model_overrides initializer_range=0.01 or the like has an effect")
    for name in DROPOUTS:
        yield Rule(getattr(args, name) is not None, f"--{name}", problem=f"it has no effect: {its}",
                   remedy="--model_overrides changes the dropouts of the config.json, under its own keys")
    for name in _OF_EXPERTS:
        yield Rule(getattr(args, name) != getattr(type(args), name), f"--{name}", problem=f"it has no effect: {its}, "
                   "whose loss is the cross-entropy", remedy="leave the flag out")
