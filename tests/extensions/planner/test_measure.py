"""Estimated, simulated and measured memory agree for the files of ds_configs/ on 1, 2 and 4 ranks.

The measured engines are real engines on real ranks. Every file is measured on one number of ranks, and some files are
simulated. `pytest -m slow` measures and simulates the other combinations.
"""

import dataclasses
import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout import Layout
from pretrain.config.resolve import EXPERT, SEQUENCE, TENSOR
from pretrain.config.validate import check_settings
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.extensions.planner.measure import measure_run as measure_run_module
from pretrain.extensions.planner.measure.measure_run import RunMeasurement, measure_run
from pretrain.extensions.planner.measure.simulate_ranks import SimulatedRank, SimulationRequest, simulate_ranks
from pretrain.memory.estimate.estimate_memory import estimate_rank
from pretrain.memory.estimate.rank import Rank
from pretrain.memory.estimate.states import states_of_rank
from pretrain.memory.footprint import LOCATIONS, STATES, Footprint
from pretrain.model.description import ModelConfig
from tests.conftest import selected_params
from tests.extensions.planner import WORKERS
from tests.support.cases import NO_NVME
from tests.support.launch import ROOT, FailedCase, free_port, run_worker

NOT_MEASURED = {"pipeline2_zero1_bf16_time": "measured times of the layers decide which layers a rank holds"}
# measured by `pytest -m slow`: quick cases differ in one of pipeline stages, ZeRO stage, precision, loss scale, degrees
SLOW = {"pipeline4_zero0_bf16", "pipeline4_zero0_fp16", "pipeline4_zero1_fp16", "pipeline2_zero1_fp16",
        "zero1_fp16_static", "zero1_fp16", "pipeline2_zero1_bf16_fp32_accumulation",
        "zero1_bf16 --experts=2", "zero1_bf16 --tensor=2"}
FILES = [path for path in sorted((ROOT / "ds_configs").glob("*.json"))
         if path.stem not in NOT_MEASURED and not (NO_NVME and "nvme" in path.stem)]
MEASURED = {  # number of ranks -> names of the files
    1: ("zero0_bf16", "zero1_bf16_fp32_accumulation", "zero2_fp16", "zero3_fp16",
        "zero3_activation_checkpointing", "zero3_activation_offload", "zero3_offload_optimizer_cpu",
        "zero3_offload_optimizer_nvme"),
    2: ("experts2_zero2_bf16", "zero0_fp32", "zero1_bf16", "zero2_offload_optimizer_cpu",
        "zero3_offload_all_cpu", "zero3_offload_all_nvme", "pipeline2_activation_checkpointing",
        "pipeline2_offload_optimizer_cpu", "pipeline2_zero0_bf16", "pipeline2_zero0_fp16", "pipeline2_zero1_bf16",
        "sequence2_zero3_bf16", "tensor2_zero1_bf16", "tensor2_zero3_bf16"),
    4: ("tensor2_pipeline2_zero1_bf16", "zero2_bf16", "zero3_bf16",
        "pipeline4_zero1_bf16")}
SIMULATED = {1: ("zero1_bf16_fp32_accumulation",), 2: ("zero2_offload_optimizer_cpu", "zero3_offload_all_nvme"),
             4: ("pipeline4_zero1_bf16", "zero2_bf16", "zero3_bf16")}
# flags of train.py after the name of a file; micro-batches are larger, so that activations are most of the memory
RECOMPUTED = {1: ("zero1_bf16 --recompute=attention", "zero3_bf16 --recompute=mlp"),
              2: ("zero2_bf16 --recompute=attention", "zero3_bf16 --recompute=blocks --recompute_every=2",
                  "pipeline2_zero1_bf16 --recompute=mlp", "pipeline2_zero1_bf16 --recompute=blocks",
                  "sequence2_zero3_bf16 --mlp_tiles=4")}
# parallel degrees, and sizes of the reduction bucket, that are added to a file; with larger micro-batches too
DEGREES = {2: ("zero0_fp32 --tensor=2",
               "zero1_bf16 --sequence=2 --bucket=500000000 --n_embd=256 --micro_batch_size=2",
               *(f"zero{stage}_bf16 --sequence=2 --bucket=500000000 --seq_length=256 --micro_batch_size=4 "
                 "--gradient_accumulation_steps=1" for stage in (2, 3)),
               "zero1_bf16 --experts=2", "zero3_bf16 --experts=2", "zero1_bf16 --experts=2 --tensor=2"),
           4: ("zero1_bf16 --tensor=2", "zero3_bf16 --tensor=2", "zero3_bf16 --sequence=2", "zero2_bf16 --experts=2",
               "pipeline2_zero1_bf16 --experts=2")}
