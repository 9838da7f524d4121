"""Verify and summarize single checkpoints."""

from pathlib import Path

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.verify import Advance, find_damage, unloadable_files
from pretrain.checkpoint.load.select import FoundCheckpoint
from pretrain.errors import ConfigError
from pretrain.terminal.progress import ProgressBar


def verify(found: FoundCheckpoint, advance: Advance | None = None) -> list[str]:
    """Read every file of a checkpoint and return one line for each problem.

    Pickles are scanned for unusual classes only if all sizes and hashes are right.
    """
    if found.manifest is None:
        return [found.error]
    return find_damage(found.folder, found.manifest, advance=advance) or unloadable_files(found.folder, found.manifest)


def reject_damaged(folder: Path, manifest: Manifest) -> None:
    """Read every file of a checkpoint. Raises ConfigError if one is damaged, or if it would not be loaded."""
    found = FoundCheckpoint(folder, manifest)
    with ProgressBar(f"verifying {folder.name}", found.num_bytes) as progress:
        problems = verify(found, progress.advance)
    if problems:
        raise damaged_checkpoint(folder, problems)


def damaged_checkpoint(folder: Path, problems: list[str]) -> ConfigError:
    """Return the error for a checkpoint with these problems. Its message has the first one."""
    return ConfigError(str(folder), problem=f"the checkpoint is damaged: {problems[0].rstrip('.')}",
                       remedy="use another checkpoint")


def layout_summary(manifest: Manifest) -> str:
    """Describe the layout of the run that wrote a checkpoint, such as "4 ranks, ZeRO-1".

    With pipeline stages, or tensor- or sequence-parallel ranks, "2 stages x 2 tensor-parallel x 2 data-parallel"
    follows; with expert parallelism, "experts divided over 2 ranks"; with offload, "optimizer on cpu".
    """
    if manifest.weights_only:
        return "weights only"
    parts = [f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}", f"ZeRO-{manifest.zero_stage}"]
    degrees = [f"{size} {name}" for size, name in (
        (manifest.pipeline_stages, "stages"), (manifest.tensor_parallel_size, "tensor-parallel"),
        (manifest.sequence_parallel_size, "sequence-parallel")) if size > 1]
    if degrees:
        parts.append(" x ".join([*degrees, f"{manifest.data_parallel_size} data-parallel"]))
    if manifest.expert_parallel_size > 1:
        parts.append(f"experts divided over {manifest.expert_parallel_size} ranks")
    for offloaded, device in (("optimizer", manifest.offload_optimizer), ("parameters", manifest.offload_param)):
        if device != "none":
            parts.append(f"{offloaded} on {device}")
    return ", ".join(parts)
