"""Repositories of the Hub: from the cache without a network, downloaded once for all ranks of a host, or rejected."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.data.tokenizers.tokenizer import absolute_tokenizer
from pretrain.errors import ConfigError
from pretrain.hub import is_repository, snapshot_in, tokenizer_repository
from pretrain.model.config import find_config, load_model_config, preset_names
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.hub_server import REVISION, hub, write_cache
from tests.support.launch import ROOT
from tests.support.model_shapes import SHAPES, write_config

_FIND = """
import sys
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.hub import find_repository
try:
    print(load_tokenizer(sys.argv[1]).path.parent if sys.argv[2] == "tokenizer" else
          find_repository(sys.argv[1], flag="--init_from", want="weights"))
except ConfigError as error:
    print(f"error: {error}")
assert "torch" not in sys.modules
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a folder with the files of a repository in two shards, and files that nobody needs."""
    folder = tmp_path / "repository"
    write_config(folder, SHAPES["llama"])
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 1000)
    (folder / "tokenizer.json").write_text("{}")
    for unused in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (folder / unused).write_bytes(b"unused")
    return folder


def _environment(home: Path, **others: str) -> dict[str, str]:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in names and "proxy" not in name.lower()}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HOME": str(home), **others}


def _find_in_processes(count: int, name: str, environment: dict[str, str], want: str = "weights") -> list[str]:
    """Look for a repository in several processes at the same time. Return the output of each."""
    processes = [subprocess.Popen([sys.executable, "-c", _FIND, name, want], env=environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(count)]
    return [process.communicate()[0].strip() for process in processes]


def test_concurrent_ranks_download_each_file_once(tmp_path: Path, repository: Path) -> None:
    with hub({"org/llama": repository}) as server:
        found = _find_in_processes(3, "org/llama", _environment(tmp_path, HF_ENDPOINT=server.url))
        downloads = [request.rpartition("/")[2] for request in server.requests if request.startswith("GET /org")]
    snapshot = tmp_path / "hub" / "models--org--llama" / "snapshots" / REVISION
    assert found == [str(snapshot)] * 3
    assert sorted(downloads) == sorted(set(downloads)) == sorted(path.name for path in snapshot.iterdir())
    assert {path.name for path in repository.iterdir()} - {path.name for path in snapshot.iterdir()} == {
        "pytorch_model.bin", "consolidated.safetensors", "README.md"}
    # later starts need no network; an incomplete snapshot is completed
    assert _find_in_processes(1, "org/llama", _environment(tmp_path, HF_HUB_OFFLINE="1")) == [str(snapshot)]
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    assert "HF_HUB_OFFLINE is set" in _find_in_processes(1, "org/llama", _environment(tmp_path, HF_HUB_OFFLINE="1"))[0]
    with hub({"org/llama": repository}) as server:
        assert _find_in_processes(1, "org/llama", _environment(tmp_path, HF_ENDPOINT=server.url)) == [str(snapshot)]
    assert (snapshot / "model-00002-of-00002.safetensors").read_bytes() == bytes([2]) * 1000


def test_names_of_repositories_and_presets_are_tokenizers(tmp_path: Path, repository: Path) -> None:
    write_byte_tokenizer(repository)
    with hub({"openai-community/gpt2": repository}) as server:
        found = _find_in_processes(3, "gpt2", _environment(tmp_path, HF_ENDPOINT=server.url), "tokenizer")
        downloads = {request.rpartition("/")[2] for request in server.requests if request.startswith("GET /openai")}
    snapshot = tmp_path / "hub" / "models--openai-community--gpt2" / "snapshots" / REVISION
    assert found == [str(snapshot)] * 3
    assert downloads == {path.name for path in snapshot.iterdir()}
    assert not [name for name in downloads if name == "config.json" or name.endswith(".safetensors")]
    for name in ("openai-community/gpt2", "gpt3-1.3b"):  # without a network
        offline = _environment(tmp_path, HF_HUB_OFFLINE="1")
        assert _find_in_processes(1, name, offline, "tokenizer") == [str(snapshot)]
    [missing] = _find_in_processes(1, "pythia-1b", _environment(tmp_path, HF_HUB_OFFLINE="1"), "tokenizer")
    assert missing.startswith("error: --tokenizer EleutherAI/pythia-70m: there is no such folder")


def test_each_preset_of_a_published_model_names_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name for name in preset_names() if tokenizer_repository(name)}
    assert set(preset_names()) - named == {"tiny", "tiny-moe"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert tokenizer_repository("gpt2") is None  # the folder
    assert absolute_tokenizer("gpt2") == str(tmp_path / "gpt2")
    assert absolute_tokenizer("org/name") == "org/name"


def test_a_repository_that_cannot_be_read_is_rejected(tmp_path: Path, repository: Path) -> None:
    with hub({"org/llama": repository}) as server:
        [missing] = _find_in_processes(1, "org/none", _environment(tmp_path, HF_ENDPOINT=server.url))
    assert missing.startswith("error: --init_from org/none: there is no such folder, and no such repository on the Hub")
    [refused] = _find_in_processes(1, "org/llama", _environment(tmp_path, HF_ENDPOINT=server.url))
    assert "this repository cannot be downloaded (ConnectError" in refused
    assert refused.endswith("`hf download org/llama` on a machine with a network fills the cache.")


def test_folders_of_the_cache_are_models(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = write_cache(tmp_path, "org/llama", repository)
    expected = load_model_config(str(repository))
    for name in ("org/llama", str(folder), str(folder / "snapshots" / REVISION)):
        assert load_model_config(name) == expected, name
    (folder / "refs" / "main").unlink()
    assert snapshot_in(folder) == folder / "snapshots" / REVISION
    with pytest.raises(ConfigError, match="not in the cache"):
        find_config("org/other")


def test_paths_and_presets_are_not_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert is_repository("org/llama")
    for word in ("gpt2", "runs/none", "/org/llama", "./org/llama", "org/llama/x", "configs/llama.json", "org/", "~/x"):
        assert not is_repository(word), word
    with pytest.raises(ConfigError, match=r"there is no file runs/none"):
        find_config("runs/none")
