"""Rules for tensor, sequence and expert parallelism: which degrees, settings and models can be combined."""

from pretrain.config.ds_json.optimizers import ELEMENTWISE_OTHERS
from pretrain.config.parallel_degrees import EXPERT, SEQUENCE, TENSOR
from pretrain.config.resolve import ResolvedConfig
from pretrain.data.datasets.seq_lengths import parse_seq_lengths
from pretrain.errors import ConfigError

_ZERO = "zero_optimization"
# Optimizers that update a weight from its own gradient and states alone: a part of a matrix is enough for them.
_ELEMENTWISE = ("adam", "adamw", "lion", "adagrad", *ELEMENTWISE_OTHERS)


def degrees_together(run: ResolvedConfig) -> None:
    """Reject combinations of parallel degrees that no engine here supports."""
    layout = run.layout
    if layout.sequence_parallel_size > 1 and layout.pipeline_stages > 1:
        raise run.error(SEQUENCE, expected="1 with pipeline stages",
                        remedy="DeepSpeed's pipelines ignore it; use ZeRO stage 1, 2 or 3 without stages")
    if layout.sequence_parallel_size > 1 and layout.tensor_parallel_size > 1:
        raise run.error(SEQUENCE, expected="1 with tensor parallelism",
                        remedy=f'Tensor-parallel ranks already share the sequences; set one of "{SEQUENCE}" and '
                               f'"{TENSOR}" to 1')
    if layout.expert_parallel_size > 1 and layout.pipeline_stages > 1:
        raise run.error(EXPERT, expected="1 with pipeline stages", remedy="use ZeRO stage 1 or 2 without stages")
    for key, size in ((TENSOR, layout.tensor_parallel_size), (SEQUENCE, layout.sequence_parallel_size)):
        if layout.expert_parallel_size > 1 and size > 1:
            raise run.error(EXPERT, expected=f'1 with "{key}": {size}',
                            remedy="no engine here supports both; set one of the two degrees to 1")


def even_shares(run: ResolvedConfig) -> None:
    """Reject heads and sequences that the tensor- or sequence-parallel ranks cannot share evenly."""
    layout, model, args = run.layout, run.model, run.args
    # under sequence parallelism, key and value heads may be copied
    heads = [(TENSOR, layout.tensor_parallel_size, "attention", model.num_heads),
             (TENSOR, layout.tensor_parallel_size, "key and value", model.num_kv_heads),
             (SEQUENCE, layout.sequence_parallel_size, "attention", model.num_heads)]
    for key, ranks, kind, number in heads:
        if number % ranks:
            raise run.error(key, expected=f"a divisor of the model's {number} {kind} heads",
                            remedy="in attention, each rank computes some of the heads")
    schedule = parse_seq_lengths(args.seq_length_schedule, seq_length=args.seq_length)
    lengths = [("--seq_length", args.seq_length), *(("--seq_length_schedule", length) for _, length in schedule.stages)]
    for key, ranks in ((TENSOR, layout.tensor_parallel_size), (SEQUENCE, layout.sequence_parallel_size)):
        for flag, length in lengths:
            if length % ranks:
                raise ConfigError(flag, found=f"length {length}", expected=f"a multiple of {ranks}",
                                  remedy=f'"{key}": {ranks} divides each sequence evenly among its ranks')


def optimizer_of_parts(run: ResolvedConfig) -> None:
    """Reject optimizers that need complete matrices, of which a tensor- or expert-parallel rank has a part."""
    layout = run.layout
    if layout.optimizer in _ELEMENTWISE:
        return
    if layout.tensor_parallel_size > 1:
        raise run.error("optimizer.type", expected=f'Adam, AdamW, Lion, SGD or another elementwise one with "{TENSOR}"',
                        remedy="it needs complete matrices, and each rank has a part of them; use AdamW")
    if layout.expert_parallel_size > 1:
        raise run.error("optimizer.type", expected=f'Adam, AdamW, Lion, SGD or another elementwise one with "{EXPERT}"',
                        remedy="it needs one matrix at a time, and the experts of a rank are one tensor; use AdamW")


def zero_plus_plus_of_parts(run: ResolvedConfig) -> None:
    """Reject ZeRO++ with other ranks than data-parallel ones: DeepSpeed's groups for it consist of all ranks."""
    layout, hpz = run.layout, f"{_ZERO}.zero_hpz_partition_size"
    if layout.hpz_partition_size > 1 and layout.tensor_parallel_size > 1:
        raise run.error(hpz, expected=f'1 with "{TENSOR}"',
                        remedy="DeepSpeed would share the secondary copy among tensor-parallel ranks, whose parameters "
                               "differ; remove the key")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        for key, size in ((TENSOR, layout.tensor_parallel_size), (SEQUENCE, layout.sequence_parallel_size)):
            if run.get(f"{_ZERO}.{name}") and size > 1:
                raise run.error(f"{_ZERO}.{name}", expected=f'false with "{key}": {size}',
                                remedy="DeepSpeed sums the quantized gradients of all ranks as if each had its own "
                                       "samples and the same parameters; remove the key")


def compiled_parts(run: ResolvedConfig) -> None:
    """Reject the compiler if it cannot trace the communication inside of a block."""
    layout = run.layout
    for key, size in ((SEQUENCE, layout.sequence_parallel_size), (EXPERT, layout.expert_parallel_size)):
        if run.args.compile_blocks and size > 1:
            raise ConfigError("--compile_blocks", found=f'"{key}": {size}', expected="1",
                              remedy="a block is compiled as one graph, which cannot contain the communication between "
                                     "its layers; leave --compile_blocks out")
