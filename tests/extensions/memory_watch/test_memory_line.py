"""The memory line of a run on CPUs: the measured memory is close to the predicted memory on the same line.

The engines are real. They run with jemalloc, which train.py uses if it is installed, and without jemalloc.
"""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config.flags.arguments import RunArguments
from pretrain.distributed.process import jemalloc_environment
from tests.support.launch import ROOT, free_port, rank_environment, run_ranks

WORKER = Path(__file__).parent / "memory_line_worker.py"
NO_JEMALLOC = not jemalloc_environment({})
MODELS = {"small": ("vocab_size=256,n_layer=4,n_embd=64", 64), "large": ("vocab_size=2048,n_layer=2,n_embd=256", 256)}
NAMES = {1: (("small", ("zero0_fp32",)),
             ("large", ("zero1_bf16_fp32_accumulation", "zero2_offload_optimizer_cpu", "zero3_bf16"))),
         2: (("small", ("pipeline2_zero1_bf16",)),
             ("large", ("zero2_bf16", "zero3_offload_all_cpu", "pipeline2_zero0_bf16", "sequence2_zero3_bf16")))}
CASES = [(ranks, f"{name}-{size}") for ranks, sizes in NAMES.items() for size, names in sizes for name in names]
WITHOUT_JEMALLOC = [case for case in CASES if case[0] == 2 and "zero3_offload" not in case[1]]
SIZE = r"([\d.,]+) ([KMG]iB)"
PEAK = re.compile(rf"memory: predicted {SIZE} at the peak \(parameters .*\); measured {SIZE}(?: to {SIZE})? of tensors"
                  rf"(?: \(threads of collectives freed some, at times that are not known\))?; "
                  rf"the process has {SIZE} resident, .*")
STEADY = re.compile(rf"memory: predicted {SIZE} at the peak \(parameters .*\); measured {SIZE} of tensors between "
                    rf"backward pass and optimizer step \(predicted {SIZE} at that point\); the process has .*")
FREED_ELSEWHERE, FREED_BYTES = "zero0_fp32-small", 2**26  # a case that is repeated with memory that a thread frees
Case = tuple[int, str]  # (ranks, name)


def write_cases(folder: Path, ranks: int) -> None:
    cases = []
    for own_ranks, case in CASES:
        name, size = case.rsplit("-", 1)
        overrides, seq_length = MODELS[size]
        args = RunArguments(deepspeed_config=str(ROOT / f"ds_configs/{name}.json"), model="tiny", train_steps=10,
                            model_overrides=overrides, seq_length=seq_length, micro_batch_size=2,
                            gradient_accumulation_steps=2)
        cases += [{"name": case, "args": dataclasses.asdict(args)}] if own_ranks == ranks else []
        if (own_ranks, case) == (ranks, FREED_ELSEWHERE):
            cases.append({**cases[-1], "name": "freed elsewhere", "bytes_freed_elsewhere": FREED_BYTES})
    (folder / "cases.json").write_text(json.dumps(cases))


def results(folder: Path, ranks: int) -> dict[Case, str]:
    return {(ranks, name): line for name, line in json.loads((folder / "results.json").read_text()).items()}


@pytest.fixture(scope="module")
def with_jemalloc(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, str]:
    """Return the lines of ranks that run with jemalloc. train.py restarts itself in the same environment."""
    found: dict[Case, str] = {}
    for ranks in NAMES:
        folder, port = tmp_path_factory.mktemp("line"), free_port()
        write_cases(folder, ranks)
        environs = [rank_environment(rank, ranks, port) for rank in range(ranks)]
        processes = [subprocess.Popen([sys.executable, str(WORKER), "cases.json", "results.json"], cwd=folder,
                                      env={**environ, **jemalloc_environment({})}, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True) for environ in environs]
        for process in processes:
            output, _ = process.communicate(timeout=900)
            assert process.returncode == 0, output[-4000:]
        found.update(results(folder, ranks))
    return found


@pytest.fixture(scope="module")
def without_jemalloc(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, str]:
    folder = tmp_path_factory.mktemp("line")
    write_cases(folder, 2)
    done = run_ranks([str(WORKER), "cases.json", "results.json"], 2, cwd=folder)
    assert all(process.returncode == 0 for process in done), done[0].stdout[-4000:]
    return results(folder, 2)


def sizes(pattern: re.Pattern[str], line: str) -> list[float]:
    """Return the sizes in the line, in bytes."""
    match = pattern.fullmatch(line)
    assert match, line
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    values = match.groups()
    return [float(number.replace(",", "")) * units[unit]
            for number, unit in zip(values[::2], values[1::2], strict=True) if number]


@pytest.mark.skipif(NO_JEMALLOC, reason="no jemalloc on this machine")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-{case[0]}")
def test_the_measured_peak_is_close_to_the_prediction(case: Case, with_jemalloc: dict[Case, str]) -> None:
    """Of a range, the lower end is compared: collectives' threads rarely free a tensor after the peak."""
    predicted, measured, *_, resident = sizes(PEAK, with_jemalloc[case])
    assert predicted == pytest.approx(measured, rel=0.15)
    assert measured < resident


@pytest.mark.skipif(NO_JEMALLOC, reason="no jemalloc on this machine")
def test_memory_that_another_thread_frees_is_shown_as_a_range(with_jemalloc: dict[Case, str]) -> None:
    """The counters of a thread do not see what other threads free, such as a collective's tensors."""
    predicted, lowest, highest, _ = sizes(PEAK, with_jemalloc[1, "freed elsewhere"])
    assert predicted == pytest.approx(lowest, rel=0.15)
    assert highest - lowest == pytest.approx(FREED_BYTES, rel=0.05)


@pytest.mark.parametrize("case", WITHOUT_JEMALLOC, ids=lambda case: f"{case[1]}-{case[0]}")
def test_without_jemalloc_the_steady_memory_is_close_to_the_prediction(
        case: Case, without_jemalloc: dict[Case, str]) -> None:
    peak, measured, predicted = sizes(STEADY, without_jemalloc[case])
    assert predicted == pytest.approx(measured, rel=0.15)
    assert predicted < peak
