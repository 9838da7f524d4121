"""Inputs that tools/generate.py accepts and rejects: checkpoints, transformers folders, devices and data types."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.analysis.model_source import evaluation_source
from pretrain.analysis.transformers_model import empty_model, load_model
from pretrain.checkpoint.convert.write_weights import import_hf
from pretrain.checkpoint.load.hf_folder import check_hf_folder, find_hf_tokenizer
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.extensions.generate import source
from pretrain.extensions.generate.load_model import memory_needed, spread
from pretrain.extensions.generate.source import (
    GenerationSource,
    check_devices,
    choose_num_devices,
    generation_dtype,
    generation_source,
)
from pretrain.model.config import load_model_config, model_config_from
from tests.extensions.generate.generation import LETTERS, GenerateTool, text_of, write_letters
from tests.support.hf_models import save_hf_model
from tests.support.launch import ROOT
from tests.support.model_shapes import SHAPES
from tests.support.own_memory import MemoryWatch
from tests.support.rejection import rejection
from tests.support.wrapped_models import WRAPPED_MODELS, needs_wrapped, published

SHORT = ["--max_new_tokens", 5, "--temperature", 0, f"--prompt={text_of([9, 8, 7])}"]

OPT = {"model_type": "opt", "vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
       "ffn_dim": 16, "max_position_embeddings": 32, "word_embed_proj_dim": 16}


def test_a_checkpoint_of_an_earlier_version_and_damaged_ones(tmp_path: Path, tool: GenerateTool) -> None:
    """The recorded checkpoint of tests/golden generates. A newer one that is damaged is skipped with a note."""
    checkpoints = tmp_path / "run/checkpoints"
    shutil.unpack_archive(ROOT / "tests/golden/checkpoint.tar.xz", checkpoints)
    words = [tmp_path / "run", "--tokenizer", write_letters(tmp_path / "letters"), *SHORT]
    expected = tool.rows(*words)
    assert expected[0]["finish_reason"] in ("length", "eos")
    damaged = checkpoints / "global_step4"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{}")
    tool.capsys.readouterr()
    assert tool.rows(*words) == expected
    assert "note: not used: " in tool.capsys.readouterr().err
    for path, message in ((damaged, "global_step4/manifest.json: the manifest is damaged"),
                          (checkpoints / "global_step2", "there is no such folder")):
        with pytest.raises(ConfigError, match=message):
            tool.text(path, *words[1:])
    weights = checkpoints / "global_step3/mp_rank_00_model_states.pt"
    content = weights.read_bytes()
    middle = len(content) // 2
    weights.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:])
    with pytest.raises(ConfigError, match=r"the checkpoint is damaged: .*mp_rank_00_model_states\.pt: found"):
        tool.text(*words)
    weights.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"no checkpoint can be used .*the manifest is damaged"):
        tool.text(*words)
    with pytest.raises(ConfigError, match=r"mp_rank_00_model_states.pt: found \d+ bytes; expected"):
        tool.text(*words, "--step", 3)


def _published(folder: Path, name: str = "llama", **values: object) -> Path:
    """Save a random transformers model with 260 tokens, and a tokenizer that adds the token 5 before each text."""
    save_hf_model(folder, {**SHAPES[name], "vocab_size": 260, **values}, shard_size="100KB")
    write_letters(folder, leading=LETTERS[5])
    return folder


def test_published_weights_get_the_tokens_that_their_tokenizer_adds(tmp_path: Path, tool: GenerateTool) -> None:
    """The transformers folder and the checkpoint that is imported from it generate the same text."""
    folder = _published(tmp_path / "hf")
    expected = tool.rows(folder, *SHORT)
    found = check_hf_folder(folder)
    import_hf(found, tmp_path / "run", find_hf_tokenizer(found))
    assert generation_source(folder).leading == generation_source(tmp_path / "run").leading == (5,)
    assert tool.rows(tmp_path / "run", *SHORT) == expected
    longer = [*SHORT[:-1], f"--prompt={text_of([5, 9, 8, 7])}", "--tokenizer", write_letters(tmp_path / "plain")]
    assert tool.rows(folder, *longer)[0]["tokens"] == expected[0]["tokens"]


def test_a_folder_of_a_family_that_only_transformers_has(tmp_path: Path, tool: GenerateTool) -> None:
    folder = tmp_path / "hf"
    save_hf_model(folder, OPT)
    write_letters(folder)
    assert len(tool.rows(folder, *SHORT)[0]["tokens"]) in range(1, 6)


def test_damaged_transformers_folders_are_rejected(tmp_path: Path, tool: GenerateTool) -> None:
    folder = _published(tmp_path / "hf")
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("model-00001-of", "model-00009-of"))
    with pytest.raises(ConfigError, match=r"model-00009-of"):
        tool.text(folder, *SHORT)
    index.write_text(text)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=shard.name):
        tool.text(folder, *SHORT)
    with pytest.raises(ConfigError, match=r"--tokenizer .*its largest token is 255, and the model has only 200 tokens"):
        tool.text(_published(tmp_path / "few", vocab_size=200), *SHORT)
    # transformers would give missing tensors random values
    other = tmp_path / "other"
    save_hf_model(other, OPT)
    (other / "model.safetensors").unlink()
    torch.save({"decoder.weight": torch.zeros(2, 2)}, other / "pytorch_model.bin")
    write_letters(other)
    with pytest.raises(ConfigError, match="tensors of the model are missing"):
        tool.text(other, *SHORT)


def test_host_memory_holds_the_model_and_one_tensor(tmp_path: Path) -> None:
    """34 million parameters in fp32 (136 MB) are loaded as bf16 (71 MB); the largest tensor has 17 MB.

    A copy of the model, in bf16 or in fp32, would need 136 MB or more. Modules imported on the way need some memory.
    """
    folder = tmp_path / "hf"
    save_hf_model(folder, {"model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8,
                           "num_attention_heads": 8, "intermediate_size": 1536, "max_position_embeddings": 64})
    found = check_hf_folder(folder)
    import_hf(found, tmp_path / "run", None)
    source = generation_source(tmp_path / "run", tokenizer=str(write_letters(tmp_path / "letters")))
    with MemoryWatch() as watch:
        model = load_model(source, "bf16", torch.device("cpu"))
    size = sum(parameter.numel() * 2 for parameter in model.parameters())
    print(f"model {size / 1e6:.0f} MB, peak {(watch.peak - watch.before) / 1e6:.0f} MB")
    assert 60e6 < size < 80e6
    assert watch.peak - watch.before < size + 2.5 * 16.8e6


@needs_wrapped
def test_infinity_in_a_config_json_is_read(tmp_path: Path) -> None:
    """Transformers writes it as an object (configuration_utils.py); a run's record has what the file had."""
    values = {**WRAPPED_MODELS["mamba2"], "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    source = GenerationSource(folder=tmp_path, precision="fp32", config=model_config_from(values, "config.json"),
                              max_positions=64, tokenizer=load_tokenizer("bytes"), leading=())
    assert list(empty_model(source, "fp32").config.time_step_limit) == [0.0, math.inf]


