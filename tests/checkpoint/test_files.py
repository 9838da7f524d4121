"""Files are hashed during writing. All damage to real checkpoints is detected, and damaged checkpoints are skipped."""

import errno
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.format.hashed_files import (
    FileGroup,
    FileRecord,
    HashedFile,
    sha256_of,
    write_atomically,
)
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints, files_in, newest_good, read_manifest
from pretrain.checkpoint.format.verify import files_of_rank, find_damage
from pretrain.errors import ConfigError
from pretrain.paths import free_bytes
from tests.support.checkpoints import STEPS, copy_checkpoints, newest_verified, real_run
from tests.support.launch import ROOT

FLIPS = 150  # flipped bits


@pytest.fixture(scope="module")
def checkpoints(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy three real checkpoints. A test that damages a checkpoint must repair the checkpoint."""
    run = real_run("pipeline2", corpus, tmp_path_factory)
    return copy_checkpoints(run, tmp_path_factory.mktemp("copy") / "checkpoints")


def _newest(checkpoints: Path) -> Path:
    return checkpoints / f"global_step{STEPS}"


def _is_detected(checkpoints: Path, name: str) -> bool:
    """Return whether the newest checkpoint is rejected with the file's name, and the previous checkpoint is chosen."""
    folder = _newest(checkpoints)
    try:
        problems = find_damage(folder, read_manifest(folder))
    except ConfigError as error:
        problems = [str(error)]
    chosen = newest_verified(checkpoints)
    return any(line.startswith(str(folder / name)) for line in problems) \
        and chosen is not None and chosen[1].step == STEPS - 1


def test_real_checkpoints_are_complete(checkpoints: Path) -> None:
    complete, errors = complete_checkpoints(checkpoints)
    assert [manifest.step for _, manifest in complete] == [3, 2, 1]
    assert errors == []
    for folder, manifest in complete:
        assert find_damage(folder, manifest) == []
        assert manifest.files.keys() == set(files_in(folder))
        assert len(manifest.files) >= 7
        assert Manifest.from_json(manifest.to_json()) == manifest == read_manifest(folder)
        assert manifest.eval_loss is not None


def test_every_flipped_bit_is_detected(checkpoints: Path) -> None:
    folder, numbers = _newest(checkpoints), random.Random(0)
    names = [*files_in(folder), MANIFEST]
    detected, flips = 0, [*names, *numbers.choices(names, k=FLIPS - len(names))]
    for name in flips:
        path = folder / name
        content = path.read_bytes()
        position, bit = numbers.randrange(len(content)), numbers.randrange(8)
        path.write_bytes(content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1:])
        detected += _is_detected(checkpoints, name)
        path.write_bytes(content)
    print(f"flipped bits detected: {detected} of {FLIPS} in {len(names)} files")
    assert detected == FLIPS
    assert newest_verified(checkpoints) == (folder, read_manifest(folder))


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_detected(checkpoints: Path) -> None:
    content = (_newest(checkpoints) / MANIFEST).read_bytes()
    accepted = 0
    for position in range(len(content)):
        changed = content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1:]
        try:
            Manifest.from_json(changed.decode())
            accepted += 1
        except ValueError:
            continue
    print(f"manifests with a flipped bit that were accepted: {accepted} of {len(content)}")
    assert accepted == 0


