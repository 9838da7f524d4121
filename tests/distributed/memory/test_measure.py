"""Memory three ways: estimated, simulated and measured, for the files of ds_configs/ on 1, 2 and 4 ranks.

Measured are real engines in real ranks. Each time every file runs on one, two or four ranks, and one of each kind is
simulated; `pytest -m slow` runs and simulates the others.
"""

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.arguments import RunArguments
from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.layout import Layout
from pretrain.config.validate import plan_without_data
from pretrain.distributed.device import cpu_device
from pretrain.engine.build_ops import missing_operator
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import ModelShape, shape_of
from pretrain.memory.estimate.rank import Rank
from pretrain.memory.estimate.rank_memory import estimate_rank
from pretrain.memory.estimate.states import states_of_rank
from pretrain.memory.footprint import LOCATIONS, STATES, Footprint
from pretrain.memory.measure import run_ranks as run_ranks_module
from pretrain.memory.measure.measure_run import Measurement, measure, measurement
from pretrain.memory.simulate.simulate_ranks import Simulation, simulate, simulate_many
from tests.conftest import selected_params
from tests.support.launch import ROOT, FailedCase, free_port, run_worker

NO_NVME = missing_operator("AsyncIOBuilder")
FILES = [path for path in sorted((ROOT / "ds_configs").glob("*.json")) if not (NO_NVME and "nvme" in path.stem)]
SOME = {1: ("zero0_bf16", "zero1_bf16_fp32_accumulation", "zero1_fp16_static", "zero2_fp16", "zero3_fp16",
            "zero3_activation_checkpointing", "zero3_offload_optimizer_cpu", "zero3_offload_optimizer_nvme"),
        2: ("zero0_fp32", "zero1_bf16", "zero1_fp16", "zero2_offload_optimizer_cpu", "zero3_offload_all_cpu",
            "zero3_offload_all_nvme", "pipeline2_activation_checkpointing", "pipeline2_offload_optimizer_cpu",
            "pipeline2_zero0_bf16", "pipeline2_zero0_fp16", "pipeline2_zero1_bf16", "pipeline2_zero1_fp16",
            "pipeline2_zero1_bf16_fp32_accumulation"),
        4: ("zero2_bf16", "zero3_bf16", "pipeline4_zero0_bf16", "pipeline4_zero0_fp16", "pipeline4_zero1_bf16",
            "pipeline4_zero1_fp16")}
SIMULATED = {1: ("zero1_bf16_fp32_accumulation",), 4: ("pipeline4_zero1_bf16", "zero2_bf16", "zero3_bf16"),
             2: ("zero0_fp32", "zero1_bf16", "zero2_offload_optimizer_cpu", "zero3_offload_all_nvme",
                 "pipeline2_zero0_bf16")}
SMALL = "vocab_size=256,n_layer=4,n_embd=64"
LARGE = "vocab_size=256,n_layer=2,n_embd=512"  # parts of a MiB and more, which NVMe offload swaps
SLACK_BYTES = 64  # scalars that differ
LARGE_WORLD = 1024

Case = tuple[int, str]  # (ranks, name)


def stages_of(path: Path) -> int:
    return int(read_ds_config(str(path)).get("pipeline.stages", 1))


def params(quick: dict[int, tuple[str, ...]]) -> list[Any]:
    """Every file on every number of ranks that it can run on; those that are not in `quick` are marked as slow."""
    return [pytest.param((ranks, path.stem), id=f"{path.stem}-{ranks}",
                         marks=[] if path.stem in quick[ranks] else [pytest.mark.slow])
            for ranks in (1, 2, 4) for path in FILES if ranks % stages_of(path) == 0]


CASES, SIMULATED_CASES = params(SOME), params(SIMULATED)


def arguments(name: str, folder: Path) -> RunArguments:
    path = ROOT / "ds_configs" / f"{name}.json"
    if name == "zero3_offload_all_nvme":  # its buffers of 1 GB take seconds to fill
        text = path.read_text().replace('"buffer_size": 1e8', '"buffer_size": 2e6')
        path = folder / path.name
        path.write_text(text)
    return RunArguments(deepspeed_config=str(path), model="tiny", model_overrides=LARGE if "nvme" in name else SMALL,
                        seq_length=64, train_steps=10, micro_batch_size=2, gradient_accumulation_steps=2,
                        emulate_fp16="fp16" in name, nvme_path=str(folder) if "nvme" in name else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, folder: Path) -> dict[Case, Measurement]:
    found = {}
    for ranks in (1, 2, 4):
        selected = {*selected_params(request, "case"), *selected_params(request, "simulated_case")}
        names = sorted(name for own_ranks, name in selected if own_ranks == ranks)
        cases = [{"name": name, "args": dataclasses.asdict(arguments(name, folder))} for name in names]
        results = run_worker("memory_worker.py", cases, ranks, folder / f"{ranks}-ranks")
        found.update({(ranks, name): measurement(name, result) for name, result in results.items()
                      if not isinstance(result, FailedCase)})
    return found


@pytest.fixture(scope="module")
def simulated(request: pytest.FixtureRequest, folder: Path) -> dict[Case, Simulation]:
    """The last rank of each world: of a pipeline it is in the last stage."""
    cases = selected_params(request, "simulated_case")
    jobs = [(arguments(name, folder), ranks - 1, ranks) for ranks, name in cases]
    results = [one for one in simulate_many(jobs) if isinstance(one, Simulation)]
    return dict(zip(cases, results, strict=True))


