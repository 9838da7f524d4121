"""Layers and parameters of each pipeline stage, divided as the engine divides them (model/partition.py)."""

from functools import lru_cache

from pretrain.config.layout import Layout
from pretrain.memory.estimate.model_shape import Layer, ModelShape, Tensor
from pretrain.model.flops import keys_per_query
from pretrain.model.partition import LayerCost, stage_bounds

_CLASS_NAMES = {"embedding": "TokenEmbedding", "positions": "PositionEmbedding", "block": "Block"}


def layer_work(shape: ModelShape, layer: Layer, seq_length: int) -> int:
    """Return a sixth of a layer's training FLOPs per token (model/flops.py counts the same way).

    This is the number of weights that a token is multiplied with, plus 2 * num_heads * head_size * seq_length for the
    attention scores and their product with the values. Only the experts that process the token count.
    """
    if layer.kind not in ("block", "head"):
        return 0
    experts = sum(tensor.size for tensor in layer.tensors if tensor.expert)
    idle = experts * (shape.num_experts - shape.experts_per_token) // shape.num_experts if experts else 0
    keys = keys_per_query(layer.window, seq_length) if layer.kind == "block" else 0
    attention = 2 * shape.num_heads * shape.head_size * keys
    return layer.size - idle + attention


def pipeline_stage_bounds(shape: ModelShape, layout: Layout) -> list[int]:
    """Return indices into `shape.layers()`: pipeline stage i holds the layers bounds[i] to bounds[i + 1] - 1.

    Raises:
        ConfigError: the partition method is unknown, or it leaves a pipeline stage without a layer.
    """
    return _bounds(shape, layout.pipeline_stages, layout.partition_method, layout.seq_length, layout.layer_times)


@lru_cache(maxsize=256)
def _bounds(shape: ModelShape, pipeline_stages: int, partition_method: str, seq_length: int,
            layer_times: tuple[int, ...]) -> list[int]:
    return stage_bounds(layer_costs_of_shape(shape, seq_length), num_stages=pipeline_stages, method=partition_method,
                        times=layer_times)


def layer_costs_of_shape(shape: ModelShape, seq_length: int) -> tuple[LayerCost, ...]:
    """Return what `model.partition.layer_costs` returns for a ModelConfig."""
    return tuple(LayerCost(_class_name(layer, index), layer.size, layer_work(shape, layer, seq_length))
                 for index, layer in enumerate(shape.layers()))


def _class_name(layer: Layer, index: int) -> str:
    if layer.kind == "norm":
        return "EmbeddingNorm" if index == 1 else "FinalNorm"
    if layer.kind == "head":
        return "TokenEmbedding" if layer.tied else "LossHead"
    return _CLASS_NAMES[layer.kind]


def pipeline_stage_layers(shape: ModelShape, layout: Layout, pipeline_stage: int) -> tuple[Layer, ...]:
    """Return the layers of one pipeline stage."""
    bounds = pipeline_stage_bounds(shape, layout)
    return shape.layers()[bounds[pipeline_stage]:bounds[pipeline_stage + 1]]


def pipeline_stage_tensors(shape: ModelShape, layout: Layout, pipeline_stage: int) -> tuple[Tensor, ...]:
    """Return the parameters of one pipeline stage; a matrix that two of its layers share occurs once."""
    return tensors_of(pipeline_stage_layers(shape, layout, pipeline_stage))


def tensors_of(layers: tuple[Layer, ...]) -> tuple[Tensor, ...]:
    """Return the parameters of some layers; a matrix that two of them share occurs once."""
    tied = False
    tensors: list[Tensor] = []
    for layer in layers:
        if not (layer.tied and tied):
            tensors += layer.tensors
        tied = tied or layer.tied
    return tuple(tensors)


def local_size(tensor: Tensor, layout: Layout) -> int:
    """Return a parameter's elements on one rank after tensor and expert parallelism, before ZeRO divides it."""
    return divided_size(tensor, layout.tensor_parallel_size, layout.expert_parallel_size)


def divided_size(tensor: Tensor, tensor_parallel_size: int, expert_parallel_size: int) -> int:
    """Return a parameter's elements on one rank, rounded up, for given degrees of parallelism."""
    ranks = tensor_parallel_size if tensor.split else 1
    ranks *= expert_parallel_size if tensor.expert else 1
    return -(-tensor.size // ranks)