def _damages(folder: Path, name: str) -> dict[str, Callable[[Path], object]]:
    """Return {name of the damage: function that damages a file}."""
    size = (folder / name).stat().st_size
    damages: dict[str, Callable[[Path], object]] = {
        f"truncated to {percent} %": lambda path, percent=percent: os.truncate(path, size * percent // 100)
        for percent in (0, 1, 50, 99)}
    damages["deleted"] = lambda path: path.unlink()
    damages["grown"] = lambda path: path.write_bytes(path.read_bytes() + b"\0")
    damages["zeroed"] = lambda path: path.write_bytes(bytes(size))
    damages["a folder"] = lambda path: (path.unlink(), path.mkdir())
    damages["a link"] = lambda path: (path.rename(path.parents[1] / "elsewhere"), path.symlink_to("../elsewhere"))
    return damages


def _repair(path: Path, content: bytes) -> None:
    """Restore the file after any of `_damages`."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        path.rmdir()
    path.write_bytes(content)
    (path.parents[1] / "elsewhere").unlink(missing_ok=True)


def test_damaged_files_are_detected(checkpoints: Path) -> None:
    folder, cases = _newest(checkpoints), 0
    for name in [*files_in(folder), MANIFEST]:
        content = (folder / name).read_bytes()
        for damage, apply in _damages(folder, name).items():
            if (name, damage) == (MANIFEST, "a link"):
                continue  # a manifest may be a link, because only its content is validated
            apply(folder / name)
            assert _is_detected(checkpoints, name), (name, damage)
            if not damage.startswith(("zeroed", "a link")):  # the other damages change the size: no hashing is needed
                found = newest_good(checkpoints)
                assert found is not None
                assert found[1].step == STEPS - 1, (name, damage)
                assert name in found[2][0], (name, damage)
            _repair(folder / name, content)
            cases += 1
    print(f"damaged files detected: {cases} of {cases}")
    assert find_damage(folder, read_manifest(folder)) == []


def test_unknown_files_and_exchanged_manifests_are_detected(checkpoints: Path) -> None:
    folder = _newest(checkpoints)
    for unknown in ("layer_99-model_states.pt", "sub/x", ".hidden"):
        (folder / unknown).parent.mkdir(exist_ok=True)
        (folder / unknown).symlink_to("/nowhere")
        assert _is_detected(checkpoints, unknown)
        (folder / unknown).unlink()
    (folder / "sub").rmdir()
    content, older = (folder / MANIFEST).read_bytes(), checkpoints / f"global_step{STEPS - 1}" / MANIFEST
    (folder / MANIFEST).write_bytes(older.read_bytes())
    assert _is_detected(checkpoints, MANIFEST)
    manifest = Manifest.from_json(content.decode())
    outside = replace(manifest, files={**manifest.files, "../latest": FileRecord(12, "0" * 64)})
    (folder / MANIFEST).write_text(outside.to_json())
    assert _is_detected(checkpoints, MANIFEST)
    (folder / MANIFEST).write_bytes(content)
    assert newest_verified(checkpoints) == (folder, manifest)


def test_hashed_file_has_the_written_content_and_its_hash(tmp_path: Path) -> None:
    numbers = random.Random(1)
    sizes = [0, 1, 2**16 - 1, 2**16, 2**24 + 1, *(numbers.randrange(2**17) for _ in range(50))]
    expected, buffer = bytearray(), bytearray(2**24 + 1)
    with HashedFile(tmp_path / "file") as file:
        for size in sizes:
            piece = memoryview(buffer)[:size]  # the buffer is reused: HashedFile must not read it after the write
            piece[:] = numbers.randbytes(size)
            assert file.write(piece) == size
            expected += piece
    record = file.close()
    assert (tmp_path / "file").read_bytes() == expected
    assert record == FileRecord(len(expected), hashlib.sha256(expected).hexdigest())
    assert sha256_of(tmp_path / "file") == record.sha256
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")


def test_files_are_synced_when_they_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size) or
                        fsync(descriptor))
    sizes = {f"file{number}": size for number, size in enumerate([0, 1, 2**16, 2**22, 2**25 + 3, *range(100, 180)])}
    with FileGroup() as group:
        for name, size in sizes.items():
            with group.open_file(tmp_path / name) as file:
                file.write(random.Random(size).randbytes(size))
        records = group.finish()
    assert sorted(synced) == sorted(sizes.values())
    assert {name: FileRecord(size, sha256_of(tmp_path / name)) for name, size in sizes.items()} == records


def test_a_file_that_cannot_be_synced_is_reported_with_its_name(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, descriptors = os.fsync, set(os.listdir("/proc/self/fd"))

    def full_disk(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("file7"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    with FileGroup() as group:
        for number in range(9):
            with group.open_file(tmp_path / f"file{number}") as file:
                file.write(b"x")
        with pytest.raises(OSError, match="No space left on device") as raised:
            group.finish()
    assert raised.value.filename == str(tmp_path / "file7")
    assert set(os.listdir("/proc/self/fd")) <= descriptors  # all files are closed


def test_torch_save_writes_to_a_hashed_file(tmp_path: Path) -> None:
    import torch

    tensors = {"large": torch.randn(2**20), "small": torch.arange(3), "text": "x"}
    with HashedFile(tmp_path / "tensors.pt") as file:
        torch.save(tensors, file)
    assert file.close().sha256 == sha256_of(tmp_path / "tensors.pt")
    loaded = torch.load(tmp_path / "tensors.pt", weights_only=True)
    assert torch.equal(loaded["large"], tensors["large"])
    abandoned = HashedFile(tmp_path / "abandoned")
    with pytest.raises(TypeError, match="module"), abandoned:
        torch.save({"not": sys}, abandoned)
    with pytest.raises(OSError, match="not completed, because of an earlier error"):
        abandoned.close()


def test_small_files_are_replaced_atomically(tmp_path: Path) -> None:
    write_atomically(tmp_path / "latest", "one")
    write_atomically(tmp_path / "latest", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text() == "two"
    assert 0 < free_bytes(tmp_path / "not" / "there") <= free_bytes(tmp_path)


def test_files_are_divided_evenly_among_ranks() -> None:
    numbers = random.Random(2)
    sizes = {f"file{index}": numbers.choice([0, 10, 1000, 5000]) for index in range(200)}
    for ranks in (1, 3, 8):
        names_by_rank = [files_of_rank(sizes, rank, ranks) for rank in range(ranks)]
        assert sorted(name for names in names_by_rank for name in names) == sorted(sizes)
        loads = [sum(sizes[name] for name in names) for names in names_by_rank]
        assert max(loads) - min(loads) <= 5000
    assert files_of_rank({"one": 5}, 1, 2) == []


def test_verification_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, time; start = time.perf_counter();" \
           "from pretrain.checkpoint.format import verify;" \
           "from pretrain.checkpoint.save import commit, mirror, retention;" \
           "print(f'imported in {1e3 * (time.perf_counter() - start):.0f} ms');" \
           "print([name for name in ('torch', 'deepspeed', 'numpy', 'transformers', 'fsspec') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=True, timeout=900)
    print(done.stdout)
    assert done.stdout.splitlines()[-1] == "[]"
