"""Import transformers folders: hashes, tokenizer, and nothing half-written after an error or a signal.

test_export_hf.py imports every architecture.
"""

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.write_weights import import_hf
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.find_checkpoint import find_checkpoint, tokenizer_of
from pretrain.checkpoint.load.hf_folder import check_hf_folder, find_hf_tokenizer
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.data.tokenizers.tokenizer import TOKENIZER_FILES
from pretrain.errors import ConfigError
from tests.support.conversion_faults import run_tool
from tests.support.hf_models import save_hf_model
from tests.support.model_shapes import SHAPES

transformers.logging.set_verbosity_error()


def imported(folder: Path, out: Path) -> Path:
    """Import a folder and return the checkpoint."""
    found = check_hf_folder(folder)
    import_hf(found, out, find_hf_tokenizer(found))
    return find_checkpoint(out)[0]


def test_dtypes_are_kept_and_hashes_are_recorded(tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["neox_parallel"], dtype=torch.bfloat16)
    checkpoint = imported(tmp_path / "hf", tmp_path / "global_step0")  # a single checkpoint
    assert checkpoint == tmp_path / "global_step0"
    manifest = read_manifest(checkpoint)
    assert (manifest.weights_only, manifest.precision, manifest.step) == (True, "bf16", 0)
    stored = load_file(checkpoint / "weights.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert set(stored) == set(CheckpointReader(checkpoint).shapes)
    source = json.loads((checkpoint / "imported_from.json").read_text())["files"]["model.safetensors"]
    assert source["sha256"] == hashlib.sha256((tmp_path / "hf/model.safetensors").read_bytes()).hexdigest()
    imported(tmp_path / "hf", tmp_path / "run")
    assert diff(checkpoint, tmp_path / "run/checkpoints/global_step0") == []


def add_tokenizer(folder: Path, size: int, eos: int = 0) -> None:
    """Write a tokenizer of `size` words. The word of token `eos` ends documents."""
    words = {f"w{i}": i for i in range(size) if i != eos} | {"<|endoftext|>": eos}
    Tokenizer(WordLevel(words, unk_token="w1")).save(str(folder / "tokenizer.json"))


def test_the_tokenizer_is_copied_if_it_fits(tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    add_tokenizer(tmp_path / "hf", 97)
    checkpoint = imported(tmp_path / "hf", tmp_path / "run")
    assert tokenizer_of(checkpoint) == tokenizer_of(tmp_path / "run") == str(tmp_path / "run/tokenizer")
    add_tokenizer(tmp_path / "hf", 98)
    with pytest.raises(ConfigError, match=r"its largest token is 97, and the model has only 97 tokens"):
        imported(tmp_path / "hf", tmp_path / "other")


def test_links_out_of_the_folder_are_not_copied(tmp_path: Path) -> None:
    """Each file of a tokenizer may be a link to any file of this machine; links of the Hub's cache work."""
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    add_tokenizer(tmp_path / "hf", 97)
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "folder").symlink_to(tmp_path)
    for name in TOKENIZER_FILES:
        file = tmp_path / "hf" / name
        before = file.read_bytes() if file.exists() else None
        for target in ("../secret.json", str(tmp_path / "secret.json"), "../folder/secret.json"):
            file.unlink(missing_ok=True)
            file.symlink_to(target)
            if name == "tokenizer.json":  # a good tokenizer, elsewhere
                add_tokenizer(tmp_path / "hf", 97)
            with pytest.raises(ConfigError, match=rf"{name}: this is a link to .*secret\.json, outside of its folder"):
                imported(tmp_path / "hf", tmp_path / "run")
            (tmp_path / "secret.json").write_text("{}")
        file.unlink()
        if before is not None:
            file.write_bytes(before)
    (tmp_path / "hf/sub").mkdir()
    (tmp_path / "hf/sub/map.json").write_text("{}")
    (tmp_path / "hf/special_tokens_map.json").symlink_to("sub/map.json")
    imported(tmp_path / "folder/hf", tmp_path / "inside")
    assert (tmp_path / "inside/tokenizer/special_tokens_map.json").read_text() == "{}"


def test_a_cache_of_the_hub_is_a_folder_of_links(tmp_path: Path) -> None:
    snapshot, blobs = (tmp_path / f"hub/models--org--name/{part}" for part in ("snapshots/123", "blobs"))
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    add_tokenizer(tmp_path / "hf", 97)
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((tmp_path / "hf").iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    imported(snapshot, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run/tokenizer").iterdir()) == [
        "tokenizer.json", "tokenizer_config.json"]
    assert not any(path.is_symlink() for path in (tmp_path / "run").rglob("*"))
    (tmp_path / "secret").write_text("{}")
    (snapshot / "added_tokens.json").symlink_to("../../blobs/secret")
    (blobs / "secret").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"added_tokens\.json: this is a link to "):
        imported(snapshot, tmp_path / "other")


def test_too_little_free_space_is_reported_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    monkeypatch.setattr("pretrain.checkpoint.convert.new_folder.free_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"run: the output needs 0.4 MB, and the disk has only 0.0 MB"):
        imported(tmp_path / "hf", tmp_path / "run")
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_rejected(value: float, tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["llama"])
    file = tmp_path / "hf/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"hf: .*layers\.1\.self_attn\.k_proj\.weight, .*: it has values that"):
        imported(tmp_path / "hf", tmp_path / "run")
    assert os.listdir(tmp_path) == ["hf"]


def test_nothing_half_written_remains(tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    words = ("import", tmp_path / "hf", "--output", tmp_path / "run")
    full = run_tool(*words, largest_file=100_000)
    assert (full.returncode, full.stdout) == (2, "")
    assert full.stderr.splitlines()[-1] == (
        f"ds-pretrain: error: {tmp_path}/run: the folder cannot be written: File too large. Name a new folder on a "
        "disk with enough free space.")
    assert os.listdir(tmp_path) == ["hf"]
    assert run_tool(*words, kill=signal.SIGTERM).returncode == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["hf"]
    assert run_tool(*words, kill=signal.SIGKILL).returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".tmp-run", "hf"]
    done = run_tool(*words)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]
    assert "parameters, fp32, architecture gpt2" in done.stdout
    assert CheckpointReader(tmp_path / "run/checkpoints/global_step0").shapes
    again = run_tool(*words)
    assert (again.returncode, again.stderr) == (2, f"ds-pretrain: error: {tmp_path}/run: the folder exists. Remove it, "
                                                "or name a new folder.\n")
