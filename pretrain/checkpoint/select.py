"""Which checkpoint of a run a tool reads, found without importing torch."""

from pathlib import Path

from pretrain.checkpoint.manifest import Manifest, newest_whole, read_manifest
from pretrain.errors import ConfigError
from pretrain.metrics.rows import newest_start


def chosen_checkpoint(run: Path, step: int | None = None) -> tuple[Path, Manifest]:
    """The newest whole checkpoint of a run folder, or that of `step`. Raises ConfigError."""
    if not run.is_dir():
        raise ConfigError(str(run), problem="there is no such run folder", remedy="name the folder that --save gave")
    checkpoints = run / "checkpoints"
    if step is not None:
        folder = checkpoints / f"global_step{step}"
        return folder, read_manifest(folder)
    newest = newest_whole(checkpoints)
    if newest is None:
        raise ConfigError(str(checkpoints), found="no checkpoint", expected="at least one",
                          remedy="train first, or name the run folder that --save gave")
    return newest[:2]


def tokenizer_of(run: Path) -> str:
    """The tokenizer that the run was last started with. Raises ConfigError where it had none."""
    tokenizer = newest_start(run)["flags"].get("tokenizer")
    if not isinstance(tokenizer, str):
        raise ConfigError("--tokenizer", found="nothing, and the run had none", expected="the data's tokenizer")
    return tokenizer
