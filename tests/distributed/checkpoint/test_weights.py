"""CheckpointReader returns the same complete weights from every layout, and transformers computes the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.engine.build_ops import why_not_compilable
from pretrain.model.config import model_config_from
from pretrain.model.hf_weights import to_transformers
from pretrain.model.layer_specs import as_module
from tests.support.cases import case, config, flags, nvme, nvme_param
from tests.support.launch import run_cases

LAYOUTS: dict[str, dict[str, Any]] = {"zero1": config(1), "zero2": config(2), "zero3": config(3),
                                      "pipeline2": config(1, stages=2, accumulation=4)}
NO_NVME = why_not_compilable("AsyncIOBuilder")


@pytest.fixture(scope="module")
def folders(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("weights")
    (base / "swap").mkdir()
    layouts = dict(LAYOUTS)
    if not NO_NVME:
        layouts["zero3_nvme"] = config(3, offload_optimizer=nvme(base / "swap"),
                                       offload_param=nvme_param(base / "swap"))
    run_flags = flags(corpus, layers=2, hidden=256, steps=2)
    results = run_cases([case(name, "saved", values, run_flags) for name, values in layouts.items()], 2, base)
    return {name: Path(result["folder"]) for name, result in results.items()}


def test_weights_are_equal_in_every_layout(folders: dict[str, Path]) -> None:
    model = model_config_from(read_manifest(folders["zero1"]).model, "manifest")
    expected = CheckpointReader(folders["zero1"]).weights()
    assert expected.keys() == as_module(model).state_dict().keys()
    for name, folder in folders.items():
        found = CheckpointReader(folder).weights()
        assert found.keys() == expected.keys(), name
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-5, msg=f"{name} {key}")


def test_transformers_computes_the_same_logits(folders: dict[str, Path]) -> None:
    manifest = read_manifest(folders["pipeline2"])
    model = model_config_from(manifest.model, "manifest")
    weights = CheckpointReader(folders["pipeline2"]).weights()
    ours = as_module(model)
    ours.load_state_dict(weights)
    theirs = GPT2LMHeadModel(GPT2Config(**{k: v for k, v in manifest.model.items() if k != "model_type"}))
    theirs.load_state_dict(to_transformers(weights, model))
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs.eval()(tokens).logits, rtol=0, atol=1e-5)
