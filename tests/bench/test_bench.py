"""tools/bench.py in real processes with a model of a few thousand parameters. The tests check what is compared, but no
speeds.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.cli import Parser
from pretrain.config.flags.arguments import FLAGS
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.device import cpu_device
from tests.support.rejection import rejection
from tools.benchmarks.data import DataBench, least_seconds, loading, preparing
from tools.benchmarks.processes import BenchContext, InterleavedResults, run_interleaved
from tools.benchmarks.profile import PROJECT
from tools.benchmarks.report import BenchSection, csv_file, csv_text
from tools.benchmarks.sections import BARE, LOOP, PEERS, PRODUCTS, compare
from tools.benchmarks.settings import PRESETS, SECTIONS, BenchSettings, add_flags, validate_flags
from tools.benchmarks.store import delayed_server
from tools.benchmarks.store import measure as measure_store

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "pretrain/pages/measurements.md"
SMALL = ["--preset", "cpu-small", "--device", "cpu", "--rounds", "2"]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, str(ROOT / "tools" / "bench.py"), *words], capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": path})


@pytest.fixture
def context(tmp_path: Path) -> BenchContext:
    return BenchContext(BenchSettings(sections=("step",), preset_name="cpu-small", preset=PRESETS["cpu-small"],
                                      device=cpu_device(), precision="bf16", repetitions=2, timeout_s=900), tmp_path)


@pytest.mark.parametrize(("preset", "flags"), [
    ("cpu-small", []), pytest.param("cpu-small-llama", ["--recompute", "attention"], marks=pytest.mark.slow)])
def test_baselines_do_the_same_work(preset: str, flags: list[str]) -> None:
    """The flags of train.py belong to this project only; the step and its profile are measured by one command."""
    done = bench(*SMALL, "--preset", preset, "--what", "step,profile", "--json", *flags)
    report = json.loads(done.stdout)
    step, expected = report["sections"]["step"], {PROJECT, *PEERS}
    if find_spec("accelerate") is None:
        expected.remove("transformers.Trainer")
        assert report["failures"] == [line for line in report["failures"] if ".[bench]" in line], done.stderr
    else:
        assert (report["failures"], done.returncode) == ([], 0), done.stderr
    assert set(step["contenders"]) == expected
    assert step["same_work"]
    ours = step["contenders"][PROJECT]
    for name, values in step["contenders"].items():
        first, second = values["losses"][:2]
        assert first == pytest.approx(ours["losses"][0], rel=1e-3), name
        assert second == pytest.approx(ours["losses"][1], rel=2e-3), name  # after one update with the same optimizer
        assert preset != "cpu-small" or second < first  # the other model learns less in a step than batches differ
        assert len(values["losses"]) == 2 + 2 * 2  # warm-up, repetitions x steps
        assert values["parameters"] == ours["parameters"]
        assert len(values["rounds"]) == 2
        assert 0 < values["peak_memory_bytes"] < values["resident_bytes"]
    profile = report["sections"]["profile"]
    times = [row["time_ms_per_step"] for row in profile["operators"]]
    assert times == sorted(times, reverse=True)
    kinds = {kind["kind"]: kind for kind in profile["kinds"][PROJECT]}
    assert sum(kind["time_ms_per_step"] for kind in kinds.values()) == pytest.approx(profile["step_time_ms"][PROJECT])
    assert {"matrix products", "norms", "loss", "optimizer", "Python and host"} <= set(kinds)
    # a recomputed product counts twice; torch's fused attention includes its own
    flops = report["sections"]["step"]["flops_per_token"] * 4 * 64
    assert 0.7 * flops < kinds["matrix products"]["flops_per_step"] < 1.3 * flops


def test_figures_of_a_training_step(context: BenchContext) -> None:
    """One repetition has 2 steps of 4 samples of 64 tokens: 512 tokens."""
    answers = {PRODUCTS: [{"seconds": 1.0, "losses": [], "tflops": tflops} for tflops in (0.2, 0.5, 0.4)]}
    for name, seconds, memory in ((PROJECT, (2.0, 8.0, 1.0), 300), ("plain PyTorch", (4.0, 4.0, 16.0), 600)):
        answers[name] = [{"seconds": value, "losses": [6.0], "peak_memory_bytes": memory - value} for value in seconds]
    parameters = dict.fromkeys(answers, 7)
    results = InterleavedResults(parameters=parameters, warmups={name: {"losses": [6.25]} for name in answers},
                                 answers=answers)
    section = compare("step", "Training step", PROJECT, context, results)
    ours, theirs = (section.data["contenders"][name] for name in (PROJECT, "plain PyTorch"))
    assert ours["rounds"] == [256.0, 64.0, 512.0]
    assert (ours["tokens_per_second"], theirs["tokens_per_second"]) == (256.0, 128.0)  # medians
    # the machine was slow in the second repetition of one, and in the third one of the other
    assert theirs["speed_ratios"] == [2.0, 0.5, 16.0]
    assert (ours["speed_ratio"], theirs["speed_ratio"]) == (1.0, 2.0)
    assert (ours["peak_memory_bytes"], theirs["peak_memory_bytes"]) == (299.0, 596.0)  # the highest
    assert theirs["memory_ratio"] == pytest.approx(299 / 596)
    assert ours["losses"] == [6.25, 6.0, 6.0, 6.0]
    # 6 FLOPs for each weight of 2 layers (12 x 64^2 each, without norms and biases) and of the head (512 x 64);
    # 12 x layers x width x positions for the attention scores
    flops = 6 * (2 * 12 * 64**2 + 512 * 64) + 12 * 2 * 64 * 64
    assert ours["mfu"] == pytest.approx(256 * flops / 0.5e12, rel=0.03)
    assert section.failures == []


@pytest.mark.parametrize(("first_loss", "parameters", "problem"), [
    (6.0, 8, "it has 8 parameters, this project 7"), (6.1, 7, "its first loss is 6.1"),
    (float("nan"), 7, "its first loss is nan")])
def test_a_baseline_with_other_parameters_or_losses_is_a_failure(context: BenchContext, first_loss: float,
                                                                 parameters: int, problem: str) -> None:
    answers = {name: [{"seconds": 1.0, "losses": [], "peak_memory_bytes": 1}] for name in (PROJECT, "plain PyTorch")}
    results = InterleavedResults(
        parameters={PROJECT: 7, "plain PyTorch": parameters},
        warmups={PROJECT: {"losses": [6.0]}, "plain PyTorch": {"losses": [first_loss]}}, answers=answers)
    section = compare("step", "Training step", PROJECT, context, results)
    (line,) = section.failures
    assert line.startswith(f"plain PyTorch: does not do the same work as this project: {problem}")
    assert not section.data["same_work"]


def test_a_baseline_that_fails_is_reported_and_the_others_continue(context: BenchContext) -> None:
    jobs = [context.job(name, "worker.products", product_size=size, precision="bf16")
            for name, size in (("fails", -1), ("works", 64))]
    results = run_interleaved(jobs, context, lambda text: None)
    (line,) = results.failures
    assert line.startswith("fails: RuntimeError")
    assert len(results.answers["works"]) == 2
    assert "fails" not in results.answers


@pytest.mark.parametrize(("words", "message"), [
    (["--what", "steps"], 'Did you mean "step"?'),
    (["--preset", "cpu-smal"], 'Did you mean "cpu-small"?'),
    (["--rounds", "0"], "--rounds: found '0'"),
    (["--lr_warmup_stepz", "3"], "lr_warmup_steps"),
    (["--device", "cuda"], "no GPU"),
])
def test_bad_input_is_rejected_with_one_line(words: list[str], message: str) -> None:
    parser = Parser()
    add_flags(parser)
    assert message in rejection(lambda: validate_flags(*parser.parse_known_args([*SMALL, *words]), gpus=0))


def test_tables_are_written_as_csv(tmp_path: Path) -> None:
    done = bench(*SMALL, "--write", "/nowhere")  # rejected before anything is measured
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "")
    assert "--write" in done.stderr
    head = {"preset": "cpu", "shape": "1 M parameters", "date": "2026-11-29", "device": "a CPU", "command": "bench",
            "load_before": 99.0, "versions": dict.fromkeys(("torch", "deepspeed", "transformers"), "1")}
    section = BenchSection("step", "Training step", ["", "tokens/s"], [["this project", "5,045"]], ["median of 5"])
    assert csv_file(tmp_path, head, section) == tmp_path / "cpu_step.csv"
    *comments, columns, row = csv_text(head, section).splitlines()
    assert [comment[:15] for comment in comments] == ["# Training step", "# Warning: the ", "# median of 5"]
    assert (columns, row) == ("row,tokens/s", 'this project,"5,045"')


def test_the_page_has_the_files_of_its_commands() -> None:
    commands = [line.split() for line in PAGE.read_text().splitlines()
                if line.startswith("python tools/bench.py ") and "--write" in line]
    assert len(commands) == 3
    for words in commands:
        parser = Parser()
        add_flags(parser)
        parser.add_argument("--write")
        flags = parser.parse_args(words[2:])
        assert set(flags.what.split(",")) <= set(SECTIONS)
        for section in flags.what.split(","):
            assert (ROOT / flags.write / f"{flags.preset or 'cpu'}_{section}.csv").is_file()


@pytest.mark.slow
def test_all_other_sections_run(context: BenchContext) -> None:
    done = bench(*SMALL, "--what", "overhead,checkpoint,startup,data", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["sections"]
    contenders = found["overhead"]["contenders"]
    assert {row: len(values["rounds"]) for row, values in contenders.items()} == {LOOP: 2, BARE: 2}
    assert contenders[LOOP]["speed_ratio"] == 1
    # 16-bit weights (2 bytes); master weights and two optimizer states in 32 bits (12 bytes)
    parameters = context.model.num_parameters()
    assert 14 * parameters < found["checkpoint"]["checkpoint_bytes"] < 17 * parameters + 10**5
    starts = found["startup"]
    assert {name: len(times) for name, times in starts["seconds"].items()} == dict.fromkeys([
        "python pretrain/train.py", "the same, resumed", "ds-pretrain", "deepspeed pretrain/train.py",
        "rejected, exit code 2"], 2)
    assert all(list(phases)[1:] == ["imports", "process group", "engine, data", "first step"]
               for name, phases in starts["phases"].items() if "rejected" not in name)
    assert list(starts["phases"]["rejected, exit code 2"]) == ["rejection"]
    assert all(figure["ratio"] > 0 for figure in found["data"]["figures"].values())


def test_functions_are_called_in_turn_and_the_least_time_counts() -> None:
    times = iter([0.0, 3.0, 3.0, 9.0, 9.0, 10.0, 10.0, 15.0, 15.0, 17.0, 17.0, 24.0])  # before and after each call
    calls: list[str] = []
    seconds = least_seconds([lambda: calls.append("ours"), lambda: calls.append("baseline")], 3, lambda: next(times))
    assert calls == ["ours", "baseline"] * 3
    assert seconds == [1.0, 5.0]


def test_measurements_with_little_data(tmp_path: Path) -> None:
    bench = DataBench(tmp_path, repetitions=1, scale=0.02)
    figures = [*preparing(bench).values(), *loading(bench).values()]
    assert [figure.unit for figure in figures] == ["MB/s", "MB/s", "MB/s", "samples/s", "ms"]
    assert all(figure.ours > 0 and figure.baseline > 0 for figure in figures)


def test_waiting_for_a_store_that_answers_late(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(300_000) % 50_000)
        writer.finalize()
    with delayed_server(tmp_path) as url:
        figure = measure_store(url, tmp_path / "cache", 2**24, step_s=0.05, seconds=0.5)
    assert figure.requests_per_second >= 0
    assert 0 < figure.wait < 1
    assert figure.tokens_per_second > 0


def test_the_page_names_files_and_flags_that_exist() -> None:
    text = PAGE.read_text()
    paths = re.findall(r"`((?:pretrain|launch|tools)/[\w/.]+)", text)
    assert len(paths) >= 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    flags = set(re.findall(r"--(\w+)", text))
    assert "async_save" in flags
    parser = Parser()
    add_flags(parser)
    known = {*FLAGS, *vars(parser.parse_args([])), "explain", "write"}
    assert flags - known == set()
