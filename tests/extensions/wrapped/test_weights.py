"""Weights of wrapped decoders in the format of transformers: published folders in, exports out.

Files often have one tensor for each expert where the model has one for all.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.export_hf import consolidate, export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.convert.write_weights import import_hf
from pretrain.checkpoint.load.hf_folder import check_hf_folder, read_header
from pretrain.checkpoint.load.reader import CheckpointReader, HFWeights
from pretrain.extensions.wrapped.prove import tiny_config
from tests.support.hf_models import needs_transformers
from tests.support.rejection import rejection
from tests.support.wrapped_models import WRAPPED_MODELS, published

NAMES = ("deepseek_v3", "gpt_oss", "granitemoe", "glm4_moe", "qwen3_next", "lfm2", "falcon_h1", "mamba2", "opt")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("name", NAMES)
def test_published_folders_are_imported_and_exported_as_transformers_writes_them(name: str, tmp_path: Path) -> None:
    theirs = published(tiny_config(CONFIG_MAPPING[name]()).hf_config, tmp_path / "hub")
    import_hf(check_hf_folder(tmp_path / "hub"), tmp_path / "run", None)
    export_hf(plan_export(tmp_path / "run", tmp_path / "exported", dtype="fp32"))
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("exported", "hub"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    tokens = torch.arange(16).view(2, 8) + 3
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, theirs(tokens).logits, atol=1e-6, rtol=0)


def test_tensors_are_converted_one_by_one() -> None:
    """Exports of models with experts need memory for one tensor, not for one layer."""
    config = tiny_config(CONFIG_MAPPING["deepseek_v3"]())
    groups = [*config.implementation.to_files(config, "bf16")]
    assert {len(group.sources) for group in groups if group.rule is None} == {1}
    assert max(len(group.targets) for group in groups) > 3


def test_a_run_of_imported_weights_has_the_buffers(tmp_path: Path) -> None:
    """Tools that write or compare weights know the buffers, by which routers of experts choose."""
    published(WRAPPED_MODELS["deepseek_v3"], tmp_path / "hub")
    import_hf(check_hf_folder(tmp_path / "hub"), tmp_path / "a", None)
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    save_file({name: tensor + 1 if name == BIAS else tensor for name, tensor in tensors.items()},
              tmp_path / "hub" / "model.safetensors")
    import_hf(check_hf_folder(tmp_path / "hub"), tmp_path / "b", None)
    first, second = (tmp_path / run / "checkpoints" / "global_step0" for run in "ab")
    ours = next(ours for ours, theirs, _ in HFWeights(check_hf_folder(tmp_path / "hub")).config.named_buffers()
                if theirs == BIAS)
    assert torch.equal(CheckpointReader(first).buffers()[ours], tensors[BIAS])
    found = diff(first, second)
    assert [(each.name, each.state) for each in found] == [(ours, "buffer")]
    assert found[0].max_abs == pytest.approx(1)
    consolidate(plan_export(first, tmp_path / "consolidated", dtype="fp32", with_tokenizer=False))
    assert load_file(tmp_path / "consolidated" / "model.safetensors").keys() == tensors.keys()


def _without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def _with(name: str, value: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: value}


@pytest.mark.parametrize(("change", "message"), [
    (_without(GATE), "cannot convert this tensor together with those that belong to it"),
    (_without(GATE, GATE.replace("gate_", "up_")), "gate_up_proj: found the shape"),
    (_without(*(f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(4))),
     "experts.down_proj: the model of the config.json has this tensor, and the files do not"),
    (_with(GATE, torch.zeros(3, 32)), "cannot convert this tensor together with those that belong to it"),
    (_with("model.layers.1.mlp.extra.weight", torch.zeros(3)), "the model of the config.json does not"),
    (_with(GATE, torch.zeros(16, 32, dtype=torch.int8)), "found the dtype I8"),
    (_with(BIAS, torch.zeros(5)), "found the shape"),
    (_without(BIAS), f"{BIAS}: the model of the config.json has this tensor, and the files do not")])
def test_folders_that_do_not_fit_the_model_are_rejected_in_one_line(change: Callable[[Tensors], Tensors],
                                                                    message: str, tmp_path: Path) -> None:
    published(WRAPPED_MODELS["deepseek_v3"], tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path)
    error = rejection(check_hf_folder, tmp_path)
    assert message in error
    assert error.startswith(str(tmp_path))


@needs_transformers("5.20", "it does not ignore this layer")
def test_layers_that_transformers_ignores_are_ignored(tmp_path: Path) -> None:
    """DeepSeek publishes a layer after the last one, which predicts a further token."""
    values: dict[str, Any] = {**WRAPPED_MODELS["deepseek_v3"], "num_hidden_layers": 2}
    published(values, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "model.layers.61.eh_proj.weight": torch.zeros(4)}, path)
    assert "model.layers.61.eh_proj.weight" in read_header(path)
    assert not any("layers.61" in name for name in check_hf_folder(tmp_path).tensors)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "deepseek_v3"
