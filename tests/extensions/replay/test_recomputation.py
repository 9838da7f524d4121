"""Micro-batches that are computed again change nothing in training, and name a rank that computes wrongly."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.read_run_folder import read_rows
from tests.extensions.replay import WORKERS
from tests.support.cases import CPU, DROPOUT, case, config, flags
from tests.support.launch import WORKERS as CORE_WORKERS
from tests.support.launch import run_ranks, run_worker

WORKER = str(WORKERS / "recompute_worker.py")
EXPERTS = {"model_type": "qwen2_moe", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
           "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
           "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WRAPPED = {"model_type": "olmo2", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
FP16 = {"emulate_fp16": True}
# name -> (ranks, DeepSpeed JSON, flags); all with dropout
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero0": (2, config(0), {"z_loss": 1e-3}),
    "zero1_bf16": (2, config(1, precision="bf16"), {"noise_scale_interval": 1}),
    "zero2_documents": (2, config(2), {"document_attention": True}),
    "zero2_offload": (2, config(2, precision="bf16", offload_optimizer=CPU), {"recompute": "mlp"}),
    "zero3": (2, config(3, param_persistence_threshold=0), {"recompute": "blocks"}),
    "zero3_fp16": (2, config(3, precision="fp16", offload_param=CPU, offload_optimizer=CPU), FP16),
    "one_pipeline": (2, config(1, stages=2, accumulation=3), {}),
    "experts_zero1": (2, config(1), {"model": EXPERTS, "router_z_loss": 0.05}),
    "experts_shared": (2, {**config(2), "expert_parallel": {"enabled": True, "autoep_size": 2}}, {"model": EXPERTS}),
    "wrapped_zero3": (2, config(3), {"model": WRAPPED}),
    "sequence_zero2": (4, {**config(2, precision="bf16"), "sequence_parallel_size": 2}, {}),
    "pipeline_data": (4, config(1, precision="bf16", stages=2, accumulation=3), {"recompute": "blocks"}),
    "pipeline_data_fp16": (4, config(0, precision="fp16", stages=2), FP16),
    "tensor_data_zero1": (4, {**config(1, precision="bf16"), **TENSOR}, {}),
    "experts_tensor_data": (4, {**config(1), "expert_parallel": {"enabled": True, "autoep_size": 2}, **TENSOR},
                            {"model": EXPERTS}),
    "tensor_data_zero3": (4, {**config(3), **TENSOR}, {}),
}
FORWARD, BACKWARD = "forward", "backward"
# name -> (ranks, DeepSpeed JSON, fault (rank, direction, one wrong call in N, layer), kind, ranks that are named)
LIES: dict[str, tuple[int, dict[str, Any], tuple[int, str, int, int], str, list[int]]] = {
    "two_constantly": (2, config(2), (1, FORWARD, 1, 3), "undecided", [0, 1]),
    "two_flaky": (2, config(3), (1, BACKWARD, 2, 3), "flaky", [1]),
    "zero1_forward": (3, config(1), (2, FORWARD, 1, 3), "wrong", [2]),
    "zero2_backward": (3, config(2), (0, BACKWARD, 1, 3), "wrong", [0]),
    "zero3_forward": (3, config(3, param_persistence_threshold=0), (1, FORWARD, 1, 3), "wrong", [1]),
    "zero3_flaky": (3, config(3), (1, BACKWARD, 7, 3), "flaky", [1]),
    "offload_backward": (3, config(2, precision="bf16", offload_optimizer=CPU), (1, BACKWARD, 1, 3), "wrong", [1]),
    "pipeline_forward": (6, config(1, stages=2), (4, FORWARD, 1, 4), "wrong", [4]),
    "pipeline_flaky": (6, config(1, stages=2), (2, BACKWARD, 5, 2), "flaky", [2]),
    "tensor_backward": (6, {**config(1), **TENSOR}, (3, BACKWARD, 1, 3), "wrong", [3]),
}


# the others are slow
QUICK = ("zero1_bf16", "zero3", "experts_shared", "pipeline_data", "tensor_data_zero3", "zero2_backward",
         "zero3_forward", "zero3_flaky")


def _marked(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def _flags(corpus: str, folder: Path, given: dict[str, Any], steps: int) -> dict[str, Any]:
    own = flags(corpus, layers=3, hidden=32, overrides=DROPOUT, steps=steps, **given)
    if isinstance(given.get("model"), dict):
        path = folder / f"{given['model']['model_type']}.json"
        path.write_text(json.dumps(given["model"]))
        own |= {"model": str(path), "model_overrides": "attention_dropout=0.1"}
    return own


def _run(cases: dict[int, list[dict[str, Any]]], folder: Path) -> dict[str, Any]:
    return {name: result for ranks, some in cases.items()
            for name, result in run_worker(WORKER, some, ranks, folder / str(ranks)).items()}


@pytest.fixture(scope="module")
def equal(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """Return a function that runs the quick layouts, or the others, in one launch for each number of ranks."""
    @cache
    def results(is_quick: bool) -> dict[str, Any]:
        folder, cases = tmp_path_factory.mktemp("equal"), dict[int, list[dict[str, Any]]]()
        for name, (ranks, values, given) in LAYOUTS.items():
            if (name in QUICK) == is_quick:
                cases.setdefault(ranks, []).append(case(name, "equal", values, _flags(corpus, folder, given, 3)))
        return _run(cases, folder)

    return results


@pytest.fixture(scope="module")
def lies(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    @cache
    def results(is_quick: bool) -> dict[str, Any]:
        folder, cases = tmp_path_factory.mktemp("lies"), dict[int, list[dict[str, Any]]]()
        for name, (ranks, values, (rank, direction, every, layer), _, _) in LIES.items():
            if (name in QUICK) == is_quick:
                fault = {"rank": rank, "direction": direction, "every": every, "layer": str(layer)}
                cases.setdefault(ranks, []).append(
                    case(name, "fault", values, _flags(corpus, folder, {}, 8), fault=fault))
        return _run(cases, folder)

    return results


@pytest.mark.parametrize("name", _marked(LAYOUTS))
def test_training_has_the_same_bits(equal: Callable[[bool], dict[str, Any]], name: str) -> None:
    """On each rank: losses, norms, weights, optimizer states, random states, statistics of routers, and what the guard
    against bad steps and the estimate of the gradient noise scale have seen.
    """
    result = equal(name in QUICK)[name]
    for without, compared in zip(result["without"], result["with"], strict=True):
        assert compared["error"] == ""
        assert (without["compared"], compared["compared"]) == (0, 3)
        for key in ("loss", "grad_norm", "guard", "noise_scale", "state", "random", "routers"):
            assert compared[key] == without[key], key


@pytest.mark.parametrize("name", _marked(LIES))
def test_a_rank_that_computes_wrongly_is_named_with_its_layer(lies: Callable[[bool], dict[str, Any]],
                                                              name: str) -> None:
    _, _, (_, direction, _, layer), kind, ranks = LIES[name]
    result, block = lies(name in QUICK)[name], f"layer {layer} (Block)"
    assert len(set(result["errors"])) == 1, "the ranks disagree"
    assert len(result["events"]) == 1, result["error"]
    event = result["events"][0]
    assert (event["finding"], event["ranks"]) == (kind, ranks), event
    assert (event["direction"], event["layer"]) == (direction, block), event
    assert len(event["hosts"]) == len(ranks)
    assert f"rank {ranks[0]} on {event['hosts'][0]}" in result["error"]
    assert f"the {direction} pass of {block}" in result["error"]


def test_a_run_with_a_flaky_rank_ends_before_it_updates_or_saves(corpus: str, tmp_path: Path) -> None:
    """Of the calls of the layer on rank 1, two in a step are the training's. Steps 1, 3 (saved) and 5 are compared."""
    run, values = tmp_path / "run", tmp_path / "zero2.json"
    values.write_text(json.dumps(config(2)))
    given = {**_flags(corpus, tmp_path, {}, 8), "recompute_interval": 5, "save_interval": 3, "eval_interval": 0,
             "deepspeed_config": values, "save": run}
    (tmp_path / "faults.json").write_text(json.dumps(
        {"call": ["tests.extensions.replay.workers.recompute_worker:lie",
                  {"rank": 1, "layer": "3", "direction": "backward", "every": 12}]}))
    ranks = run_ranks([str(CORE_WORKERS / "faulty_train.py"), "faults.json",
                       *(f"--{key}={value}" for key, value in given.items())], 2, cwd=tmp_path)
    output = "".join(rank.stdout for rank in ranks)
    lines = [line for line in output.splitlines() if line.startswith("ds-pretrain: error")]
    assert 1 in [rank.returncode for rank in ranks], output
    assert len(lines) == 1, output
    assert re.search(r"step 5: rank 1 on \S+ computed the same micro-batch twice with different results, first in the "
                     r"backward pass of layer 3 \(Block\), in the gradient of its input\. The update of this step was "
                     r"not made\. Nothing was saved since step 3, when the results were last equal: start", lines[0])
    assert "Traceback" not in output
    assert [row["step"] for row in read_rows(run / "events.jsonl") if row["event"] == "recomputation"] == [5]
    assert [folder.name for folder in (run / "checkpoints").glob("global_step*")] == ["global_step3"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "values"), [(2, config(1, precision="bf16")), (3, config(3)),
                                               (4, config(1, precision="bf16", stages=2))],
                         ids=["zero1", "zero3", "pipeline"])
def test_100_healthy_comparisons_find_nothing(ranks: int, values: dict[str, Any], corpus: str, tmp_path: Path) -> None:
    own = _flags(corpus, tmp_path, {}, 100)
    result = run_worker(WORKER, [case("healthy", "healthy", values, own)], ranks, tmp_path)["healthy"]
    assert (result["error"], result["compared"]) == ("", 100)
    print(f"step {result['step_s'] - result['compare_s']:.4f} s, comparison {result['compare_s']:.4f} s")
