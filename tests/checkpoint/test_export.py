"""Exports: transformers loads the trained weights."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.export_hf import consolidate, export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.model.layer_specs import as_module
from tests.support.cases import case, config, flags
from tests.support.layouts import SAVED, STEPS, dp2, fp16, pp2, run_layouts
from tests.support.own_memory import MemoryWatch
from tests.support.tensors import from_transformers

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16 = {**dp2(1, precision="bf16"), **FP32_SUMS}
SOURCES = {"stage0": pp2(0), "pipeline": pp2(1), "zero3": dp2(3), "bf16": BF16, "fp16": fp16(pp2(0))}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def saved(corpus: str, work: Path) -> dict[str, Any]:
    return run_layouts({name: (2, case(name, "train_and_save", values,
                                       flags(corpus, steps=STEPS, emulate_fp16="fp16" in values), saved_step=SAVED))
                        for name, values in SOURCES.items()}, work / "saved")


def load_exactly(folder: Path) -> transformers.PreTrainedModel:
    """Load a folder with transformers. Every key must fit."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@pytest.mark.parametrize("name", SOURCES)
def test_transformers_loads_the_trained_weights(name: str, work: Path, saved: dict[str, Any]) -> None:
    """The logits of an exported checkpoint equal our model's, and the weights are the master weights."""
    folder = Path(saved[name]["folder"])
    plan = plan_export(folder, work / f"{name}-export", dtype="fp32", shard_gb=1e-4)
    export_hf(plan)
    assert len(list(plan.out.glob("model-*-of-*.safetensors"))) > 3
    consolidate(plan_export(folder, work / f"{name}-fp32", dtype="fp32", with_tokenizer=False))
    reader = CheckpointReader(folder)
    ours = as_module(plan.config).eval()
    ours.load_state_dict(reader.weights())
    tokens = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ours(tokens)
        for theirs in (load_exactly(plan.out), load_exactly(work / f"{name}-fp32")):
            torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-5, rtol=0)
            back = from_transformers(theirs.state_dict(), plan.config)
            assert all(torch.equal(back[key], reader.tensor(key)) for key in reader.shapes)
    assert set(os.listdir(work / f"{name}-fp32")) == {"model.safetensors", "config.json", "source.json"}


def test_diff_names_each_differing_state(saved: dict[str, Any]) -> None:
    a, b = Path(saved["stage0"]["folder"]), Path(saved["bf16"]["folder"])
    assert diff(a, a) == []
    found = diff(a, b)
    assert {difference.state for difference in found} == {"fp32", "exp_avg", "exp_avg_sq"}
    one = next(d for d in found if d.name == "2.mlp.up.weight" and d.state == "fp32")
    expected = (CheckpointReader(a).tensor(one.name) - CheckpointReader(b).tensor(one.name)).abs().max().item()
    assert one.max_abs == expected
    assert str(one) == f"2.mlp.up.weight fp32: differs by up to {expected:.3g}"


def test_memory_is_at_most_twice_the_largest_file(corpus: str, work: Path) -> None:
    """Conversions and loading need temporary memory of at most twice the largest file. The checkpoint has 250 MB."""
    wide = flags(corpus, hidden=512, layers=5, steps=1, seq_length=8)
    name, values = "wide", config(1, micro=1, accumulation=1)
    folder = Path(run_layouts({name: (2, case(name, "train_and_save", values, wide, saved_step=1))},
                              work / "wide")[name]["folder"])
    sizes = [record.bytes for record in read_manifest(folder).files.values()]
    assert sum(sizes) > 2e8
    used: dict[str, int] = {}
    with MemoryWatch() as watch:
        consolidate(plan_export(folder, work / "wide-bf16", dtype="bf16", with_tokenizer=False))
    used["consolidate"] = watch.peak - watch.before
    loaded = run_layouts({name: (2, case(name, "memory_of_load", config(3, micro=1, accumulation=1), wide,
                                         source=str(folder)))}, work / "wide-load")[name]
    used["load into ZeRO-3"] = loaded["peak"] - max(loaded["after"], loaded["before"])
    for what, num_bytes in used.items():
        print(f"{what}: {num_bytes / 1e6:.0f} MB of temporary memory; checkpoint {sum(sizes) / 1e6:.0f} MB, "
              f"largest file {max(sizes) / 1e6:.0f} MB")
        assert num_bytes <= 2 * max(sizes), what
