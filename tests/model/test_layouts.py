"""Parameters, initial weights, loss and gradients are equal in every layout: plain, ZeRO-3, 1 and 2 pipeline stages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from tests.support.launch import WORKERS, run_ranks
from tests.support.model_shapes import SHAPES, write_config

WORKER = WORKERS / "model_worker.py"
LAID_OUT = ["gpt2", "llama", "llama_tied_llama3_rope", "neox_parallel", "gemma2", "gemma3_untied_softcap", "olmo2",
            "gptj", "bloom"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two ranks. One launch runs all cases of this file."""
    folder = tmp_path_factory.mktemp("layouts")
    for name in LAID_OUT:
        write_config(folder / "shapes" / name, SHAPES[name])
    for name in SHAPES:
        write_config(folder / "all" / name, SHAPES[name])
    done = run_ranks([str(WORKER), str(folder)], 2, cwd=folder)
    assert [rank.returncode for rank in done] == [0, 0], "\n".join(rank.stdout[-3000:] for rank in done)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def plain_state(name: str, tmp_path: Path) -> dict[str, torch.Tensor]:
    config = load_model_config(write_config(tmp_path, SHAPES[name]))
    module = as_module(config)
    initialize_parameters(module, config, seed=7)
    return module.state_dict()


@pytest.mark.parametrize("name", SHAPES)
def test_one_stage_has_the_names_weights_and_loss_of_the_plain_module(ranks, name, tmp_path):
    expected = plain_state(name, tmp_path)
    for seen in ranks:
        result = seen[f"{name}/one_stage"]
        assert list(result["state"]) == list(expected)
        assert all(torch.equal(value, expected[key]) for key, value in result["state"].items())
        assert result["loss"] == pytest.approx(result["plain_loss"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "bloom_older_names"])  # it has five heads
def test_shards_of_sequences_give_the_loss_and_gradients_of_the_plain_module(ranks, name):
    for seen in ranks:
        for result in seen[f"{name}/sequence"]:  # without and with documents
            assert result["loss"] == pytest.approx(result["plain_loss"], rel=1e-6)
            assert result["worst_gradient"] < 1e-5


@pytest.mark.parametrize("name", LAID_OUT)
def test_two_stages_together_have_all_weights_of_the_plain_module(ranks, name, tmp_path):
    expected = plain_state(name, tmp_path)
    stages = [seen[f"{name}/pipeline"]["initial"] for seen in ranks]
    assert set(stages[0]) | set(stages[1]) == set(expected)
    shared = set(stages[0]) & set(stages[1])
    assert shared == {key for key in expected if key.startswith("tied_modules")}
    for stage in stages:
        assert all(torch.equal(value, expected[key]) for key, value in stage.items())


@pytest.mark.parametrize("name", LAID_OUT)
def test_two_stages_take_the_same_step_as_the_plain_module(ranks, name):
    for seen in ranks:
        result = seen[f"{name}/pipeline"]
        assert result["loss"] == pytest.approx(result["plain_loss"], rel=1e-6)
        assert result["worst_weight"] < 1e-6


@pytest.mark.parametrize("name", LAID_OUT)
def test_zero3_has_the_weights_loss_and_gradients_of_the_plain_module(ranks, name):
    for seen in ranks:
        result = seen[f"{name}/zero3"]
        assert result["names"]
        assert result["initial_equal"]
        assert result["loss"] == pytest.approx(result["plain_loss"], rel=1e-6)
        assert result["worst_gradient"] < 1e-6
