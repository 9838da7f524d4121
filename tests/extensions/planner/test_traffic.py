"""Predicted bytes of a step, compared with the bytes that collectives and disks of real engines transfer."""

from pathlib import Path
from typing import Any

import pytest

from pretrain.config.ds_json.read import DsFile
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.resolve import resolve_ds_config
from pretrain.distributed.device import cpu_device
from pretrain.extensions.planner.step_time.block_traffic import Transfer
from pretrain.extensions.planner.step_time.traffic import rank_parameters, step_traffic
from pretrain.model.config import load_model_config
from tests.support.cases import NO_NVME, case, config, flags, nvme
from tests.support.launch import run_worker
from tests.support.model_shapes import SHAPES, write_config
from tests.support.traffic_layouts import (
    CHECK,
    CONFIGS,
    DIVIDE_ALL,
    EXCHANGE,
    FLAGS,
    FOUR_RANKS,
    MASKED,
    MASKED_CONFIGS,
    NVME_FLAGS,
    RANKS,
    RECOMPUTED_CONFIGS,
    SHARED_CONFIGS,
    reads,
    shared_flags,
)


def shape_flags(shape: str, corpus: str, folder: Path, **others: Any) -> dict[str, Any]:
    """Return flags that train a model of a shape, 128 wide."""
    width = "hidden_size" if "hidden_size" in SHAPES[shape] else "n_embd"
    return {**flags(corpus, steps=3), "model": write_config(folder / shape, SHAPES[shape]),
            "model_overrides": f"vocab_size=256,{width}=128", **others}


def predicted(name: str, values: dict[str, Any], run: dict[str, Any], ranks: int = RANKS) -> list[Transfer]:
    model = load_model_config(run["model"], run["model_overrides"])
    args = RunArguments(seq_length=run["seq_length"], train_steps=run["train_steps"],
                        **{flag: run[flag] for flag in ("recompute", "mlp_tiles") if flag in run})
    layout = resolve_ds_config(DsFile(name, values), args, model=model, world_size=ranks, device=cpu_device()).layout
    return step_traffic(layout, rank_parameters(layout, model, model.num_parameters()), model)