def test_layers_are_spread_over_the_memory_of_several_devices(tmp_path: Path) -> None:
    """Only the choice of devices: this machine may have none."""
    model = empty_model(generation_source(_published(tmp_path / "hf", "llama_tied_llama3_rope")), "bf16")
    assert not any(buffer.is_meta for buffer in model.buffers())
    needed = memory_needed(model, rows=2, positions=64)
    assert needed == 2 * (model.num_parameters() + 2 * 3 * 2 * 12 * 2 * 64)  # 3 layers, 2 heads of 12 for k and for v
    found = spread(model, [needed] * 3)
    layers = [found[f"model.layers.{layer}"] for layer in range(3)]
    assert layers == sorted(layers)
    assert set(found.values()) == {0, 1, 2}
    assert found["lm_head"] == found["model.embed_tokens"]
    with pytest.raises(ConfigError, match="--devices: the layers cannot be spread over 2 devices"):
        spread(model, [needed // 10] * 2)


GPU, CPU = Device("cuda", fp16=True, bf16=True, memory_bytes=0), Device("cpu", fp16=True, bf16=True, memory_bytes=0)


def test_devices_and_data_types_are_chosen_by_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    assert [choose_num_devices(needed * gib, [20 * gib] * 4, None, "m") for needed in (1, 18, 19, 70)] == [1, 1, 2, 4]
    assert choose_num_devices(gib, [20 * gib] * 4, 3, "m") == 3
    for needed, free, requested, message in (
            (30, [20] * 2, 1, "m: the model and its key-value cache take 30.0 GiB, and the device has 20.0 GiB of free "
                              "memory. Use --devices 2"),
            (50, [20] * 2, None, "2 devices have 40.0 GiB of free memory. Use a 16-bit --dtype"),
            (1, [20], 2, "--devices: found 2; expected at most 1")):
        with pytest.raises(ConfigError, match=re.escape(message)):
            choose_num_devices(needed * gib, [size * gib for size in free], requested, "m")
    with pytest.raises(ConfigError, match="--devices: found 2"):
        check_devices(2, CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"accelerate, which is not installed. Run `pip install 'ds-pretrain"):
        check_devices(2, GPU)
    for fast in (True, False):
        monkeypatch.setattr(source, "multiplies_bf16", lambda fast=fast: fast)
        assert [generation_dtype("auto", precision, CPU) for precision in ("fp32", "bf16", "fp16")] == [
            "fp32", "bf16" if fast else "fp32", "fp32"]
    assert [generation_dtype("auto", precision, GPU) for precision in ("fp32", "bf16", "fp16")] == [
        "fp32", "bf16", "fp16"]
    assert generation_dtype("fp16", "fp32", CPU) == "fp16"


# values of a config.json that no model has: of a family here, and of a model that transformers' own modules compute
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"initializer_range": math.nan}, "initializer_range: found NaN; expected a number"),
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size: found 1000000000000; expected at most 16,777,216"),
    "half a token": ({"vocab_size": 260.5}, "260.5"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000; expected at most 1"),
    "width": ({"hidden_size": 10**9}, "hidden_size: found 1000000000; expected at most 1,048,576"),
    "text": ({"rms_norm_eps": "x"}, "rms_norm_eps"), "no heads": ({"num_attention_heads": 0}, ""),
    "code of a repository": ({"attn_implementation": "org/repo"}, "attn_implementation: found org/repo"),
    "code of a repository, hidden": ({"_attn_implementation": {"text": "org/repo@v1:f"}}, "found org/repo@v1:f"),
    "code for experts": ({"experts_implementation": "org/repo"}, "experts_implementation: found org/repo"),
    "padding": ({"pad_token_id": 10**9}, ""), "activation": ({"hidden_act": "nonsense"}, "nonsense")}


