"""What tools/checkpoint.py does with checkpoints, without printing: found, judged, verified."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_folders,
    judge_folder,
    newest_whole,
    read_manifest,
    step_of,
)
from pretrain.checkpoint.format.verify import Advance, damage, unreadable
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

SOURCE = "source.json"  # a file in an exported folder: which checkpoint it was made from


@dataclass(frozen=True)
class Found:
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


def checkpoints_of(path: Path) -> Path:
    """The folder with the checkpoints of a run: of the run's folder, or that folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find(path: Path) -> list[Found]:
    """The checkpoints of a run folder, of its checkpoints folder, or `path` itself; the newest first.

    Raises ConfigError where there is none.
    """
    if is_checkpoint(path):
        return [_judge(path)]
    folders = checkpoint_folders(checkpoints_of(path))
    if not folders:
        raise ConfigError(str(path), found="no checkpoint", expected="a run's folder, or a checkpoint's")
    return [_judge(folder) for folder in folders]


def find_one(path: Path, *, step: int | None = None) -> Found:
    """`path` itself; of a run folder the newest complete checkpoint, or that of `step`. Raises ConfigError."""
    if is_checkpoint(path):
        found = Found(path, read_manifest(path))
        if step is not None and found.step != step:
            raise ConfigError("--step", found=f"{step}, and {path}", expected="one of the two",
                              remedy="name the run folder, or leave --step out")
        return found
    if step is not None:
        folder = checkpoints_of(path) / f"global_step{step}"
        return Found(folder, read_manifest(folder))
    newest = newest_whole(checkpoints_of(path))
    if newest is None:
        raise ConfigError(str(path), found="no checkpoint", expected="a run's folder, or a checkpoint's",
                          remedy="name what --save named, or a global_stepN folder")
    return Found(newest[0], newest[1])


def check_new_folder(out: Path) -> None:
    """Raises ConfigError unless `out` is a folder that can be made, or one that an export has filled."""
    try:
        exists, is_export = out.exists(), (out / SOURCE).is_file()
    except OSError:
        exists = is_export = False
    if exists and not is_export:
        raise ConfigError(str(out), found="a folder with something else in it" if out.is_dir() else "a file",
                          expected="a new folder", remedy="remove it, or name another")
    check_folder(out, str(out))


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is one checkpoint's folder, damaged or not."""
    return (step_of(path) >= 0 and path.is_dir()) or (path / MANIFEST).is_file()


def _judge(folder: Path) -> Found:
    found = judge_folder(folder)
    return Found(folder, None, str(found)) if isinstance(found, ConfigError) else Found(folder, found)


def verify(found: Found, advance: Advance | None = None) -> list[str]:
    """Read every file of a checkpoint and list what is wrong; [] if nothing is.

    Files that have their hash must also be loadable.
    """
    if found.manifest is None:
        return [found.complaint]
    return damage(found.folder, found.manifest, advance=advance) or unreadable(found.folder, found.manifest)


def layout(manifest: Manifest) -> str:
    """In a few words: the ranks, and what lies where."""
    parts = [f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}", f"ZeRO-{manifest.zero_stage}"]
    if manifest.pipeline_stages > 1:
        parts.append(f"{manifest.pipeline_stages} stages x {manifest.data_parallel_size} data-parallel")
    parts += [f"{what} on {place}" for what, place in
              (("optimizer", manifest.offload_optimizer), ("parameters", manifest.offload_param)) if place != "none"]
    return ", ".join(parts)


def written(out: Path) -> str:
    """One line: where an export is, and how large."""
    sizes = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    return f"wrote {out}: {len(sizes)} files, {sum(sizes) / 1e6:,.1f} MB"
