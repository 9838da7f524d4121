"""`ds-pretrain compare`: output, files, rejected flags, and a real run of the recommended JSON."""

import csv
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pretrain.extensions.planner.flags import parse_flags
from pretrain.extensions.planner.main import main, make_report
from pretrain.extensions.planner.output import PlannerReport, print_choices, time_cells
from pretrain.extensions.planner.plot import html
from pretrain.extensions.planner.search import candidates_of, workload_of
from pretrain.memory.compare.compare_zero import print_report
from pretrain.memory.footprint import GIB, in_unit
from tests.support.effort import HEAVY, CountCalls, run_and_list_imports
from tests.support.launch import ROOT, train_ranks
from tests.support.pages import block_commands, blocks
from tests.support.rejection import rejection
from tests.test_train import _environment

TINY = ["--model", "tiny", "--model_overrides", "vocab_size=256,n_layer=2,n_embd=64"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def test_the_sizes_of_the_zero_paper_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO (arXiv 1910.02054), figure 1: 7.5e9 parameters on 64 GPUs."""
    text = run(capsys, "--num_parameters", "7.5e9", "--world_size", "64")
    assert "120 / 31.4 / 16.6 / 1.9 GB" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("zero")]
    sizes = {row[0]: row[9] for row in rows}
    assert [sizes[f"zero{stage}"] for stage in range(4)] == ["120.0", "31.4", "16.6", "1.9"]


def test_a_layout_needs_few_function_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with CountCalls() as work:
        rows = as_json(capsys, "--model", "gpt3-175b", "--world_size", "1024", "--pipeline_stages", "1", "16",
                       "--micro_batch_size", "1")["rows"]
    assert len(rows) >= 20
    assert work.calls < 20_000 * len(rows)  # measured: 10,700 calls per row, 0.5 s for a hundred rows


def test_the_table_does_not_import_torch() -> None:
    done, imported = run_and_list_imports(["tools/compare_zero.py", "--model", "gpt2", "--world_size", "8"])
    assert done.returncode == 0, done.stderr
    assert "pretrain.memory.estimate.estimate_memory" in imported
    assert not {*HEAVY, "transformers", "numpy"} & imported


def test_table_json_csv_and_plot_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--model", "gpt3-13b", "--world_size", "64", "--gpu", "a100-40"]
    files = [str(tmp_path / name) for name in ("all.json", "all.csv", "plot.html")]
    text = run(capsys, *arguments, "--all_layouts", "--json", files[0], "--csv", files[1], "--plot", files[2])
    found = json.loads(Path(files[0]).read_text())
    rows, cluster = found["rows"], found["cluster"]
    assert len(rows) > 30
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("zero", "pipeline"))}
    assert list(lines) == [row["name"] for row in rows]
    flat = {row["name"]: row for row in csv.DictReader(io.StringIO(Path(files[1]).read_text()))}
    page = Path(files[2]).read_text()
    assert page.count("<svg") == 1
    assert "http" not in page
    for row in rows:
        fits = row["device_bytes"] <= cluster["device_budget_bytes"] and \
            row["host_bytes"] * 8 <= cluster["host_budget_bytes"] and row["nvme_bytes"] * 8 <= cluster["nvme_bytes"]
        assert row["fits"] == fits
        assert ("too large" in lines[row["name"]]) == (not fits)
        assert f"{row['device_bytes'] / GIB:,.1f}" in lines[row["name"]]
        assert flat[row["name"]]["fits"] == str(fits)
        assert int(flat[row["name"]]["device_bytes"]) == row["device_bytes"]
        assert f"{row['name']}  " in page
    assert not all(row["fits"] for row in rows)
    possible = [row for row in rows if row["fits"] and row["runs_here"]]
    best, fastest = possible[0], min(row["step_time"]["total_seconds"] for row in possible)
    assert found["recommended"] == best["name"]
    assert best["step_time"]["total_seconds"] <= 1.15 * fastest
    times = [row["step_time"]["total_seconds"] for row in possible[1:]]
    assert times == sorted(times)
    assert f"use    {best['name']}, " in text
    assert found["choices"][0] == {"name": best["name"], "trade": "recommended"}
    assert {line["about"] for line in found["verdict"]} >= {"use", "why", "limit", "cost"}
    assert f"{found['cost']['gpu_hours']:,.0f} GPU-hours" in text
    assert page.count('opacity="0.3"') == sum(not row["fits"] for row in rows)


@pytest.fixture(scope="module")
def report() -> PlannerReport:
    """Compare all layouts of the first command on the page."""
    flags = parse_flags(["--model", "gpt3-13b", "--world_size", "64", "--gpu", "a100-40"])
    workload = workload_of(flags)
    return make_report(flags, workload, candidates_of(flags, workload, "cuda"))


def test_the_best_layouts_fit_one_screen(capsys: pytest.CaptureFixture[str], report: PlannerReport) -> None:
    print_choices(report, "GiB", Console(force_terminal=True, width=70, color_system=None, legacy_windows=False))
    lines, names = capsys.readouterr().out.splitlines(), [choice.row.candidate.name for choice in report.choices]
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 70 + 10  # a name and its sizes are not broken
    assert any(line.startswith(f"use    {names[0]}, ") for line in lines)
    assert [line.split()[1] for line in lines if re.match(r" ?\d+ \w*zero", line)] == names
    assert f"{len(names)} distinct choices of {len(report.rows)} layouts" in " ".join(lines)


def test_the_table_on_a_page_is_that_of_its_first_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of the example, with its numbers, is printed. `...` stands for any text."""
    page = ROOT / "pretrain/extensions/planner/README.md"
    shown = next(content for language, content in blocks(page) if language == "text").splitlines()
    output = run(capsys, *shlex.split(block_commands(page)[0])[2:])
    printed = [" ".join(line.split()) for line in output.splitlines()]
    for line in shown:
        pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        assert any(re.fullmatch(pattern, each) for each in printed), line


@pytest.mark.parametrize("columns", [80, 200, 240])
def test_a_narrow_terminal_omits_columns(capsys: pytest.CaptureFixture[str], report: PlannerReport,
                                         columns: int) -> None:
    print_report(report, "GiB", Console(force_terminal=True, width=columns, color_system=None, legacy_windows=False),
                 columns=lambda row: time_cells(row, report.workload, "GiB"))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert "…" not in "".join(lines)
    titles = next(line for line in lines if line.startswith("layout")).split()
    assert {"layout", "GiB", "step", "verdict"} <= set(titles)
    assert ("DeepSpeed" in titles) == (columns >= 200)
    assert ("GiB of 37.4 GiB" in "".join(lines)) == (columns > 200)
    rows = {line.split()[0]: line for line in lines[1:] if line.startswith(("zero", "pipeline"))}
    for row in report.rows:
        line = rows[row.candidate.name]
        assert in_unit(row.estimate.peak.total(location="device"), "GiB") in line.split()
        assert ("fits" in line) == row.fits
        assert ("too large" in line) == (not row.fits)
    omitted = any(line.startswith(f"not shown at {columns} columns: ") for line in lines)
    assert omitted == (columns <= 200)


def test_labels_of_the_plot_are_not_cut_off(report: PlannerReport) -> None:
    page = html(report)
    labels = re.findall(r'<text x="(\d+)" y="\d+" text-anchor="end">([^<]+)</text>', page)
    assert max(len(label) for _, label in labels) > 50
    assert all(int(x) >= 7.25 * len(label) for x, label in labels)  # 12 px monospaced: 7.22 px a character
    (width,) = re.findall(r'<svg width="(\d+)"', page)
    starts = re.findall(r'<text x="([\d.]+)" y="\d+"(?: text-anchor="start")?>([^<]+)</text>', page)
    assert all(float(x) + 7.25 * len(text) <= int(width) for x, text in starts)


def test_every_json_of_ds_configs_is_accepted_on_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(map(str, (ROOT / "ds_configs").glob("*.json")))
    for model, suited in (("gpt2", [path for path in paths if "experts" not in path]),
                          ("olmoe-1b-7b", [path for path in paths if "experts" in path])):
        found = as_json(capsys, "--model", model, "--world_size", "4", "--gpu", "h100", "--configs", *suited)
        assert len(found["rows"]) == len(suited) > 0
        assert {row["name"]: row["refusal"] for row in found["rows"] if row["refusal"]} == {}


def test_a_json_for_transformers_is_estimated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The JSON has "auto" values and no optimizer. A copy with a key that DeepSpeed does not have is impossible."""
    path = tmp_path / "transformers.json"
    path.write_text("""{ // a comment
      "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
      "bf16": {"enabled": "auto"}, "steps_per_print": 2000,
      "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto", "sub_group_size": 1e9}}""")
    unknown = tmp_path / "unknown.json"
    unknown.write_text('{"zero_optimisation": {"stage": 3}}')
    found = as_json(capsys, "--model", "llama3-8b", "--world_size", "16", "--configs", str(path), str(unknown),
                    "--micro_batch_size", "2", "--seq_length", "4096")
    (row,) = found["rows"]
    layout = row["layout"]
    assert (layout["zero_stage"], layout["offload_optimizer"], layout["micro_batch_size"]) == (3, "cpu", 2)
    assert layout["reduce_bucket_size"] == 4096**2
    assert row["host_bytes"] > 8e9 * 12 / 16
    assert row["refusal"] == ""
    (reason,) = found["impossible"]
    assert "unknown.json:1: zero_optimisation" in reason


@pytest.mark.parametrize(("kind", "warmup"), [("WarmupDecayLR", "auto"), ("WarmupCosineLR", 2000)])
def test_a_scheduler_of_unknown_length_is_no_reason_to_reject_a_json(
        capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, warmup: object) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "scheduler": {
        "type": kind, "params": {"warmup_num_steps": warmup, "total_num_steps": "auto"}}}))
    found = as_json(capsys, "--model", "tiny", "--world_size", "2", "--configs", str(path))
    assert [row["refusal"] for row in found["rows"]] == [""]


def test_units_of_the_network_and_the_origin_of_activations_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--world_size", "16", "--network_gbps", "100"]
    assert "100 GB/s for each GPU, which is 800 Gbit/s; a network of 100 Gbit/s is --network_gbps 12.5" in \
        run(capsys, *words).replace("\n", " ")
    text = run(capsys, *words[:4], "--configs", str(ROOT / "ds_configs/zero1_bf16.json")).replace("\n", " ")
    assert "activations are those of this program's models" in text
    assert "Gbit/s" not in text


PIPELINE = str(ROOT / "ds_configs/pipeline2_zero1_bf16.json")
REJECTED = [
    ([], "--model / --num_parameters"), (["--model", "gpt2", "--num_parameters", "1e9"], "both"),
    (["--model", "gpt2"], "--world_size"), (["--model", "gtp2", "--world_size", "8"], 'Did you mean "gpt2"'),
    (["--model", "gpt2", "--world_size", "8", "--gpu", "h1000"], "b200, h200, h100, h100-pcie"),
    (["--model", "gpt2", "--world_size", "8", "--gpu", "4070"], "a number of GiB up to 512"),
    (["--model", "gpt2", "--world_size", "12", "--gpus_per_node", "8"], "--gpus_per_node"),
    (["--model", "gpt2", "--world_size", "0"], "whole number from 1"),
    (["--model", "gpt2", "--world_size", "8", "--zero_stage", "4"], "--zero_stage"),
    (["--model", "gpt2", "--world_size", "8", "--pipeline_stages", "3"], "do not divide 8"),
    (["--model", "gpt2", "--world_size", "7", "--pipeline_stages", "2"], "2 ranks that share a sample do not divide 7"),
    (["--model", "gpt2", "--world_size", "21"], "21 GPUs cannot fill 3 nodes of 8 GPUs"),
    (["--model", "gpt2", "--world_size", "1", "--gpus_per_node", "2"], "1 GPU cannot fill 1 node of 2 GPUs"),
    (["--model", "gpt2", "--world_size", "16", "--pipeline_stages", "16"], "more pipeline stages than 12 layers"),
    (["--model", "gpt2", "--world_size", "8", "--zero_stage", "3", "--pipeline_stages", "2"], "ZeRO stage 0 or 1"),
    (["--model", "gpt2", "--world_size", "8", "--zero_stage", "2", "--offload", "all_nvme"], "ZeRO stage 3"),
    (["--model", "gpt2", "--world_size", "8", "--tensor_parallel", "8"], "12 heads"),
    (["--model", "gpt2", "--world_size", "8", "--expert_parallel", "2"], "no experts"),
    (["--model", "gpt2", "--world_size", "8", "--seq_length", "4096"], "1024 positions"),
    (["--model", "gpt2", "--world_size", "8", "--global_batch_size", "9", "--pipeline_stages", "2"], "does not divide"),
    (["--model", "gpt2", "--world_size", "8", "--gpu", "v100", "--precision", "bf16"], "no bf16"),
    (["--model", "gpt2", "--world_size", "8", "--configs", "missing.json"], "--configs: missing.json cannot be read"),
    (["measure", "--model", "gpt2", "--world_size", "1", "--configs", "missing.json"], "missing.json cannot be read"),
    (["--model", "gpt2", "--world_size", "8", "--configs", str(ROOT / "README.md")], "README.md"),
    (["--model", "gpt2", "--world_size", "3", "--configs", PIPELINE], "3 ranks"),
    (["--model", "gpt2", "--world_size", "8", "--plot", "x.pdf"], "end with .html"),
    (["--model", "gpt2", "--world_size", "8", "--plot", "/nowhere/x.html"], "/nowhere"),
    (["--model", "gpt2", "--world_size", "8", "--write", "/nowhere/x.json"], "/nowhere"),
    (["--model", "gpt2", "--world_size", "8", "--gpu", "0.01", "--write", "x.json"], "no layout that fits"),
    (["--num_parameters", "7e9", "--world_size", "8", "--find", "max_seq"], "max_model"),
    (["--num_parameters", "7e9", "--world_size", "8", "--micro_batch_size", "2"], "--micro_batch_size"),
    (["measure", "--model", "gpt2", "--world_size", "1"], "--configs"),
    (["--model", "gpt2", "--world_size", "8", "--zero-stages", "1"], "Did you mean"),
    (["--model", "gpt2", "--world_size", "8", "--margin", "1"], "--margin"),
]


@pytest.mark.parametrize(("arguments", "message"), REJECTED,
                         ids=lambda value: " ".join(value)[-40:] if value else "nothing")
def test_wrong_flags_are_rejected_in_one_line(arguments: list[str], message: str) -> None:
    assert message in rejection(main, arguments)


def test_wrong_flags_exit_with_code_2() -> None:
    done = subprocess.run([sys.executable, "tools/compare_zero.py", "--model", "gpt2"], cwd=ROOT, capture_output=True,
                          text=True, check=False, env={**_environment(), "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ds-pretrain: error: --world_size: found nothing")


def test_the_recommended_json_runs(corpus: str, tmp_path: Path) -> None:
    """Two ranks train two steps in the layout for a GPU on which not every layout fits."""
    path = str(tmp_path / "best.json")
    model = ["--model", "tiny", "--model_overrides", "vocab_size=256,n_layer=4,n_embd=256"]
    main([*model, "--world_size", "2", "--gpu", "0.03", "--seq_length", "64", "--offload", "none", "optimizer_cpu",
          "--write", path, "--json", str(tmp_path / "all.json")])
    found = json.loads((tmp_path / "all.json").read_text())
    best = next(row for row in found["rows"] if row["name"] == found["recommended"])
    assert not all(row["fits"] for row in found["rows"])
    assert best["device_bytes"] <= 0.03 * GIB * 0.95
    done, _ = train_ranks(2, ["--deepspeed_config", path, *model, "--train_data", corpus, "--seq_length", "64",
                              "--split", "80,20,0", "--learning_rate", "1e-3", "--eval_steps", "1", "--log_interval",
                              "1", "--train_steps", "2", "--save", str(tmp_path / "run")], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "step       2/2" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("memory: predicted")]
    assert "measured" in line


def test_the_recommended_json_of_a_divided_layout_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    main(["--model", "llama3-70b", "--world_size", "64", "--gpu", "a100-80", "--tensor_parallel", "8",
          "--zero_stage", "1", "--offload", "none", "--write", str(path)])
    assert json.loads(path.read_text())["tensor_parallel"] == {"autotp_size": 8}


def test_simulate_and_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of `simulate` and `measure` on the command line are close to the estimate.

    The paths of model and JSON are relative to the caller's folder, which is not the repository.
    """
    monkeypatch.chdir(tmp_path)
    model, config = "model.json", "zero3_bf16.json"
    shutil.copy(ROOT / "pretrain/model/presets/tiny.json", model)
    shutil.copy(ROOT / "ds_configs/zero3_bf16.json", config)
    arguments = ["--model", model, *TINY[2:], "--seq_length", "64", "--micro_batch_size", "2",
                 "--gradient_accumulation_steps", "2"]
    text = run(capsys, "simulate", *arguments, "--world_size", "16", "--configs", config)
    deviation = re.search(r"^zero3_bf16 +2 x 2 +\d+ +[\d.]+ +[\d.]+ +([+-][\d.]+)%", text, re.MULTILINE)
    assert deviation, text
    assert abs(float(deviation[1])) < 2
    (measured,) = as_json(capsys, "measure", *arguments, "--world_size", "1", "--configs", config, "--steps", "2")
    assert not measured["failure"]
    for role in ("parameters", "master_weights", "optimizer_states"):
        held = sum(measured["held"][role].values())
        assert sum(measured["estimated_steady"][role].values()) == pytest.approx(held, rel=0.02)
    assert measured["step_time_ms"] > 0