@needs_wrapped
@pytest.mark.parametrize("name", WRONG)
def test_every_command_rejects_a_wrong_config_with_the_same_line(name: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    save_hf_model(tmp_path / "llama", {**SHAPES["llama"], "vocab_size": 260})
    published({**WRAPPED_MODELS["granite"], "vocab_size": 260}, tmp_path / "granite")
    for model in ("llama", "granite"):
        folder = tmp_path / model
        write_letters(folder)
        assert generation_source(folder).hf_folder is not None
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **changes}))
        if name == "padding" and model == "llama":  # the family reads no such key
            continue
        lines = {rejection(read, folder) for read in (
            generation_source, check_hf_folder, lambda folder: evaluation_source(folder, None),
            lambda folder: load_model_config(str(folder)))}
        assert all(message in line for line in lines)
        assert len(lines) == 1 or (name == "layers" and len(lines) == 2)  # a family has a higher limit


def test_transformers_neither_asks_for_code_nor_fails_with_a_traceback(tmp_path: Path, tool: GenerateTool) -> None:
    """Models that only transformers has are loaded by it: errors of any class are one line."""
    folder = tmp_path / "hf"
    published(WRAPPED_MODELS["granite"] | {"vocab_size": 260}, folder)
    write_letters(folder)
    values = json.loads((folder / "config.json").read_text())
    for changes in ({"model_type": "nonsense", "auto_map": {"AutoConfig": "code.Config"}},
                    {"model_type": "t5"}):
        (folder / "code.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
        (folder / "config.json").write_text(json.dumps({**values, **changes}))
        assert "transformers cannot load this model" in rejection(tool.text, folder, *SHORT)
        assert not (tmp_path / "canary").exists()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/repo"}')
    assert "an adapter_config.json of PEFT is not read" in rejection(tool.text, folder, *SHORT)
