"""Run `ds-pretrain checkpoint` as a user does, on real checkpoints of two ranks."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.find_checkpoint import find_checkpoint, tokenizer_of
from pretrain.checkpoint.load.init_from import find_initial_weights
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.checkpoints import copy_checkpoints, real_run
from tests.support.launch import PROGRAM, run_ranks


def tool(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, "checkpoint", *map(str, words)], cwd="/",
                          env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=900)


def in_a_fork(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the tool in a fork of a process that has imported torch. `stdout` has both output streams."""
    (done,) = run_ranks([PROGRAM, "checkpoint", *map(str, words)], 1, cwd=folder)
    return done


def passes(*words: object) -> list[str]:
    """Run the tool and return its lines. Fails if the tool fails."""
    done = tool(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def _fails(code: int, expected: str, *words: object) -> None:
    """Assert that the tool exits with `code` and prints `expected`. Bad input (code 2) must give one line."""
    done = tool(*words)
    assert done.returncode == code, done.stdout + done.stderr
    text = done.stderr if code == 2 else done.stdout
    assert expected in text, text
    assert "Traceback" not in done.stderr
    if code == 2:
        assert len(text.strip().splitlines()) == 1, text


@pytest.fixture
def run(corpus: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with three checkpoints. The test may damage them. Other files test the layouts."""
    copy_checkpoints(real_run("pipeline2", corpus, tmp_path_factory), tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def test_list_and_verify(run: Path) -> None:
    checkpoints = run / "checkpoints"
    lines = passes("list", run)
    print("\n".join(lines))
    assert lines == passes("list", checkpoints)
    assert [line.split()[0] for line in lines] == ["step", "3", "2", "1"]
    assert all("2 ranks, ZeRO-1" in line and line.rstrip().endswith("yes") for line in lines[1:])
    assert f"{read_manifest(checkpoints / 'global_step3').eval_loss:.4f}" in lines[1]
    assert passes("list", checkpoints / "global_step2") == [lines[0], lines[2]]
    assert all(": complete, " in line for line in passes("verify", run))
    assert len(passes("verify", checkpoints / "global_step2")) == 1

    name = max(path.name for path in (checkpoints / "global_step3").glob("*optim_states.pt"))
    content = (checkpoints / "global_step3" / name).read_bytes()
    (checkpoints / "global_step3" / name).write_bytes(content[:-1] + b"x")
    _fails(1, f"global_step3/{name}: found SHA-256", "verify", run)
    passes("verify", checkpoints / "global_step1")
    (checkpoints / "global_step3" / name).write_bytes(content[:-1])
    _fails(1, f"{len(content) - 1} bytes", "list", run)
    _fails(1, f"{len(content) - 1} bytes", "verify", checkpoints / "global_step3")


def test_checkpoints_with_nan_and_a_damaged_latest_are_reported(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "latest").write_text("global_step7")
    _fails(1, "latest: it names global_step7, and there is no such checkpoint", "verify", run)
    passes("verify", checkpoints / "global_step3")
    (checkpoints / "latest").unlink()
    passes("verify", checkpoints.rename(run / "mirror"))
    (run / "mirror").rename(checkpoints)
    _fails(1, "latest: there is no such file", "verify", run)
    changed = replace(read_manifest(checkpoints / "global_step3"), finite=False)
    (checkpoints / "global_step3" / MANIFEST).write_text(changed.to_json())
    (checkpoints / "latest").write_text("global_step2")
    _fails(1, "MB, but the weights or optimizer states have NaN or infinite values", "verify", run)
    assert [line.split()[-2:] for line in passes("list", run)[1:]] == [["no", "yes"], ["yes", "yes"], ["yes", "yes"]]
    for named, step, note in ((run, None, "not used: "), (run, 3, "NaN"), (checkpoints / "global_step3", None, "NaN")):
        _, manifest, notes = find_checkpoint(named, step)
        assert (manifest.step, len(notes)) == (3 if note == "NaN" else 2, 1)
        assert note in notes[0]
    with pytest.raises(ConfigError, match=r"--init_from .*NaN"):
        find_initial_weights(str(checkpoints / "global_step3"))
    assert find_initial_weights(str(run)).origin.folder.endswith("global_step2")


def test_other_commands_accept_the_same_folders(run: Path) -> None:
    """They accept a run folder or one checkpoint, as `checkpoint` does."""
    checkpoints = run / "checkpoints"
    (run / "run.json").write_text(json.dumps([{"flags": {"tokenizer": "/data/tokenizer"}}]))
    for path, step, found in ((run, None, 3), (checkpoints, None, 3), (checkpoints / "global_step2", None, 2),
                              (run, 1, 1), (checkpoints / "global_step2", 2, 2)):
        folder, manifest, _ = find_checkpoint(path, step)
        assert (folder, manifest.step) == (checkpoints / f"global_step{found}", found)
        assert tokenizer_of(path) == "/data/tokenizer"
    for wrong, step, message in ((checkpoints / "global_step2", 3, "--step"),
                                 (run, 9, "--step 9: .* has the steps 3, 2, 1"),
                                 (run / "none", None, "no such folder")):
        with pytest.raises(ConfigError, match=message):
            find_checkpoint(wrong, step)
    (run / "run.json").unlink()
    with pytest.raises(ConfigError, match="--tokenizer"):
        tokenizer_of(checkpoints / "global_step2")


def test_without_the_flag_the_tokenizer_of_the_data_is_found(tmp_path: Path) -> None:
    """A run without --tokenizer has the tokenizer that prepared its data, as long as this file has not changed."""
    tokenizer, prefix = write_byte_tokenizer(tmp_path / "tokenizer"), tmp_path / "data"
    found = load_tokenizer(tokenizer)
    (tmp_path / "data.meta.json").write_text(json.dumps(
        {"vocab_size": found.vocab_size, "tokenizer": str(found.path), "tokenizer_sha256": found.fingerprint}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps([{"flags": {"tokenizer": None, "train_data": str(prefix)}}]))
    assert tokenizer_of(tmp_path / "run") == str(found.path)
    found.path.write_text(found.path.read_text() + "\n")
    with pytest.raises(ConfigError, match="names no tokenizer"):
        tokenizer_of(tmp_path / "run")


def test_prune_removes_all_but_the_newest(run: Path) -> None:
    assert passes("prune", run, "--keep_checkpoints", 3) == ["0 removed, 3 kept"]
    (run / "checkpoints" / "global_step3" / "unknown").touch()
    _fails(1, "no checkpoint was removed", "prune", run, "--keep-checkpoints=2")
    (run / "checkpoints" / "global_step3" / "unknown").unlink()
    assert passes("prune", run, "--keep-checkpoints=2")[-1] == "1 removed, 2 kept"
    assert sorted(path.name for path in (run / "checkpoints").glob("global_step*")) == ["global_step2", "global_step3"]


def test_bad_input_is_rejected_in_one_line(tmp_path: Path) -> None:
    _fails(2, "holds no checkpoint", "list", tmp_path)
    _fails(2, "holds no checkpoint", "diff", tmp_path, tmp_path)
    _fails(2, "found 'lst'", "lst", tmp_path)
    _fails(2, "COMMAND", )
    _fails(2, "'-1'", "prune", tmp_path, "--keep_checkpoints=-1")
    _fails(2, "--keep_checkpoints", "prune", tmp_path)
    (tmp_path / "global_step5").mkdir()
    _fails(2, "manifest", "consolidate", tmp_path / "global_step5", tmp_path / "out")
    _fails(2, "a single checkpoint", "prune", tmp_path / "global_step5", "--keep_checkpoints=2")
    _fails(1, "manifest", "list", tmp_path)


def test_diff_and_consolidate(run: Path, tmp_path: Path) -> None:
    checkpoints = run / "checkpoints"
    same, other = (in_a_fork(tmp_path, "diff", run, checkpoints / f"global_step{step}") for step in (3, 1))
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "no difference")
    assert other.returncode == 1
    assert "exp_avg" in other.stdout
    consolidated = passes("consolidate", run, tmp_path / "weights", "--dtype", "bf16")  # in a fresh process
    assert re.fullmatch(rf"{tmp_path}/weights: 3 files, [\d.]+ MB", consolidated[-1])
    assert list((tmp_path / "weights").glob("*.safetensors"))
    damaged = checkpoints / "global_step3" / "rng_state_rank_00000.pt"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    _fails(1, "found SHA-256", "consolidate", checkpoints / "global_step3", tmp_path / "more")
    assert not (tmp_path / "more").exists()
