"""The step-time model: published throughput of A100 and H100 GPUs, latencies, and the order of layouts."""

import json
from dataclasses import replace
from typing import Any

import pytest

from pretrain.config.layout import Layout
from pretrain.extensions.planner.cost import run_cost
from pretrain.extensions.planner.main import main
from pretrain.extensions.planner.step_time.block_traffic import Transfer
from pretrain.extensions.planner.step_time.kernel_time import KernelRates
from pretrain.extensions.planner.step_time.time_model import StepTime, collective_latency, predict_step
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, model_error
from pretrain.memory.compare.compare import Workload, estimate_candidate
from pretrain.memory.hardware import GPUS, make_cluster
from pretrain.model.config import load_model_config
from tests.extensions.planner.fit_throughput import (
    FITTED,
    IN_USE,
    STEPS,
    error_of_tests,
    fit_error,
    ratios,
    summary_rows,
)
from tests.extensions.planner.gpu_throughput import model_of_row, read_measurements
from tests.support.launch import ROOT

ROWS = read_measurements()


def test_every_gpu_has_a_peak_rate_and_a_memory_budget() -> None:
    for name in GPUS:
        cluster = make_cluster(gpu=name, world_size=16, nodes=None, gpus_per_node=8)
        assert cluster.gpu.peak_flops("bf16") > cluster.gpu.peak_flops("fp32") > 1e12
        assert 0 < cluster.device_budget_bytes < cluster.gpu.memory_bytes


def test_the_published_table_is_consistent() -> None:
    """Its parameters and its MFU follow from its other columns, so that no number was copied wrongly."""
    assert len(ROWS) == 100
    for row in ROWS:
        model = model_of_row(row.model, row.seq_length)
        assert model.num_parameters() == row.num_parameters
        flops = 6 * row.num_parameters + 12 * model.num_layers * model.hidden_size * row.seq_length
        mfu = flops * row.tokens_per_second / GPUS[row.gpu].peak_flops("bf16")
        assert mfu == pytest.approx(row.mfu, rel=0.004)


def test_predictions_are_within_the_error_of_rows_that_were_not_used_for_the_fit() -> None:
    """The error that `model_error` states holds for 95% of them, with ZeRO alone and with other degrees."""
    found = ratios()
    assert sum(map(len, found.values())) == 100 + len(STEPS)
    assert len(found["3d test"]) >= len(STEPS) // 3
    for names, layout in ((["h100", "a100-40"], Layout(zero_stage=3)),
                          (["3d test"], Layout(zero_stage=1, world_size=2, pipeline_stages=2))):
        error = error_of_tests(found, names)
        assert 0.5 * model_error(layout) < error <= model_error(layout), names
    for layout in (Layout(tensor_parallel_size=2, world_size=2), Layout(offload_optimizer="cpu", zero_stage=1)):
        assert model_error(layout) > model_error(Layout(zero_stage=3))


def test_the_rows_with_pipelines_are_deepspeeds() -> None:
    assert {row.schedule for row in STEPS} == {"1f1b"}
    assert {(row.tensor > 1, row.pipeline > 1) for row in STEPS} == {(True, True), (True, False)}


@pytest.mark.parametrize("name", FITTED)
def test_no_other_value_of_a_fitted_parameter_is_much_better(name: str) -> None:
    """The parameters in use are the rounded result of the fit, which takes a minute (fit_throughput.py)."""
    best = fit_error(IN_USE)
    for factor in (0.8, 1.25):
        assert fit_error(replace(IN_USE, **{name: getattr(IN_USE, name) * factor})) > best  # type: ignore[arg-type]


def test_the_page_shows_the_predictions_of_this_version() -> None:
    page = (ROOT / "pretrain/extensions/planner/README.md").read_text()
    for line in summary_rows():  # python -m tests.extensions.planner.fit_throughput prints them
        assert line in page


