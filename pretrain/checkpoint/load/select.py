"""Find the checkpoints and the tokenizer that a tool reads, without importing torch."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_folders,
    manifest_or_error,
    newest_complete,
    read_manifest,
    step_of,
)
from pretrain.errors import ConfigError
from pretrain.monitor.rows import newest_start


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint's folder, and its manifest, or what is wrong with it."""

    folder: Path
    manifest: Manifest | None
    complaint: str = ""

    @property
    def step(self) -> int:
        """From the manifest, or from the folder's name if there is none."""
        return self.manifest.step if self.manifest else step_of(self.folder)

    @property
    def num_bytes(self) -> int:
        """Of the files that its manifest names."""
        return sum(record.bytes for record in self.manifest.files.values()) if self.manifest else 0


def find_checkpoints_folder(path: Path) -> Path:
    """The folder with the checkpoints of a run: of the run's folder, or that folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_checkpoints(path: Path) -> list[FoundCheckpoint]:
    """The checkpoints of a run folder, of its checkpoints folder, or `path` itself; the newest first.

    Raises ConfigError where there is none.
    """
    if is_checkpoint(path):
        return [_found_checkpoint(path)]
    folders = checkpoint_folders(find_checkpoints_folder(path))
    if not folders:
        raise ConfigError(str(path), found="no checkpoint", expected="a run's folder, or a checkpoint's")
    return [_found_checkpoint(folder) for folder in folders]


def find_checkpoint(path: Path, *, step: int | None = None) -> FoundCheckpoint:
    """`path` itself; of a run folder the newest complete checkpoint, or that of `step`. Raises ConfigError."""
    if is_checkpoint(path):
        found = FoundCheckpoint(path, read_manifest(path))
        if step is not None and found.step != step:
            raise ConfigError("--step", found=f"{step}, and {path}", expected="one of the two",
                              remedy="name the run folder, or leave --step out")
        return found
    if step is not None:
        folder = find_checkpoints_folder(path) / f"global_step{step}"
        return FoundCheckpoint(folder, read_manifest(folder))
    newest = newest_complete(find_checkpoints_folder(path))
    if newest is None:
        raise ConfigError(str(path), found="no checkpoint", expected="a run's folder, or a checkpoint's",
                          remedy="name what --save named, or a global_stepN folder")
    return FoundCheckpoint(newest[0], newest[1])


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is one checkpoint's folder, damaged or not."""
    return (step_of(path) >= 0 and path.is_dir()) or (path / MANIFEST).is_file()


def _found_checkpoint(folder: Path) -> FoundCheckpoint:
    found = manifest_or_error(folder)
    if isinstance(found, ConfigError):
        return FoundCheckpoint(folder, None, str(found))
    return FoundCheckpoint(folder, found)


def select_checkpoint(path: Path, step: int | None = None) -> tuple[Path, Manifest]:
    """The checkpoint in a global_stepN folder, or of a run folder the newest complete one or that of `step`.

    Raises ConfigError.
    """
    if not path.is_dir():
        raise ConfigError(str(path), problem="there is no such folder",
                          remedy="name a run folder (what --save gave) or a global_stepN folder")
    found = find_checkpoint(path, step=step)
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
