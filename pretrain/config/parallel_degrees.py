"""The parallel degrees of a DeepSpeed JSON, checked against the ranks before the batch sizes are filled."""

from pretrain.config.ds_json.read import DsFile
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig

TENSOR = "tensor_parallel.autotp_size"
SEQUENCE = "sequence_parallel_size"
EXPERT = "expert_parallel.autoep_size"


def ranks_per_replica(file: DsFile, *, zero_stage: int, world_size: int, model: ModelConfig) -> int:
    """Return the ranks that process the same samples: pipeline stages x tensor-parallel x sequence-parallel ranks.

    Raises ConfigError for a degree that fits neither the ranks nor the ZeRO stage nor the model.
    """
    ranks = _pipeline_stages(file, zero_stage, world_size, model)
    for key in (TENSOR, SEQUENCE):
        degree = max(1, int(file.get(key, 1) or 1))
        if world_size % (ranks * degree):
            raise ConfigError(file.where(key), found=f"{degree}, with {world_size // ranks} ranks to share",
                              expected="a number that divides these ranks",
                              remedy=f"launch {ranks * degree} or {2 * ranks * degree} ranks")
        ranks *= degree
    return ranks


def _pipeline_stages(file: DsFile, zero_stage: int, world_size: int, model: ModelConfig) -> int:
    """Return pipeline.stages. Raises ConfigError unless it fits the ZeRO stage, the ranks and the model."""
    stages = int(file.get("pipeline.stages", 1))
    where = file.where("pipeline.stages")
    if stages > 1 and zero_stage >= 2:
        raise ConfigError(where, found=f"{stages} with zero_optimization.stage {zero_stage}", expected="1",
                          remedy="DeepSpeed's pipelines work with ZeRO stage 0 or 1")
    if stages > model.num_layers:
        raise ConfigError(where, found=stages, expected=f"at most {model.num_layers}, the model's layers")
    if world_size % stages:
        raise ConfigError(where, found=f"{stages} stages on {world_size} ranks",
                          expected="a number that divides the ranks",
                          remedy=f"launch {stages}, {2 * stages} or {3 * stages} ranks")
    return stages
