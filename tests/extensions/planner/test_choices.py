"""The short output of `ds-pretrain compare`: distinct choices, the verdict, and estimates equal to the plain ones."""

import math
import re
from dataclasses import replace
from functools import lru_cache

import pytest

from pretrain.config.layout import Layout
from pretrain.extensions.planner.choices import MOST_CHOICES, distinct_choices, techniques
from pretrain.extensions.planner.estimates import time_of
from pretrain.extensions.planner.flags import parse_flags
from pretrain.extensions.planner.main import main, make_report
from pretrain.extensions.planner.output import PlannerReport, limit_text, print_choices
from pretrain.extensions.planner.search import candidates_of, workload_of
from pretrain.extensions.planner.step_time import kernel_time
from pretrain.extensions.planner.step_time.kernel_time import KernelRates
from pretrain.extensions.planner.step_time.time_model import estimate_step_time, stage_time
from pretrain.extensions.planner.step_time.traffic import rank_parameters, step_traffic
from pretrain.memory.compare import compare as compare_module
from pretrain.memory.compare.compare import ComparisonRow, complexity
from pretrain.memory.estimate.estimate_memory import estimate_memory, estimate_rank, largest_zero_rank
from pretrain.memory.estimate.rank import Rank, distinct_stages, local_size, parameters_of, pipeline_stage_layers
from pretrain.model.config import load_model_config
from pretrain.model.description import ModelConfig
from pretrain.model.recomputed_flops import recomputed_fraction
from pretrain.model.tensor_core_sizes import size_notes

# model, GPUs, GPU, other flags: sizes and families; one GPU, one node, nodes that powers of two do not fill
QUESTIONS = [
    ("gpt2", 1, "a100", []), ("gpt2", 8, "v100", []), ("pythia-410m", 3, "t4", []), ("llama3-8b", 21, "h100", []),
    ("llama3-8b", 64, "a100-40", ["--seq_length", "8192"]), ("qwen3-8b", 15, "h200", []),
    ("olmoe-1b-7b", 64, "h100", []), ("gpt3-13b", 1024, "a100", []), ("gpt3-175b", 1024, "h100", []),
    ("gpt3-175b", 8, "h100", []), ("llama3-8b", 16, "h100", ["--seq_length", "32768"]),
    ("gpt2", 6, "a10g", ["--precision", "bf16", "fp32", "--grad_accum_dtype", "fp32"])]


@lru_cache(maxsize=4)
def report_of(model: str, gpus: int, gpu: str, *others: str) -> PlannerReport:
    words = ["--model", model, "--world_size", str(gpus), "--gpu", gpu, *others]
    if gpus % 8 and gpus > 8:
        words += ["--gpus_per_node", str(max(size for size in range(1, 9) if gpus % size == 0))]
    flags = parse_flags(words)
    workload = workload_of(flags)
    return make_report(flags, workload, candidates_of(flags, workload, "cuda"))


def assert_plain_estimate_is_equal(row: ComparisonRow, report: PlannerReport) -> None:
    """Estimate each pipeline stage and each layer by itself, and compare the results to the last digit."""
    layout, model, cluster = row.candidate.layout, report.workload.model, report.workload.cluster
    rates = report.time_parameters
    assert model is not None
    stages = range(layout.pipeline_stages)
    memory = max((estimate_rank(Rank(model, layout, stage, largest_zero_rank(model, layout, stage)))
                  for stage in stages), key=lambda estimate: estimate.device_bytes)
    assert row.estimate == memory
    sizes = [[(each.is_expert, local_size(each, layout)) for each in parameters_of(pipeline_stage_layers(
        model, layout, stage))] for stage in stages]
    parameters = rank_parameters(layout, model, 0)
    assert parameters.dense + parameters.experts == max(sum(size for _, size in own) for own in sizes)
    again = recomputed_fraction(model, layout.recomputation, layout.seq_length)
    slowest = max(stage_time(layout, cluster, model, stage, rates, again).slowest for stage in stages)
    assert slowest == max(stage_time(layout, cluster, model, stage, rates, again).slowest
                          for stage in distinct_stages(model, layout))
    kernels = KernelRates(cluster.gpu, layout.precision, layout.element_bytes, rates)
    layers = dict.fromkeys(model.layers())
    plain = {layer: kernel_time.layer_time.__wrapped__(layer, model, layout, kernels) for layer in layers}
    assert plain == dict(zip(layers, kernel_time.layer_times(list(layers), model, layout, cluster, rates),
                             strict=True))
    assert time_of(row) == estimate_step_time(layout, cluster, model, step_traffic(layout, parameters, model),
                                              parameters, rates)