SMALL = "vocab_size=256,n_layer=4,n_embd=64"
LARGE = "vocab_size=256,n_layer=2,n_embd=512"  # NVMe offload swaps only partitions of 1 MiB and more
EXPERTS = "vocab_size=256,hidden_size=64,intermediate_size=96"  # 4 experts in each layer
SLACK_BYTES = 64  # tolerance for scalar tensors
MANY = [(1024, "zero1_bf16 --n_embd=256"), (1024, "zero3_bf16 --n_embd=256")]
DEGREE_KEYS: dict[str, Callable[[int], dict[str, Any]]] = {
    "bucket": lambda size: {"zero_optimization": {"reduce_bucket_size": size}},
    "tensor": lambda size: {"tensor_parallel": {"autotp_size": size}},
    "sequence": lambda size: {"sequence_parallel_size": size},
    "experts": lambda size: {"expert_parallel": {"enabled": True, "autoep_size": size}}}

_NUMBERS = ("recompute_every", "mlp_tiles", "seq_length", "micro_batch_size", "gradient_accumulation_steps")

Case = tuple[int, str]  # (ranks, name)


def ranks_of_replica(path: Path) -> int:
    """Return the number of ranks that the file needs at least."""
    file = read_ds_config(str(path))
    return math.prod(int(file.get(key, 1)) for key in ("pipeline.stages", TENSOR, SEQUENCE, EXPERT))


def params(quick: dict[int, tuple[str, ...]]) -> list[Any]:
    """Return every file with every possible number of ranks. Cases that are not in `quick` are marked as slow."""
    return [pytest.param((ranks, path.stem), id=f"{path.stem}-{ranks}",
                         marks=[] if path.stem in quick[ranks] else [pytest.mark.slow])
            for ranks in (1, 2, 4) for path in FILES if ranks % ranks_of_replica(path) == 0]


CASES, SIMULATED_CASES = params(MEASURED), params(SIMULATED)
CASES += [pytest.param((ranks, name), id=f"{name}-{ranks}", marks=[pytest.mark.slow] if name in SLOW else [])
          for runs in (RECOMPUTED, DEGREES) for ranks, names in runs.items() for name in names]


def arguments(name: str, folder: Path) -> RunArguments:
    name, *words = name.split()
    path = ROOT / "ds_configs" / f"{name}.json"
    given: dict[str, Any] = dict(word.removeprefix("--").split("=") for word in words)
    sizes: dict[str, Any] = {"micro_batch_size": 16 if given else 2, "gradient_accumulation_steps": 2, "seq_length": 64}
    width = given.pop("n_embd", None)
    for degree in sorted(given.keys() & DEGREE_KEYS.keys()):
        path = _with_degree(path, degree, int(given.pop(degree)), folder)
    given = sizes | given | {key: int(value) for key, value in given.items() if key in _NUMBERS}
    if name == "zero3_offload_all_nvme":  # this file has buffers of 1 GB, which take seconds to fill
        text = path.read_text().replace('"buffer_size": 1e8', '"buffer_size": 2e6')
        path = folder / path.name
        path.write_text(text)
    model, overrides = ("tiny-moe", EXPERTS) if "expert" in path.stem else ("tiny", LARGE if "nvme" in name else SMALL)
    overrides = overrides.replace("n_embd=64", f"n_embd={width}") if width else overrides
    return RunArguments(deepspeed_config=str(path), model=model, model_overrides=overrides, train_steps=10, **given,
                        emulate_fp16="fp16" in name,
                        nvme_path=str(folder) if "nvme" in name else None)


def _with_degree(path: Path, degree: str, size: int, folder: Path) -> Path:
    """Write a copy of a DeepSpeed JSON with one of DEGREE_KEYS; return its path."""
    copy, values = folder / f"{path.stem}_{degree}{size}.json", read_ds_config(str(path)).values
    for key, value in DEGREE_KEYS[degree](size).items():
        values[key] = {**values[key], **value} if key == "zero_optimization" else value
    copy.write_text(json.dumps(values))
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, folder: Path) -> dict[Case, RunMeasurement]:
    found = {}
    for ranks in (1, 2, 4):
        selected = {*selected_params(request, "case"), *selected_params(request, "simulated_case")}
        names = sorted(name for own_ranks, name in selected if own_ranks == ranks)
        cases = [{"name": name, "args": dataclasses.asdict(arguments(name, folder))} for name in names]
        results = run_worker(str(WORKERS / "memory_worker.py"), cases, ranks, folder / f"{ranks}-ranks")
        found.update({(ranks, name): RunMeasurement.of_results(name, result) for name, result in results.items()
                      if not isinstance(result, FailedCase)})
    return found


@pytest.fixture(scope="module")
def simulated(request: pytest.FixtureRequest, folder: Path) -> dict[Case, SimulatedRank | ConfigError]:
    """Simulate the last rank of each case. In a pipeline, this rank is in the last stage."""
    cases = [*selected_params(request, "simulated_case"), *MANY]
    requests = [SimulationRequest(arguments(name, folder), ranks - 1, ranks) for ranks, name in cases]
    return dict(zip(cases, simulate_ranks(requests), strict=True))


