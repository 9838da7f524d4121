"""Tensor x pipeline x data parallelism on 2 x 2 x 2 ranks: losses and checkpoints are those of one rank.

Eight ranks share this machine's cores. The model with experts divides them over two of the four ranks of each pipeline
stage, the tensor-parallel ones; the other two hold the same experts.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.export_hf import consolidate, export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.reader import CheckpointReader
from tests.support.cases import case, config, flags
from tests.support.layouts import (
    HAS_EXPERTS,
    MODEL_WITH_EXPERTS,
    SAVED,
    STEPS,
    TENSOR2,
    dp2,
    experts2,
    relative_difference,
    run_layouts,
)

MODELS = ("dense", *(["experts"] if HAS_EXPERTS else []))
ONE = config(0, micro=2, accumulation=4)  # with the micro-batches of the others, because of the losses of routers
CUBE = {"dense": {**config(1, micro=2, accumulation=2, stages=2), **TENSOR2},
        "experts": {**experts2(1, micro=2, accumulation=2, stages=2), **TENSOR2}}
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {"zero3": (2, dp2(3)), "one": (1, ONE)}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("three_degrees")
    model = folder / "experts.json"
    model.write_text(json.dumps(MODEL_WITH_EXPERTS))
    run_flags = {"dense": flags(corpus, steps=STEPS),
                 "experts": {**flags(corpus, steps=STEPS), "model": str(model), "model_overrides": "vocab_size=256"}}

    def of(name: str, job: str, values: dict[str, Any], model: str, **others: Any) -> dict[str, Any]:
        return case(name, job, values, run_flags[model], saved_step=SAVED, **others)

    saves = {f"{model}_one": (1, of(f"{model}_one", "train_and_save", ONE, model)) for model in MODELS}
    saves |= {f"{model}_cube": (8, of(f"{model}_cube", "train_and_save", CUBE[model], model)) for model in MODELS}
    found = run_layouts(saves, folder / "save")
    loads = {f"{model}_{name}_resumed": (ranks, of(f"{model}_{name}_resumed", "resume", values, model,
                                                   source=found[f"{model}_cube"]["folder"]))
             for model in MODELS for name, (ranks, values) in OTHERS.items()}
    return found | run_layouts(loads, folder / "load")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_checkpoint_are_those_of_one_rank(model: str, results: dict[str, Any]) -> None:
    cube, one = results[f"{model}_cube"], results[f"{model}_one"]
    for part in ("before", "after"):
        assert relative_difference(cube[part]["loss"], one[part]["loss"]) <= 1e-6
        assert relative_difference(cube[part]["grad_norm"], one[part]["grad_norm"]) <= 1e-5
        assert cube[part]["lr"] == one[part]["lr"]
    folder, expected = (CheckpointReader(Path(result["folder"])) for result in (cube, one))
    manifest = read_manifest(folder.folder)
    assert (manifest.world_size, manifest.pipeline_stages, manifest.tensor_parallel_size) == (8, 2, 2)
    assert folder.states == expected.states == ["fp32", "exp_avg", "exp_avg_sq"]
    assert folder.shapes == expected.shapes
    assert folder.scalars == expected.scalars
    for name in expected.shapes:
        for state in expected.states:
            values = expected.tensor(name, state)
            # the gradient of a key's bias is 0 but for rounding errors, which Adam's first steps enlarge
            within = 1e-3 if state == "fp32" and name.endswith("bias") else 5e-5
            assert (folder.tensor(name, state) - values).norm() <= within * values.norm(), (name, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_it_resumes_in_another_layout(model: str, name: str, results: dict[str, Any], tmp_path: Path) -> None:
    before, after = results[f"{model}_cube"], results[f"{model}_{name}_resumed"]
    assert diff(Path(before["folder"]), Path(after["folder"])) == []
    assert relative_difference(after["after"]["loss"], before["after"]["loss"]) <= 1e-5
    for write in (export_hf, consolidate):
        written = [tmp_path / f"{write.__name__}{number}" for number in range(2)]
        for result, out in zip((before, after), written, strict=True):
            write(plan_export(Path(result["folder"]), out, dtype="fp32", with_tokenizer=False))
        assert len({(out / "model.safetensors").read_bytes() for out in written}) == 1