@pytest.fixture(scope="module")
def measured(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the bytes of the second step by collective, and the bytes of the disk, for each case and rank."""
    folder = tmp_path_factory.mktemp("traffic")
    (folder / "swap").mkdir()
    cases = [case(name, "", values, flags(corpus, **FLAGS, **({"emulate_fp16": True} if "fp16" in values else {})))
             for name, values in CONFIGS.items()]
    cases += [case(name, "", values, flags(corpus, **FLAGS, **MASKED)) for name, values in MASKED_CONFIGS.items()]
    cases += [case(name, "", values, shared_flags(name, corpus, folder)) for name, values in SHARED_CONFIGS.items()]
    cases += [case(name, "", values, shape_flags(shape, corpus, folder, **others))
              for name, (shape, values, others) in RECOMPUTED_CONFIGS.items()]
    if not NO_NVME:
        values = config(3, precision="bf16", offload_optimizer=nvme(folder / "swap"), **DIVIDE_ALL)
        cases.append(case("nvme", "", values, flags(corpus, **NVME_FLAGS)))
    return run_worker("traffic_worker.py", cases, RANKS, folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_predicted_network_bytes_equal_measured_bytes(name: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    transfers = predicted(name, CONFIGS[name], flags("", **FLAGS))
    # Exact except for padding. With recomputation the repeated gathers depend on the order of the prefetches.
    tolerance = 0.03 if "recompute" in name else 0.01
    for collective in ("all-reduce", "all-gather", "reduce-scatter"):
        expected = sum(transfer.bytes for transfer in transfers if collective in transfer.what)
        for rank in measured[name]:
            assert rank[collective] == pytest.approx(expected, rel=tolerance), collective
    # The prediction is for a rank with two neighbours. Such a rank sends as much as both ranks of this test together.
    between_stages = sum(transfer.bytes for transfer in transfers if "pipeline stage" in transfer.what)
    assert sum(rank["send"] for rank in measured[name]) == pytest.approx(between_stages, rel=0.01, abs=64)
    for rank in measured[name]:
        assert not rank["reduce"], "a collective that is not predicted"
        assert not rank["broadcast"], "a collective that is not predicted"


def assert_predicted(found: list[dict[str, Any]], transfers: list[Transfer], name: str) -> None:
    """Compare the bytes of the ranks with most: in a pipeline, of the first or the last stage.

    Tensor-parallel ranks also exchange three numbers for each token, for the loss, which is not predicted. Without a
    capacity, ranks send different numbers of rows to each other's experts. A group of layers that does not end with a
    block recomputes the last sum, too.
    """
    tolerance = 0.03 if "groups" in name else 0.01
    is_even = "experts" not in name or ("tensor" not in name and name != "experts2_zero1")
    collectives = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    for collective in ("all-gather", "reduce-scatter", *(["all-to-all"] if is_even else [])):
        expected = sum(transfer.bytes for transfer in transfers if collective in transfer.what)
        assert max(rank[collective] for rank in found) == pytest.approx(expected, rel=tolerance), collective
    expected = sum(transfer.bytes for transfer in transfers if "pipeline stage" not in transfer.what)
    total = max(sum(rank[collective] for collective in collectives) for rank in found)
    assert total == pytest.approx(expected, rel=tolerance if is_even else 0.04)
    sent = sum(transfer.bytes for transfer in transfers if "pipeline stage" in transfer.what)
    assert 2 * max(rank["send"] for rank in found) == pytest.approx(sent, rel=0.01, abs=64)


@pytest.mark.parametrize("name", SHARED_CONFIGS)
def test_predicted_bytes_of_shared_layers_equal_measured_bytes(
        name: str, measured: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    assert_predicted(measured[name], predicted(name, SHARED_CONFIGS[name], shared_flags(name, "", tmp_path)), name)


@pytest.mark.parametrize("name", RECOMPUTED_CONFIGS)
def test_recomputed_layers_repeat_the_predicted_collectives(
        name: str, measured: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    shape, values, others = RECOMPUTED_CONFIGS[name]
    assert_predicted(measured[name], predicted(name, values, shape_flags(shape, "", tmp_path, **others)), name)


@pytest.mark.slow
def test_predicted_bytes_of_two_degrees_equal_measured_bytes(corpus: str, tmp_path: Path) -> None:
    runs = {name: shape_flags(shape, corpus, tmp_path, **others) for name, (shape, _, others) in FOUR_RANKS.items()}
    found = run_worker("traffic_worker.py", [case(name, "", FOUR_RANKS[name][1], run) for name, run in runs.items()],
                       4, tmp_path)
    for name, run in runs.items():
        assert_predicted(found[name], predicted(name, FOUR_RANKS[name][1], run, ranks=4), name)


def test_zero_stage_2_reduces_every_micro_batch(measured: dict[str, list[dict[str, Any]]]) -> None:
    """DeepSpeed all-reduces the gradients of each micro-batch, which is more than in the ZeRO paper; see traffic.py."""
    zero1, zero2 = measured["zero1"][0], measured["zero2"][0]
    assert zero2["all-reduce"] == pytest.approx(4 * zero1["all-reduce"], rel=0.01)


@pytest.mark.skipif(bool(NO_NVME), reason=f"NVMe offload: {NO_NVME}")
def test_predicted_disk_bytes_equal_measured_bytes(measured: dict[str, list[dict[str, Any]]]) -> None:
    values = config(3, precision="bf16", offload_optimizer=nvme("/"), **DIVIDE_ALL)
    transfers = predicted("nvme", values, flags("", **NVME_FLAGS))
    expected = sum(transfer.bytes for transfer in transfers if transfer.link == "disk")
    for rank in measured["nvme"]:
        # tensors below 1 MiB remain on the host
        assert 0.95 * expected <= rank["read_bytes"] + rank["write_bytes"] <= 1.01 * expected


def test_only_decisions_and_numbers_of_tokens_are_read_from_the_device(
        measured: dict[str, list[dict[str, Any]]]) -> None:
    """DeepSpeed may read whether it skips the update of a step that is not logged. In fp32 at ZeRO-0 this program does.

    An exchange of tokens without a capacity reads their numbers, once for each block with experts and micro-batch.
    """
    micro_batches, blocks = 2, SHAPES["qwen3_moe"]["num_hidden_layers"]
    for name in (*CONFIGS, *MASKED_CONFIGS, *SHARED_CONFIGS):
        in_fp32, exchanges = name == "zero0_fp32", name in ("experts2_zero1", "experts2_tensor2")
        for rank in measured[name]:
            assert reads(rank, CHECK) == in_fp32, name
            assert reads(rank, EXCHANGE) == exchanges * micro_batches * blocks, name
            assert reads(rank, "pretrain/") == reads(rank, CHECK) + reads(rank, EXCHANGE), name


def test_masked_labels_add_one_small_all_reduce_and_no_read(measured: dict[str, list[dict[str, Any]]]) -> None:
    """The pipeline stages share one data-parallel rank, which has nothing to sum."""
    for name in MASKED_CONFIGS:
        added = name != "pipeline2_masked"
        for masked, usual in zip(measured[name], measured[name.removesuffix("_masked")], strict=True):
            assert masked["reads"] == usual["reads"]
            assert masked["small"] == usual["small"] + added
            assert masked["collectives"] == usual["collectives"] + added
