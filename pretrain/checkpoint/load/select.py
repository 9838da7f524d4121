"""Find the checkpoint and the tokenizer that a tool reads, without importing torch."""

from pathlib import Path

from pretrain.checkpoint.convert.commands import find_one
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.errors import ConfigError
from pretrain.monitor.rows import newest_start


def chosen_checkpoint(path: Path, step: int | None = None) -> tuple[Path, Manifest]:
    """The checkpoint in a global_stepN folder, or of a run folder the newest complete one or that of `step`.

    Raises ConfigError.
    """
    if not path.is_dir():
        raise ConfigError(str(path), problem="there is no such folder",
                          remedy="name a run folder (what --save gave) or a global_stepN folder")
    found = find_one(path, step=step)
    assert found.manifest is not None
    return found.folder, found.manifest


def tokenizer_of(path: Path) -> str:
    """The tokenizer of the run that this run folder or checkpoint belongs to. Raises ConfigError if none is known."""
    runs = (path, *path.absolute().parents[:2])  # RUN, RUN/checkpoints and RUN/checkpoints/global_stepN
    run = next((folder for folder in runs if (folder / "run.json").is_file()), None)
    if run is None:
        raise ConfigError("--tokenizer", found=f"nothing, and no run.json above {path} that names it",
                          expected="the data's tokenizer")
    tokenizer = newest_start(run)["flags"].get("tokenizer")
    if not isinstance(tokenizer, str):
        raise ConfigError("--tokenizer", found="nothing, and the run had none", expected="the data's tokenizer")
    return tokenizer