@pytest.mark.parametrize(("model", "gpus", "gpu", "others"), QUESTIONS, ids=lambda value: str(value))
def test_choices_differ_fit_and_have_the_plain_estimates(model: str, gpus: int, gpu: str, others: list[str],
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(model, gpus, gpu, *others)
    best, rows = report.recommended, [choice.row for choice in report.choices]
    assert 1 <= len(rows) <= MOST_CHOICES
    for row in rows:
        assert_plain_estimate_is_equal(row, report)
    assert len({techniques(row) for row in rows}) == len(rows) or len(rows) == len(report.rows)
    if best is None:
        assert not any(row.recommendable for row in report.rows)
        similar = [row for row in report.rows if bool(row.candidate.rejection) == bool(rows[0].candidate.rejection)]
        assert rows[0].estimate.device_bytes == min(row.estimate.device_bytes for row in similar)
        assert all(choice.trade.startswith(("too large: ", "rejected by train.py: ")) for choice in report.choices)
    elif len(rows) < len(report.rows):
        assert rows[0] is best
        assert all(row.recommendable for row in rows)
        times = [row.step_seconds for row in rows[1:]]
        assert times == sorted(times)
        assert all(choice.trade != "no difference that is predicted" for choice in report.choices)
        others_than_best = [row for row in report.rows if row.recommendable and row is not best]
        assert not any(_is_better_in_all(row, shown) for row in others_than_best for shown in rows[1:]
                       if techniques(row) == techniques(shown))
    print_choices(report, "GiB")
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    assert len(lines) <= 60
    printed = [line.split()[1] for line in lines if re.match(r" ?\d+ \S*zero", line)]
    assert printed == [row.candidate.name for row in rows]


def _is_better_in_all(row: ComparisonRow, shown: ComparisonRow) -> bool:
    return row.step_seconds < 0.98 * shown.step_seconds \
        and row.estimate.device_bytes < shown.estimate.device_bytes \
        and complexity(row.candidate.layout) < complexity(shown.candidate.layout)


def test_every_estimate_of_a_table_is_the_plain_one() -> None:
    report = report_of("gpt3-1.3b", 32, "a100", "--pipeline_stages", "1", "4", "8", "--recompute", "none", "attention",
                       "--micro_batch_size", "1", "2")
    assert len(report.rows) > 20
    for row in report.rows:
        assert_plain_estimate_is_equal(row, report)


def test_stages_are_estimated_once_if_they_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 to 64 pipeline stages, at most four differ; `test_a_layout_needs_few_function_calls` counts calls."""
    estimated = list[Layout]()

    def count(model: ModelConfig, layout: Layout, *, num_parameters: float | None = None) -> object:
        estimated.append(layout)
        return estimate_memory(model, layout, num_parameters=num_parameters)

    monkeypatch.setattr(compare_module, "estimate_memory", count)
    report = report_of("gpt3-175b", 1024, "h100", "--pipeline_stages", "16", "64", "--micro_batch_size", "1")
    assert len(report.rows) > 20
    assert report.workload.model is not None
    ranks = sum(len(distinct_stages(report.workload.model, layout)) for layout in estimated)
    assert len(estimated) <= len(report.rows) + 1  # the last one for the verdict
    assert ranks <= 4 * len(estimated)
    assert not any(math.isnan(row.step_seconds) for row in report.rows)


def test_choices_name_what_they_trade_and_the_verdict_what_limits() -> None:
    report = report_of("gpt3-175b", 1024, "h100")
    about = dict(report.heading)
    assert about["use"].startswith("zero3_checkpoint, micro-batch 8 x 1 accumulation: 30.3 of 79.1 GiB, 22.6 s")
    assert "the shortest time is predicted for pipeline4_zero1_tp4: 22.5 s" in about["why"]
    assert about["limit"].startswith("compute: kernels take 78% of the step, network 22%; memory: without recomp")
    assert "vocab_size=50304" in about["note"]
    assert "pipeline4_zero1_tp4" not in {choice.row.candidate.name for choice in report.choices}  # 0.4% less time
    trades = {choice.row.candidate.name: choice.trade for choice in report_of("gpt3-175b", 1024, "a100").choices}
    assert trades["pipeline4_zero1_tp4"] == "4% less time, no recomputation for 42.3 GiB more, 4 pipeline stages, " \
        "4-way tensor parallelism; ZeRO-1 instead of ZeRO-3"
    assert "on the host" in trades["zero3_offload_all_cpu_checkpoint"]
    slow = report_of("gpt3-1.3b", 64, "h100", "--network_gbps", "0.5", "--zero_stage", "3", "--pipeline_stages", "1",
                     "--offload", "none")
    assert slow.recommended is not None
    assert limit_text(slow.recommended, slow.workload).startswith("network: ")
    small = report_of("tiny", 1, "h100", "--micro_batch_size", "1", "--seq_length", "64")
    assert small.recommended is not None
    assert limit_text(small.recommended, small.workload).startswith("launches by the host: ")


def test_ten_or_fewer_layouts_are_all_choices() -> None:
    report = report_of("llama3-8b", 8, "h100", "--zero_stage", "3", "--offload", "none", "--pipeline_stages", "1",
                       "--micro_batch_size", "2", "--seq_length", "4096", "--gradient_accumulation_steps", "1",
                       "--recompute", "none", "attention", "mlp", "offload")
    assert [choice.row for choice in report.choices] == report.rows
    assert len(report.rows) == 5
    assert distinct_choices(report.rows[:1], None, report.workload)[0].trade == ""


@pytest.mark.parametrize("words", [["--all"], ["--all_layouts"]])
def test_the_table_of_all_layouts_has_both_spellings(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "gpt2", "--world_size", "2", "--gpu", "t4", *words])
    text = capsys.readouterr().out
    assert "use    " in text
    assert "micro x acc." in text


@pytest.mark.parametrize(("model", "ranks", "found"), [
    ("llama3-8b", 1, []), ("gpt2", 1, ["vocabulary 50,257 is no multiple of 8: --model_overrides vocab_size=50304 "]),
    ("gpt2", 4, ["vocabulary 50,257 (12,565 on each of 4 tensor-parallel ranks) is no multiple of 8: --model_overrides "
                 "vocab_size=50432 "]),
    ("llama2-7b", 8, ["vocabulary 32,000 (4,000 on each of 8 tensor-parallel ranks) is no multiple of 64: "
                      "--model_overrides vocab_size=32256 ", "inner size 11,008 (1,376 on each of 8 tensor-parallel "
                      "ranks) is no multiple of 64: --model_overrides intermediate_size=11264, which makes it "]),
    ("gpt3-2.7b", 1, ["vocabulary 50,257 ", "heads of 80 elements are no multiple of 32: FlashAttention computes 96, "
                      "20% more. "])])
def test_notes_name_sizes_for_tensor_cores(model: str, ranks: int, found: list[str]) -> None:
    config = load_model_config(model)
    notes = size_notes(config, tensor_parallel_size=ranks, element_bytes=2)
    assert [note.startswith(start) for note, start in zip(notes, found, strict=True)] == [True] * len(found), notes
    for note in notes:
        for key, value in re.findall(r"--model_overrides (\w+)=(\d+)", note):
            field = next(name for name in ("vocab_size", "hidden_size", "intermediate_size") if config.key(name) == key)
            better = replace(config, **{field: int(value)})
            again = size_notes(better, tensor_parallel_size=ranks, element_bytes=2)
            assert len(again) == len(notes) - 1
            assert "is another" not in "".join(again)
