"""Commit and pruning with a kill before every change of the disk, with full disks, and with missing ranks."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.hashed_files import FileRecord, HashedFile
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_checkpoints import (
    LATEST_FILE,
    complete_checkpoints,
    head_of,
    parse_head,
    read_head,
    read_manifest,
)
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save.commit import (
    check_space,
    commit,
    has_part,
    remove_leftovers,
    temporary_folder,
    write_part,
)
from pretrain.checkpoint.save.retention import prune
from pretrain.errors import ConfigError, SaveError
from pretrain.paths import free_bytes

RANKS = 2
FILE_BYTES = 400_000


def manifest(step: int, eval_loss: float | None = None, save_id: str = "id") -> Manifest:
    return Manifest(step=step, consumed_samples=4 * step, world_size=RANKS, data_parallel_size=RANKS, pipeline_stages=1,
                    zero_stage=1, precision="bf16", grad_accum_dtype=None, offload_optimizer="none",
                    offload_param="none", optimizer={"type": "AdamW", "params": {"lr": 1e-3}}, global_batch_size=4,
                    seed=0, seq_length=8, model={}, data_fingerprint="", tokenizer_fingerprint=None, versions={},
                    eval_loss=eval_loss, save_id=save_id)


def write_files(temporary: Path, rank: int, num_bytes: int = FILE_BYTES) -> dict[str, FileRecord]:
    """Write two files of a rank through HashedFile. Raises OSError."""
    records = {}
    for kind in ("model", "optim"):
        with HashedFile(temporary / f"{kind}_rank_{rank:05d}.pt") as file:
            file.write(random.Random(f"{temporary}{rank}{kind}").randbytes(num_bytes))
        records[file.path.name] = file.close()
    return records


def save(checkpoints: Path, step: int, *, eval_loss: float | None = None, num_bytes: int = FILE_BYTES) -> Path:
    """Save the files of `RANKS` ranks, one rank after another in this process. Raises SaveError."""
    temporary = temporary_folder(checkpoints, step)
    temporary.mkdir(parents=True)
    for rank in range(RANKS):
        records, error = {}, None
        try:
            records = write_files(temporary, rank, num_bytes)
        except OSError as failure:
            error = str(failure)
        with contextlib.suppress(OSError):  # the disk may be too full for the part file
            write_part(temporary, rank=rank, save_id="id", files=records, error=error)
    commit(temporary, manifest(step, eval_loss), timeout_s=0.1)
    return checkpoints / f"global_step{step}"


def steps_of(checkpoints: Path) -> list[int]:
    """Return the steps of the complete checkpoints, newest first. Fails if a checkpoint is damaged."""
    complete, errors = complete_checkpoints(checkpoints)
    assert not errors
    assert not [line for folder, found in complete for line in find_damage(folder, found)]
    return [found.step for _, found in complete]


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}  # audit events


def _killed_after(changes: int, checkpoints: Path) -> bool:
    """Save step 4 and prune in a fork of this process that is killed after `changes` changes of the disk.

    Return False if it finished with fewer changes.
    """
    child = os.fork()
    if child == 0:
        left, sync = itertools.count(changes, -1), os.fsync

        def hook(event: str, values: tuple[Any, ...]) -> None:
            writes = event == "open" and values[2] & os.O_ACCMODE and str(values[0]).startswith(str(checkpoints))
            if (event in CHANGES or writes) and next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = lambda descriptor: (hook("os.rename", ()), sync(descriptor))[1]
        sys.addaudithook(hook)
        try:
            save(checkpoints, 4, num_bytes=1000)
            prune(checkpoints, keep_checkpoints=2, keep_every=0, keep_best=0, verified=set())
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_the_head_of_a_manifest_has_all_but_the_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, eval_loss=2.5, num_bytes=10)
    assert parse_head(folder) == replace(read_manifest(folder), files={})
    text = (folder / MANIFEST).read_text()
    assert read_head(folder / MANIFEST) == (head_of(text), len(text))
    imported = replace(read_manifest(folder), weights_only=True)  # its fingerprint needs all of it
    (folder / MANIFEST).write_text(imported.to_json())
    assert parse_head(folder) == imported
    for damaged in ("", "{}", text.replace('"step": 1,', '"step": 1'), text[:200]):
        (folder / MANIFEST).write_text(damaged)
        with pytest.raises(ConfigError, match=r"manifest\.json"):
            parse_head(folder)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"save_id": "id"}', b"\xff", b"null"])
def test_a_damaged_part_file_fails_the_save(tmp_path: Path, content: bytes) -> None:
    temporary = temporary_folder(tmp_path, 1)
    temporary.mkdir()
    for rank in range(RANKS):
        write_part(temporary, rank=rank, save_id="id", files=write_files(temporary, rank, 10))
    (temporary / ".part-00001.json").write_bytes(content)
    assert not has_part(temporary, rank=1, save_id="id")
    with pytest.raises(SaveError, match=r"part-00001\.json: the file is damaged: "):
        commit(temporary, manifest(1), timeout_s=0.1)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_kill_at_any_point_loses_nothing(tmp_path: Path) -> None:
    states = []
    for changes in itertools.count():
        checkpoints = tmp_path / str(changes)
        for step in (1, 2, 3):
            save(checkpoints, step, num_bytes=1000)
        (checkpoints / "global_step4").mkdir()  # a damaged checkpoint, which the save replaces
        killed = _killed_after(changes, checkpoints)
        remove_leftovers(checkpoints)
        if (checkpoints / "global_step4").exists() and not (checkpoints / "global_step4" / MANIFEST).exists():
            (checkpoints / "global_step4").rmdir()  # the damaged checkpoint was not replaced yet
        states.append(steps_of(checkpoints))
        assert states[-1][-2:] in ([3, 2], [2, 1], [4, 3]), (changes, states[-1])
        assert (checkpoints / f"global_step{states[-1][0]}").is_dir()
        assert (checkpoints / (checkpoints / LATEST_FILE).read_text()).is_dir()
        assert not list(checkpoints.glob(".tmp*"))
        if not killed:
            break
        if 4 not in states[-1]:
            save(checkpoints, 4, num_bytes=1000)  # a second attempt succeeds
            assert steps_of(checkpoints)[0] == 4
    print(f"killed before each of {len(states) - 1} changes of the disk; remaining steps: "
          f"{[(key, len(list(group))) for key, group in itertools.groupby(states)]}")
    assert states[0] == [3, 2, 1]
    assert states[-1] == [4, 3]
    assert [4, 3, 2] in states
    assert len(states) > 40


@pytest.fixture
def small_disk(tmp_path: Path) -> object:
    """Mount a file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def _fill(disk: Path, free: int) -> Path:
    """Write a file that leaves `free` bytes on the disk, and return its path."""
    filler = disk / "filler"
    filler.write_bytes(bytes(free_bytes(disk) - free))
    return filler