def test_every_file_is_measured() -> None:
    files, measured = {path.stem for path in FILES}, {name for names in MEASURED.values() for name in names}
    assert measured | SLOW >= files
    assert not measured & set(NOT_MEASURED)
    assert all((ROOT / "ds_configs" / f"{name}.json").exists() for name in NOT_MEASURED)


def layout_of(case: Case, folder: Path) -> tuple[ModelConfig, Layout]:
    plan = check_settings(arguments(case[1], folder), world_size=case[0], device=cpu_device())
    return plan.model, dataclasses.replace(plan.layout, name=case[1])


def position(layout: Layout, rank: int) -> dict[str, int]:
    """Return the pipeline stage and the ZeRO rank of a rank. The ranks of a pipeline stage have consecutive numbers."""
    stage, rest = divmod(rank, layout.zero_size * layout.tensor_parallel_size)
    return {"pipeline_stage": stage, "zero_rank": rest // layout.tensor_parallel_size}


def assert_same_states(footprint: Footprint, expected: Footprint, tolerance: float) -> None:
    for role in STATES:
        for location in LOCATIONS:
            actual, wanted = footprint.total(role, location), expected.total(role, location)
            assert abs(actual - wanted) <= tolerance * wanted + SLACK_BYTES, (role, location, actual, wanted)


@pytest.mark.parametrize("case", CASES)
def test_estimates_equal_measurements(case: Case, measured: dict[Case, RunMeasurement], folder: Path) -> None:
    """States, peak, and an inventory of every live tensor.

    The inventory misses only the loss and one tensor that only torch's C++ code references. This tensor is the logits
    of one micro-batch in the last pipeline stage, or a matrix that is being written to NVMe, or the hidden states of
    one layer in a model with experts, whose statistics it misses too.
    """
    model, layout = layout_of(case, folder)
    samples = 16 if "--" in case[1] else 2
    in_flight_bytes = samples * 64 * 256 * 2 if "pipeline" in case[1] else 256 * 512 * 2 if "nvme" in case[1] else \
        samples * 64 * 64 * 2 if "experts" in case[1] else 0
    in_flight_bytes += 256 if "experts" in case[1] else 0
    for number, result in enumerate(measured[case].ranks):
        rank = Rank(model, layout, **position(layout, number))
        assert_same_states(states_of_rank(rank), result.held, 0.02)
        assert result.held.states() - result.held.states("nvme") > 100_000
        peak = estimate_rank(rank).peak
        assert peak.total() - peak.total(location="nvme") == pytest.approx(result.peak_bytes, rel=0.1), peak.rows()
        assert result.unaccounted_bytes <= SLACK_BYTES + in_flight_bytes
        assert result.peak_bytes > 0


@pytest.mark.parametrize("simulated_case", SIMULATED_CASES)
def test_a_simulated_rank_holds_the_same_memory_as_a_real_one(
        simulated_case: Case, measured: dict[Case, RunMeasurement],
        simulated: dict[Case, SimulatedRank | ConfigError]) -> None:
    real, simulation = measured[simulated_case].ranks[-1], simulated[simulated_case]
    assert isinstance(simulation, SimulatedRank), simulation
    held = simulation.memory.held
    assert_same_states(held, real.held, 0.0)
    assert held.total("buffers") == pytest.approx(real.held.total("buffers"), rel=0.02, abs=SLACK_BYTES)
    assert simulation.memory.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


def test_the_simulation_of_many_ranks_equals_the_estimate(simulated: dict[Case, SimulatedRank | ConfigError],
                                                          folder: Path) -> None:
    for case in MANY:
        result, (model, layout) = simulated[case], layout_of(case, folder)
        assert isinstance(result, SimulatedRank), result
        rank = Rank(model, layout, zero_rank=case[0] - 1)
        assert_same_states(states_of_rank(rank), result.memory.held, 0.02)
        peak = estimate_rank(rank).peak
        assert peak.total() - peak.total(location="nvme") == pytest.approx(result.memory.peak_bytes, rel=0.1)


def test_a_run_is_measured_even_if_its_port_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program already listens on the first port that the measurement chooses."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free_port(), other.getsockname()[1]]
        monkeypatch.setattr(measure_run_module, "free_port", ports.pop)
        run = measure_run(arguments("zero1_bf16", folder), 1, steps=2)
    assert not ports
    assert run.step_time_ms > 0
    (rank,) = run.ranks
    assert rank.peak_bytes > rank.held.states() > 0


def test_impossible_runs_are_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Launch 2, 4 or 6 ranks"):
        measure_run(arguments("pipeline2_zero1_bf16", folder), 1)
    indivisible, no_rank = simulate_ranks([SimulationRequest(arguments("pipeline2_zero1_bf16", folder), 0, 3),
                                           SimulationRequest(arguments("zero1_bf16", folder), 2, 2)])
    assert "Launch 2, 4 or 6 ranks" in str(indivisible)
    assert "found rank 2 of 2" in str(no_rank)
    assert {type(indivisible), type(no_rank)} == {ConfigError}