def test_products_slow_down_with_unfavourable_shapes() -> None:
    rates = KernelRates(GPUS["a100"], "bf16", 2, DEFAULT_PARAMETERS)

    def efficiency(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / rates.product_seconds(m, n, k) / 312e12

    assert 0.8 < efficiency(16384, 8192, 8192) <= 0.87
    assert efficiency(4096, 4096, 64) < 0.5 * efficiency(4096, 4096, 4096)  # few products for each byte
    assert efficiency(256, 128 * 109, 4096) < 0.8 * efficiency(256, 128 * 108, 4096)  # a wave of a single tile
    assert efficiency(128, 128, 4096) < 0.02  # one tile on 108 multiprocessors


def step_time(model: str, gpu: str, layout: Layout) -> StepTime:
    cluster = make_cluster(gpu=gpu, world_size=layout.world_size, nodes=None, gpus_per_node=None)
    return predict_step(layout, cluster, load_model_config(model))


def test_small_models_wait_for_the_host_and_large_ones_do_not() -> None:
    tiny = step_time("tiny", "h100", Layout(world_size=2, zero_stage=1, seq_length=128))
    assert tiny.total_seconds > 1e-3
    assert tiny.launch_seconds > 0.5 * tiny.total_seconds
    large = step_time("gpt3-6.7b", "h100", Layout(world_size=64, zero_stage=3, micro_batch_size=4, seq_length=2048,
                                                  overlap_comm=True))
    assert large.launch_seconds < 0.01 * large.total_seconds  # the optimizer step


def test_more_ranks_and_nodes_have_a_longer_latency() -> None:
    cluster = make_cluster(gpu="a100", world_size=128, nodes=None, gpus_per_node=None)
    for what in ("parameters: all-gather", "gradients: all-reduce"):
        latencies = [collective_latency(Transfer(what, "network", "step", 0, ranks), cluster)
                     for ranks in (1, 2, 8, 16, 128)]
        assert latencies == sorted(latencies)
        assert latencies[0] == 0
        assert 1e-5 < latencies[1] < latencies[-1] < 1e-3


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    main([*arguments, "--json"])
    return list(json.loads(capsys.readouterr().out)["rows"])


@pytest.mark.parametrize("arguments", [
    ["--model", "tiny", "--world_size", "2", "--gpu", "0.5", "--seq_length", "128"],
    ["--model", "gpt2", "--world_size", "8", "--gpu", "a100"],
])
def test_the_simplest_of_equally_fast_layouts_is_first(capsys: pytest.CaptureFixture[str],
                                                       arguments: list[str]) -> None:
    rows = rows_of(capsys, *arguments)
    assert rows[0]["name"] == "zero1"
    fastest = min(row["step_time"]["total_seconds"] for row in rows if row["fits"] and row["runs_here"])
    assert rows[0]["step_time"]["total_seconds"] <= 1.2 * fastest


def test_a_much_faster_layout_is_preferred_to_a_simpler_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "--model", "gpt3-13b", "--world_size", "64", "--gpu", "a100-40")
    fastest = min(row["step_time"]["total_seconds"] for row in rows if row["fits"] and row["runs_here"])
    simpler = next(row for row in rows if row["name"] == "pipeline2_zero1")
    assert simpler["fits"]
    assert simpler["step_time"]["total_seconds"] > 1.2 * fastest
    assert rows[0]["name"] == "zero3"


def test_recomputation_is_advised_by_its_cost() -> None:
    alternatives = pytest.importorskip("pretrain.extensions.memory_watch.changes_that_fit").alternatives
    model = load_model_config("gpt2")
    workload = Workload.of(model, make_cluster(gpu="h100", world_size=1, nodes=None, gpus_per_node=1))
    layout = Layout(zero_stage=3, micro_batch_size=8, gradient_accumulation_steps=1, seq_length=1024)
    rows = [estimate_candidate(candidate, workload) for candidate in alternatives(layout, workload)
            if candidate.layout.micro_batch_size == 8 and candidate.layout.offload_optimizer == "none"]
    assert {row.candidate.rejection for row in rows} == {""}
    rows.sort(key=lambda row: row.step_seconds)
    assert [row.candidate.name for row in rows] == ["zero3", "zero3_recompute_attention", "zero3_recompute_mlp",
                                                    "zero3_checkpoint", "zero3_checkpoint_cpu"]
    plain, attention, _, blocks, offloaded = [row.estimate for row in rows]
    assert plain.device_bytes > attention.device_bytes > blocks.device_bytes > offloaded.device_bytes
    inputs = 12 * 8 * 1024 * 768 * 2  # of 12 blocks; pinned memory is rounded up to powers of two
    assert inputs <= offloaded.host_bytes - plain.host_bytes <= 2 * inputs


def test_cost_of_gpt3() -> None:
    layout = Layout(world_size=1024, zero_stage=1, precision="fp16")
    cost = run_cost(layout, num_parameters=175 * 10**9, flops_per_token=6 * 175e9, peak_flops=1024 * 312e12, mfu=0.45,
                    nodes=128, tokens=300e9)
    assert cost.flops == pytest.approx(3.15e23)
    assert cost.days == pytest.approx(3.15e23 / (1024 * 312e12 * 0.45) / 86400)
    assert cost.gpu_hours == pytest.approx(cost.days * 24 * 1024)
    assert cost.chinchilla_tokens == 3.5e12
    assert cost.checkpoint_bytes == 175 * 10**9 * (4 + 8 + 2)
    assert Layout(zero_stage=3).checkpoint_bytes(100) == 100 * (4 + 8)
