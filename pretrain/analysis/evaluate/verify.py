"""Compare the files of the model to evaluate with their recorded hashes: results of damaged weights have no meaning."""

from dataclasses import replace

import torch.distributed as dist

from pretrain.analysis.evaluate.source import EvaluationSource
from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.load.agree import find_damage_together
from pretrain.checkpoint.load.hf_folder import HFFolder
from pretrain.checkpoint.load.hf_hashes import expected_hashes, hash_files
from pretrain.distributed.collectives import from_rank_0
from pretrain.errors import ConfigError
from pretrain.terminal.progress import ProgressBar


def verify_source(source: EvaluationSource) -> None:
    """Read all files of a checkpoint, or those of a transformers folder whose hashes are recorded.

    Collective if there are several ranks. Raises ConfigError, on every rank, if a file is damaged.
    """
    found, several_ranks = source.hf_folder, dist.is_initialized()
    if found is not None and several_ranks:
        from_rank_0(lambda: _verify_hf_folder(found))
        return
    if found is not None:
        _verify_hf_folder(found)
        return
    manifest = read_manifest(source.folder)
    if several_ranks:
        damage = find_damage_together(source.folder, manifest)
    else:
        with ProgressBar("verifying", sum(record.bytes for record in manifest.files.values())) as progress:
            damage = find_damage(source.folder, manifest, advance=progress.advance)
    if damage:
        raise ConfigError(str(source.folder), problem=f"the checkpoint is damaged: {damage[0].rstrip('.')}",
                          remedy="use another checkpoint")


def _verify_hf_folder(found: HFFolder) -> None:
    """Read the files whose hashes are recorded. Raises ConfigError for a damaged one."""
    hash_files(replace(found, files=tuple(expected_hashes(found.folder, found.files))))
