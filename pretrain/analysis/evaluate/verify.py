"""Compare the files of the model to evaluate with their recorded hashes: results of damaged weights have no meaning."""

import torch.distributed as dist

from pretrain.analysis.evaluate.source import EvaluationSource
from pretrain.checkpoint.convert.inspect import damaged_checkpoint, reject_damaged
from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.agree import find_damage_together
from pretrain.checkpoint.load.hf_hashes import verify_recorded_hashes
from pretrain.distributed.collectives import from_rank_0


def verify_source(source: EvaluationSource) -> None:
    """Read all files of a checkpoint, or those of a transformers folder whose hashes are recorded.

    Collective if there are several ranks. Raises ConfigError, on every rank, if a file is damaged.
    """
    found, several_ranks = source.hf_folder, dist.is_initialized()
    if found is not None and several_ranks:
        from_rank_0(lambda: verify_recorded_hashes(found))
    elif found is not None:
        verify_recorded_hashes(found)
    elif several_ranks:
        damage = find_damage_together(source.folder, read_manifest(source.folder))
        if damage:
            raise damaged_checkpoint(source.folder, damage)
    else:
        reject_damaged(source.folder, read_manifest(source.folder))
