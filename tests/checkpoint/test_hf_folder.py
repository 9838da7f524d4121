"""Check and read folders that transformers wrote: every architecture, sharded, and damaged in each possible way."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pretrain.checkpoint.load.hf_folder import check_hf_folder, hash_files
from pretrain.checkpoint.load.reader import HFWeights
from pretrain.errors import ConfigError
from pretrain.model.parameters import Part
from tests.support.hf_models import save_hf_model
from tests.support.model_shapes import SHAPES
from tests.support.tensors import from_transformers

transformers.logging.set_verbosity_error()
GPT2, LLAMA = SHAPES["gpt2"], SHAPES["llama"]


@pytest.mark.parametrize("name", SHAPES)
def test_weights_equal_those_in_memory(name: str, tmp_path: Path) -> None:
    model = save_hf_model(tmp_path, SHAPES[name], shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    weights = HFWeights(check_hf_folder(tmp_path))
    expected = from_transformers(model.state_dict(), weights.config)
    assert list(weights.shapes) == list(expected)
    for key, value in expected.items():
        assert torch.equal(weights.tensor(key), value), key
        assert torch.equal(weights.read(key, "fp32", 3, 9), value.reshape(-1)[3:12]), key
        for dim in range(value.dim()):  # what a tensor-parallel rank holds
            part = Part(tuple(value.shape), dim, ((0, 1), (value.shape[dim] // 2, value.shape[dim])))
            own = part.of(value).reshape(-1)[1:]
            out = torch.empty_like(own)
            weights.copy(key, "fp32", 1, out, part)
            assert torch.equal(out, own), (key, dim)


def test_a_folder_with_the_name_of_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf_model(tmp_path / "gpt2", GPT2)
    monkeypatch.chdir(tmp_path)
    assert check_hf_folder(Path("gpt2")).config.num_layers == GPT2["n_layer"]


def test_files_of_the_base_model_with_old_buffers_are_read(tmp_path: Path) -> None:
    model = save_hf_model(tmp_path, GPT2, dtype=torch.bfloat16)
    expected = HFWeights(check_hf_folder(tmp_path)).weights()
    state = {name.removeprefix("transformer."): value.clone() for name, value in model.state_dict().items()}
    state["h.0.attn.bias"] = torch.ones(64, 64, dtype=torch.bool)
    save_file(state, tmp_path / "model.safetensors")
    found = check_hf_folder(tmp_path)
    assert found.dtype == "bf16"
    assert all(torch.equal(value, expected[name]) for name, value in HFWeights(found).weights().items())


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def _overwrite(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def _edit_header(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def _set(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


SINGLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there is neither model.safetensors nor model"),
    "pickle": (_as_pickle, r"pytorch_model.bin: weights in PyTorch's pickle format .*safe_serialization=True"),
    "no config": (lambda f: (f / "config.json").unlink(), "there is no file .*config.json"),
    "empty file": (lambda f: os.truncate(f / "model.safetensors", 0), r"header too small \(it has 0 bytes\)"),
    "header not JSON": (lambda f: _overwrite(f / "model.safetensors", 8, b"xx"), "invalid JSON in header"),
    "header length": (lambda f: _overwrite(f / "model.safetensors", 0, b"\xff" * 8), "header too large"),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 90_000), r"not fully covered \(it has 90000 bytes\)"),
    "offsets": (lambda f: _edit_header(f / "model.safetensors", b'"data_offsets":[0,', b'"data_offsets":[4,'),
                "damaged: .* offset"),
    "wrong shape": (lambda f: _set(f, intermediate_size=88), r"found the shape \[80, 48\]; expected \[88, 48\]"),
    "padded vocabulary": (lambda f: _set(f, vocab_size=90), r"found 97 rows; expected vocab_size .*\(90\). Set"),
    "too few rows": (lambda f: _set(f, vocab_size=128), r"found 97 rows; .*\(128\)"),
    "missing": (lambda f: _edit(f, lambda s: s.pop("model.norm.weight")),
                "model.norm.weight: the model of the config.json has this tensor, and the files do not"),
    "layers": (lambda f: _set(f, num_hidden_layers=4),
               "and 8 others: the model of the config.json has these tensors, and the files do not"),
    "unknown": (lambda f: _edit(f, lambda s: s.update(extra=torch.ones(2))),
                "extra: the files have this tensor, and the model of the config.json does not"),
    "dtype": (lambda f: _edit(f, lambda s: s.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})),
              "model.norm.weight: found the dtype I8; expected one of BF16, F16, F32"),
    "other head": (lambda f: _set(f, tie_word_embeddings=True), "lm_head.weight: it differs from model.embed_tokens"),
}
SHARDED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda f: _shard(f).unlink(), "this file is missing, and model.safetensors.index.json names it"),
    "truncated shard": (lambda f: os.truncate(_shard(f), 9000), r"00002-of-.*not fully covered \(it has 9000 bytes\)"),
    "index not JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "it is not a JSON object"),
    "index with a path": (lambda f: (f / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../a.safetensors"}})), 'not a JSON object with a "weight_map"'),
    "index of another model": (lambda f: (f / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": _shard(f).name}})), "it says that a is in model-00002-of-"),
    "both": (lambda f: (f / "model.safetensors").symlink_to(_shard(f)), "it has both model.safetensors and model"),
}


@pytest.mark.parametrize("name", [*SINGLE, *SHARDED])
def test_damaged_folders_are_rejected_in_one_line(name: str, tmp_path: Path) -> None:
    save_hf_model(tmp_path, LLAMA, shard_size="1GB" if name in SINGLE else "40KB")
    check_hf_folder(tmp_path)
    damage, message = {**SINGLE, **SHARDED}[name]
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        check_hf_folder(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_recorded_hashes_are_compared(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    save_hf_model(folder, GPT2)
    blobs.mkdir()
    file = folder / "model.safetensors"
    sha256 = hash_files(check_hf_folder(folder))["model.safetensors"].sha256
    file.rename(blobs / sha256)
    file.symlink_to(blobs / sha256)  # as the Hub's cache stores it
    assert hash_files(check_hf_folder(folder))["model.safetensors"].sha256 == sha256
    _overwrite(blobs / sha256, 50_000, b"damage")
    with pytest.raises(ConfigError, match=r"found SHA-256 .*, as recorded"):
        hash_files(check_hf_folder(folder))


def test_the_check_imports_no_torch(tmp_path: Path) -> None:
    save_hf_model(tmp_path, GPT2)
    code = f"""if True:
        import sys, pathlib
        from pretrain.checkpoint.load.hf_folder import check_hf_folder
        check_hf_folder(pathlib.Path({str(tmp_path)!r}))
        assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True)