def test_every_file_is_measured() -> None:
    assert {name for names in SOME.values() for name in names} >= {path.stem for path in FILES}


def layout_of(case: Case, folder: Path) -> tuple[ModelShape, Layout]:
    plan = plan_without_data(arguments(case[1], folder), world_size=case[0], device=cpu_device())
    return shape_of(plan.model), dataclasses.replace(plan.layout, name=case[1])


def place_in(layout: Layout, rank: int) -> dict[str, int]:
    """Pipeline stage and ZeRO rank of a rank: a stage's ranks follow one another."""
    return {"pipeline_stage": rank // layout.data_parallel_size, "zero_rank": rank % layout.data_parallel_size}


def assert_same_states(first: Footprint, second: Footprint, share: float) -> None:
    for role in STATES:
        for place in LOCATIONS:
            one, other = first.total(role, place), second.total(role, place)
            assert abs(one - other) <= share * other + SLACK_BYTES, (role, place, one, other)


@pytest.mark.parametrize("case", CASES)
def test_states_are_estimated_as_measured(case: Case, measured: dict[Case, Measurement], folder: Path) -> None:
    shape, layout = layout_of(case, folder)
    for rank, found in enumerate(measured[case].ranks):
        assert_same_states(states_of_rank(Rank(shape, layout, **place_in(layout, rank))), found.held, 0.02)
        assert found.held.states("device") + found.held.states("host") + found.held.states("pinned") > 100_000


@pytest.mark.parametrize("simulated_case", SIMULATED_CASES)
def test_a_simulated_rank_holds_what_a_real_one_holds(simulated_case: Case, measured: dict[Case, Measurement],
                                                      simulated: dict[Case, Simulation]) -> None:
    real, ours = measured[simulated_case].ranks[-1], simulated[simulated_case]
    assert_same_states(ours.held, real.held, 0.0)
    assert ours.held.total("buffers") == pytest.approx(real.held.total("buffers"), rel=0.02, abs=SLACK_BYTES)
    assert ours.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_is_alive_is_left_out(case: Case, measured: dict[Case, Measurement]) -> None:
    """But for the loss, and one tensor that torch holds where Python does not see it: one micro-batch's logits in the
    last stage of a pipeline, a matrix on its way to NVMe.
    """
    in_flight_bytes = 2 * 64 * 256 * 2 if "pipeline" in case[1] else 256 * 512 * 2 if "nvme" in case[1] else 0
    for rank in measured[case].ranks:
        assert rank.unaccounted_bytes <= SLACK_BYTES + in_flight_bytes
        assert rank.rss_bytes > rank.peak_bytes > 0


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_estimated(case: Case, measured: dict[Case, Measurement], folder: Path) -> None:
    shape, layout = layout_of(case, folder)
    for rank, found in enumerate(measured[case].ranks):
        estimated = estimate_rank(Rank(shape, layout, **place_in(layout, rank))).peak
        in_memory = estimated.total() - estimated.total(location="nvme")
        assert in_memory == pytest.approx(found.peak_bytes, rel=0.1), estimated.rows()


def test_large_worlds_are_simulated_as_they_are_estimated(folder: Path) -> None:
    names = ("zero1_bf16", "zero3_bf16")
    jobs = [(dataclasses.replace(arguments(name, folder), model_overrides="vocab_size=2048,n_layer=4,n_embd=256"),
             LARGE_WORLD - 1, LARGE_WORLD) for name in names]
    for (args, rank, ranks), found in zip(jobs, simulate_many(jobs), strict=True):
        assert isinstance(found, Simulation), found
        plan = plan_without_data(args, world_size=ranks, device=cpu_device())
        shape, layout = shape_of(plan.model), plan.layout
        assert_same_states(states_of_rank(Rank(shape, layout, zero_rank=rank)), found.held, 0.02)
        peak = estimate_rank(Rank(shape, layout, zero_rank=rank)).peak
        assert peak.total() - peak.total(location="nvme") == pytest.approx(found.peak_bytes, rel=0.1)


@pytest.mark.skipif(bool(NO_NVME), reason=f"NVMe offload: {NO_NVME}")
@pytest.mark.parametrize("case", [(2, "zero3_offload_all_nvme")])
def test_files_on_nvme_are_counted_as_such(case: Case, measured: dict[Case, Measurement]) -> None:
    rank = measured[case].ranks[0]
    assert rank.held.total("master_weights", "nvme") > 10 * rank.held.total("master_weights", "host")
    assert rank.held.total("optimizer_states", "nvme") == 2 * rank.held.total("master_weights", "nvme")


def test_the_command_measures_a_run_in_processes_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes the port that was chosen before the ranks do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free_port(), other.getsockname()[1]]
        monkeypatch.setattr(run_ranks_module, "free_port", ports.pop)
        found = measure(arguments("zero1_bf16", folder), 1, steps=2)
    assert not ports
    assert found.step_time_ms > 0
    assert found.worst.rss_bytes > found.worst.peak_bytes > found.worst.held.states() > 0


def test_what_cannot_run_is_refused_in_one_line(folder: Path) -> None:
    with pytest.raises(ConfigError, match="launch 2, 4 or 6 ranks"):
        measure(arguments("pipeline2_zero1_bf16", folder), 1)
    with pytest.raises(ConfigError, match="launch 2, 4 or 6 ranks"):
        simulate(arguments("pipeline2_zero1_bf16", folder), 0, 3)
    with pytest.raises(ConfigError, match="found rank 2 of 2"):
        simulate(arguments("zero1_bf16", folder), 2, 2)
