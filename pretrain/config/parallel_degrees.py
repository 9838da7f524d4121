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
    _check_other_names(file)
    for key in (TENSOR, SEQUENCE):
        degree = max(1, int(file.get(key, 1) or 1))
        if world_size % (ranks * degree):
            raise ConfigError(file.where(key), found=f"{degree}, with {_ranks(world_size // ranks)} to share",
                              expected="a number that divides these ranks",
                              remedy=f"launch {ranks * degree} or {2 * ranks * degree} ranks")
        ranks *= degree
    sequence = max(1, int(file.get(SEQUENCE, 1) or 1))
    _check_expert_degree(file, world_size // ranks * sequence)
    return ranks


def _ranks(number: int, kind: str = "") -> str:
    """Return a number of ranks: "1 rank", "2 ranks"."""
    return f"{number} {kind} rank".replace("  ", " ") + ("" if number == 1 else "s")


def _check_other_names(file: DsFile) -> None:
    """Reject a tensor-parallel degree that DeepSpeed would not use: only autotp_size turns it on."""
    degree = max(1, int(file.get(TENSOR, 1) or 1))
    for name in ("tensor_parallel", "tp"):
        key = f"tensor_parallel.{name}.tp_size"
        if file.get(key, 1) not in (1, degree):
            raise ConfigError(file.where(key), found=file.get(key), expected=f'{degree}, the "autotp_size"',
                              remedy='write the degree as "tensor_parallel": {"autotp_size": N}, and remove the key')


def _check_expert_degree(file: DsFile, ranks: int) -> None:
    """Raise ConfigError unless the block is turned on, and the degree divides the data- and sequence-parallel ranks."""
    degree = int(file.get(EXPERT, 1) or 1)
    if degree > 1 and file.get("expert_parallel.enabled") is None:
        raise ConfigError(file.where(EXPERT), found=degree, expected='also "enabled": true in the block',
                          remedy="without it, DeepSpeed ignores the degree")
    if file.get("expert_parallel.enabled") and ranks % degree:
        raise ConfigError(file.where(EXPERT), expected="a number that divides these ranks",
                          found=f"{degree}, with {_ranks(ranks, 'data-parallel')} to share the experts")


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