@pytest.mark.root
def test_a_full_disk_leaves_the_older_checkpoint_complete(small_disk: Path) -> None:
    checkpoints = small_disk / "checkpoints"
    save(checkpoints, 1)
    needed, page = 2 * RANKS * (FILE_BYTES // 4096 + 1) * 4096, 4096
    # the last three levels lack space for the first part, for the second part, and for the manifest
    levels = [0, page, needed // 10, needed // 4, needed // 2, 3 * needed // 4, 99 * needed // 100, needed,
              needed + page, needed + RANKS * page]
    for level in levels:
        filler = _fill(small_disk, level)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SaveError):
            save(checkpoints, 2)
        assert steps_of(checkpoints) == [1], level
        assert sorted(path.name for path in checkpoints.iterdir()) == ["global_step1", LATEST_FILE], level
        assert len(os.listdir("/proc/self/fd")) == before, level
        filler.unlink()
    with pytest.raises(SaveError, match=r"9,999,999 bytes needed, [\d,]+ bytes free"):
        check_space(checkpoints, needed_bytes=9_999_999)
    save(checkpoints, 2)
    print(f"full disk: {len(levels)} of {len(levels)} levels left the older checkpoint complete and no partial one")
    assert steps_of(checkpoints) == [2, 1]


def _assert_commit_fails(checkpoints: Path, message: str, timeout_s: float = 0.1) -> None:
    """Assert that the commit of step 2 fails with the message and removes its folder. Then create the folder again."""
    with pytest.raises(SaveError, match=message):
        commit(temporary_folder(checkpoints, 2), manifest(2, save_id="new"), timeout_s=timeout_s,
               has_ended=lambda rank: rank == 1)
    assert steps_of(checkpoints) == [1]
    assert not temporary_folder(checkpoints, 2).exists()
    temporary_folder(checkpoints, 2).mkdir()


