"""Every family in and out: a transformers folder -> one training step on two ranks -> a folder for transformers.

A usual run trains one model of each family in one of the two layouts, pipeline x ZeRO-1 or ZeRO-3. The slow tests
train it in the other one, and the other models in both.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.model.config import load_model_config
from pretrain.model.layer_specs import as_module
from tests.support.cases import case
from tests.support.first_batch import first_batch
from tests.support.layouts import dp2, pp2, run_layouts
from tests.support.model_shapes import SHAPES, write_config

VOCAB, BATCH = 97, 8
SEQ_LENGTH = 32  # more than every sliding window, and than the positions of llama_dynamic_rope
LAYOUTS = {"pipeline_zero1": pp2(1, lr=1e-2), "zero3": dp2(3, lr=1e-2)}
USUAL = list({shape["model_type"]: name for name, shape in SHAPES.items()}.values())  # the last model of each family
CASES = [pytest.param(name, layout, marks=() if name in USUAL and (USUAL.index(name) + shift) % 2 == 0 else
                      pytest.mark.slow)
         for name in SHAPES for shift, layout in enumerate(LAYOUTS)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write random tokens, and return the prefix of the files."""
    prefix = tmp_path_factory.mktemp("tokens") / "random"
    numbers = np.random.default_rng(4)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(40):
            writer.add_document(numbers.integers(0, VOCAB, 50).astype(np.uint16))
        writer.finalize({"vocab_size": VOCAB, "eod_token": None, "max_token": VOCAB - 1})
    return str(prefix)


def write_folder(name: str, folder: Path) -> Path:
    """Write the transformers folder of a model with random weights, some of them in several files."""
    config = AutoConfig.from_pretrained(write_config(folder / "config", SHAPES[name]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
    model.save_pretrained(folder / "weights", max_shard_size="60KB" if len(name) % 2 else "1GB")
    return folder / "weights"


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tokens: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("families")
    selected = [(item.callspec.params["name"], item.callspec.params["layout"]) for item in request.session.items
                if item.path == request.path and hasattr(item, "callspec")]
    sources = {name: write_folder(name, base / name) for name in dict(selected)}
    cases = {}
    for name, source in sources.items():
        for layout in [layout for each, layout in selected if each == name]:
            flags = {"init_from": str(source), "train_data": tokens, "split": "1,0,0", "train_steps": 1,
                     "seq_length": SEQ_LENGTH, "lr_schedule": "constant", "lr_warmup_steps": 0}
            cases[f"{name}-{layout}"] = (2, case(f"{name}-{layout}", "start_from_weights", LAYOUTS[layout], flags,
                                                     saved_step=1))
    return {"sources": sources, **run_layouts(cases, base / "runs")}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_come_in_train_and_leave(name: str, layout: str, trained: dict[str, Any], tokens: str,
                                         tmp_path: Path) -> None:
    source, result = trained["sources"][name], trained[f"{name}-{layout}"]
    batch, labels = first_batch(tokens, split="1,0,0", seq_length=SEQ_LENGTH, samples=BATCH)
    published = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = published(batch).logits
        loss = float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert result["loss"] == [pytest.approx(loss, rel=1e-5)]

    export_hf(plan_export(Path(result["folder"]), tmp_path / "out"))
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    ours = as_module(load_model_config(str(tmp_path / "out"))).eval()
    ours.load_state_dict(CheckpointReader(Path(result["folder"])).weights())
    with torch.no_grad():
        trained_logits = exported.eval()(batch).logits
        torch.testing.assert_close(ours(batch), trained_logits, atol=1e-5, rtol=0)
    assert (trained_logits - logits).abs().max() > 1e-3, "the step changed nothing"
