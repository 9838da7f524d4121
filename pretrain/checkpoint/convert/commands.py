"""What tools/checkpoint.py does with checkpoints, without printing."""

from pathlib import Path

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.verify import Advance, find_damage, unloadable_files
from pretrain.checkpoint.load.select import FoundCheckpoint
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

SOURCE = "source.json"  # a file in an exported folder: which checkpoint it was made from


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


def verify(found: FoundCheckpoint, advance: Advance | None = None) -> list[str]:
    """Read every file of a checkpoint and list what is wrong; [] if nothing is.

    Files that have their hash must also be loadable.
    """
    if found.manifest is None:
        return [found.complaint]
    return find_damage(found.folder, found.manifest, advance=advance) or unloadable_files(found.folder, found.manifest)


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