def test_commit_needs_the_files_of_every_rank(tmp_path: Path) -> None:
    save(tmp_path, 1)
    temporary = temporary_folder(tmp_path, 2)
    temporary.mkdir()
    write_part(temporary, rank=0, save_id="new", files=write_files(temporary, 0))
    write_part(temporary, rank=1, save_id="killed", files=write_files(temporary, 1))  # from an earlier attempt
    _assert_commit_fails(tmp_path, "rank 1 did not write all files within 0.1 s")
    write_part(temporary, rank=0, save_id="new", files=write_files(temporary, 0))
    _assert_commit_fails(tmp_path, "rank 1 ended before writing all files", timeout_s=60)
    write_part(temporary, rank=1, save_id="new", files={}, error="input/output error")
    _assert_commit_fails(tmp_path, "rank 1: input/output error")
    records = [write_files(temporary, rank) for rank in range(RANKS)]
    for rank in range(RANKS):
        write_part(temporary, rank=rank, save_id="new", files=records[0])
    _assert_commit_fails(tmp_path, "both rank 1 and another rank wrote")
    records = [write_files(temporary, rank) for rank in range(RANKS)]
    for rank in range(RANKS):
        write_part(temporary, rank=rank, save_id="new", files=records[rank])
    (temporary / "unknown").touch()
    _assert_commit_fails(tmp_path, "no rank has recorded unknown")
    for rank in range(RANKS):
        write_part(temporary, rank=rank, save_id="new", files=records[rank])
    _assert_commit_fails(tmp_path, "do all hosts share this folder")


KEPT = [  # (keep_checkpoints, keep_every, keep_best), kept steps
    ((0, 1, 1), [9, 8, 7, 6, 5, 4, 3, 2, 1]), ((1, 0, 0), [9, 8]), ((2, 0, 0), [9, 8]), ((3, 0, 0), [9, 8, 7]),
    ((2, 4, 0), [9, 8, 4]), ((2, 0, 1), [9, 8, 3]), ((2, 0, 2), [9, 8, 6, 3]), ((2, 0, 3), [9, 8, 6, 5, 3]),
    ((20, 0, 0), [9, 8, 7, 6, 5, 4, 3, 2, 1]), ((3, 2, 1), [9, 8, 7, 6, 4, 3, 2]),
]


@pytest.mark.parametrize(("rules", "kept"), KEPT)
def test_pruning_keeps_the_steps_of_every_rule(tmp_path: Path, rules: tuple[int, int, int], kept: list[int]) -> None:
    losses = {3: 1.0, 5: 2.0, 6: 2.0, 7: 3.0, 9: 4.0}
    for step in range(1, 10):
        save(tmp_path, step, eval_loss=losses.get(step), num_bytes=10)
    verified: set[str] = set()
    removed = prune(tmp_path, **dict(zip(("keep_checkpoints", "keep_every", "keep_best"), rules, strict=True)),
                    verified=verified)
    assert steps_of(tmp_path) == kept
    assert [path.name for path in removed] == [f"global_step{step}" for step in range(1, 10) if step not in kept]
    assert verified == ({"global_step9", "global_step8"} if removed else set())


def test_pruning_stops_if_a_kept_checkpoint_is_damaged(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step, num_bytes=10)
    rules = {"keep_checkpoints": 2, "keep_every": 0, "keep_best": 0}
    (tmp_path / "global_step3" / "model_rank_00000.pt").write_bytes(bytes(10))
    with pytest.raises(SaveError, match=r"no checkpoint was removed.*model_rank_00000.pt: found SHA-256"):
        prune(tmp_path, **rules, verified=set())
    assert len(complete_checkpoints(tmp_path)[0]) == 4
    (tmp_path / LATEST_FILE).write_text("global_step2")  # a run that resumed from an older step leaves this
    removed = prune(tmp_path, **rules, verified={"global_step3"})
    assert [path.name for path in removed] == ["global_step1"]
