"""Copy checkpoints to a mirror and back: a local folder, and an S3 server in a separate process."""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import LATEST_FILE, complete_checkpoints, read_manifest
from pretrain.checkpoint.format.verify import files_of_rank, find_damage
from pretrain.checkpoint.save.mirror import (
    check_mirror,
    fetch,
    finish_upload,
    mirrored_checkpoints,
    upload,
)
from pretrain.errors import ConfigError, SaveError
from tests.support.checkpoints import real_run
from tests.support.stores import s3_server

NEWEST = "global_step3"


@pytest.fixture(scope="module")
def s3_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return a URL in an empty bucket of an S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket"):
        yield "s3://bucket/runs/gpt"


@pytest.fixture(params=["file_url", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}" if request.param == "s3" else \
        f"file://{tmp_path}/mirror/"


@pytest.fixture(scope="module")
def checkpoints(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of three real checkpoints. Tests must not change them."""
    return real_run("zero1", corpus, tmp_path_factory) / "checkpoints"


def _mirror(folder: Path, url: str) -> None:
    """Copy a checkpoint to the mirror, first as rank 0 and then as rank 1."""
    for rank in range(2):
        _upload(folder, url, rank)
    finish_upload(folder, url)


def _upload(folder: Path, url: str, rank: int) -> None:
    """Copy one rank's files to the mirror."""
    manifest = read_manifest(folder)
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    upload(folder, url, files_of_rank(sizes, rank, 2), rank=rank, save_id=manifest.save_id)


def _change(url: str, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the content of a file of the newest checkpoint in the mirror."""
    fs, root = fsspec.url_to_fs(url)
    path = f"{root.rstrip('/')}/{NEWEST}/{name}"
    fs.pipe_file(path, change(fs.cat_file(path)))


def test_a_fetched_checkpoint_equals_the_uploaded_one(checkpoints: Path, url: str, tmp_path: Path) -> None:
    check_mirror(url)
    assert mirrored_checkpoints(url) == []
    for step in (1, 3, 2):
        _mirror(checkpoints / f"global_step{step}", url)
    assert mirrored_checkpoints(url) == [NEWEST, "global_step2", "global_step1"]
    folder = fetch(url, tmp_path / "fetched", NEWEST)
    assert folder == tmp_path / "fetched" / NEWEST
    assert find_damage(folder, read_manifest(folder)) == []
    assert (folder / MANIFEST).read_bytes() == (checkpoints / NEWEST / MANIFEST).read_bytes()
    assert {path.name for path in folder.parent.iterdir()} == {NEWEST, LATEST_FILE}
    (folder / MANIFEST).unlink()
    fetch(url, tmp_path / "fetched", NEWEST)  # replaces the damaged copy
    assert [found.step for _, found in complete_checkpoints(folder.parent)[0]] == [3]


def _names_in(url: str) -> set[str]:
    """Return the names of the newest checkpoint's files in the mirror."""
    fs, root = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    return {path.rpartition("/")[2] for path in fs.find(f"{root.rstrip('/')}/{NEWEST}")}


def test_unfinished_uploads_do_not_count_as_checkpoints(checkpoints: Path, url: str, tmp_path: Path) -> None:
    _mirror(checkpoints / "global_step2", url)
    folder = checkpoints / NEWEST
    _upload(folder, url, 0)
    assert mirrored_checkpoints(url) == ["global_step2"]
    with pytest.raises(ConfigError, match=r"rank 1 has not copied its files within 0\.01 s"):
        finish_upload(folder, url, timeout_s=0.01, poll_s=0.01)
    _upload(folder, url, 1)
    assert mirrored_checkpoints(url) == ["global_step2"]
    finish_upload(folder, url)
    assert mirrored_checkpoints(url) == [NEWEST, "global_step2"]
    assert _names_in(url) == {MANIFEST, *read_manifest(folder).files}
    again = Path(shutil.copytree(folder, tmp_path / "again" / NEWEST))  # another save of the same step
    (again / MANIFEST).write_text(replace(read_manifest(folder), save_id="another").to_json())
    _upload(again, url, 0)
    assert mirrored_checkpoints(url) == ["global_step2"]
    with pytest.raises(ConfigError, match="rank 1 has not copied its files"):
        finish_upload(again, url, timeout_s=0.01, poll_s=0.01)
    _upload(again, url, 1)
    finish_upload(again, url)
    assert mirrored_checkpoints(url) == [NEWEST, "global_step2"]


def test_damage_in_the_mirror_is_detected(checkpoints: Path, url: str, tmp_path: Path) -> None:
    _mirror(checkpoints / "global_step2", url)
    _mirror(checkpoints / NEWEST, url)
    largest = max((checkpoints / NEWEST).iterdir(), key=lambda path: path.stat().st_size).name
    _change(url, largest, lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(ConfigError, match=rf"{NEWEST}/{largest}: found .*[Tt]he mirror's copy is damaged"):
        fetch(url, tmp_path / "fetched", NEWEST)
    assert list((tmp_path / "fetched").iterdir()) == []
    changes: list[Callable[[bytes], bytes]] = [lambda content: content[:-1], lambda content: b""]
    for change in changes:
        _change(url, largest, change)
        with pytest.raises(ConfigError, match=rf"{NEWEST}/{largest}: found .*[Tt]he mirror's copy is damaged"):
            fetch(url, tmp_path / "fetched", NEWEST)
    for change in changes:
        _change(url, MANIFEST, change)
        with pytest.raises(ConfigError, match=f"{NEWEST}: the manifest is missing"):
            fetch(url, tmp_path / "fetched", NEWEST)
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.root
def test_fetch_onto_a_full_disk_fails_and_leaves_no_files(checkpoints: Path, tmp_path: Path) -> None:
    _mirror(checkpoints / NEWEST, str(tmp_path / "mirror"))
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system")
    try:
        with pytest.raises(SaveError, match="bytes needed"):
            fetch(str(tmp_path / "mirror"), disk, NEWEST)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_unusable_mirrors_give_a_one_line_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # reserves a port on which no server listens
        for bad_url, message in (
                ("gopher9://host/run", "Protocol not known: gopher9"),
                ("sftp://me:hidden@host/run", "sftp://host/run: the mirror cannot be used: ImportError"),
                (f"ftp://me:hidden@127.0.0.1:{taken.getsockname()[1]}/run", "Connection refused"),
                ("/proc/run", "/proc/run: the mirror cannot be used")):
            with pytest.raises(ConfigError, match=message) as caught:
                check_mirror(bad_url)
            assert "hidden" not in str(caught.value)
            assert "\n" not in str(caught.value)
            print(caught.value)


def test_a_misspelt_bucket_is_not_created(s3_bucket: str) -> None:
    with pytest.raises(ConfigError, match="s3://bukket/run: the mirror cannot be used: FileNotFoundError"):
        check_mirror("s3://bukket/run")
    assert fsspec.filesystem("s3").ls("", refresh=True) == ["bucket"]
