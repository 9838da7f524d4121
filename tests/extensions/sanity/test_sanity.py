"""The sanity checks on real engines: healthy runs pass, and each planted bug is found by the check that names it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.monitor.read_run_folder import read_rows
from tests.conftest import selected_params
from tests.distributed.test_equal_ranks import check_rejected, start, words_of
from tests.extensions.sanity import WORKERS
from tests.support.cases import CPU, DROPOUT, case, config, flags
from tests.support.launch import PROGRAM, run_ranks, run_worker, train_ranks
from tests.support.layouts import fp16
from tests.support.model_shapes import SHAPES
from tests.support.wrapped_models import ARE_WRAPPED, WRAPPED_MODELS
from tests.terminal.test_screen import in_terminal

FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
HEALTHY = {  # (DeepSpeed JSON, shape); all on 2 ranks
    "zero2_gpt2": (config(2), ""),
    "zero3_llama": (config(3, precision="bf16"), "llama"),
}  # and a pipeline in the test of bit-equal runs
MORE = {
    "pipeline_gpt2": (config(1, precision="bf16", stages=2), ""),
    "zero0_llama": (config(0), "llama"),
    "zero0_fp16_pipeline": (fp16(config(0, stages=2)), ""),
    "zero1_fp16": (fp16(config(1)), ""),
    "zero1_bf16_fp32_sum": ({**config(1, precision="bf16"), **FP32_SUM}, ""),
    "zero2_cpu_untied": (config(2, precision="bf16", offload_optimizer=CPU), "gpt2_untied"),
    "zero3_cpu_neox": (config(3, precision="bf16", offload_optimizer=CPU, offload_param=CPU), "neox_parallel"),
    "pipeline_llama_recomputed": (config(1, precision="bf16", stages=2, checkpoint_every=1), "llama"),
    "zero3_recipe": (config(3, precision="bf16"), "llama"),
    "zero2_lion_gemma2": ({**config(2, offload_optimizer=CPU), "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
                          "gemma2"),
    "zero1_sgd_mistral": ({**config(1), "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
                          "mistral_multi_query"),
}
ZERO, PIPELINE = config(2), config(1, precision="bf16", stages=2)
# name of a function of the worker -> (layouts, check that fails, text in what it measured, other checks that may fail)
PLANTED: dict[str, tuple[list[dict[str, Any]], str, str, set[str]]] = {
    "shifted_labels": ([ZERO], "labels", "labels are not the next token", {"initial loss"}),
    "frozen_layer": ([ZERO], "gradients reach", "not 3.", set()),
    "wrong_loss_scale": ([fp16(config(0, stages=2))], "gradient scale", "times the finite difference", set()),
    "unnormalized_accumulation": ([ZERO], "gradient scale", "2", set()),
    "eval_mode": ([ZERO], "modes", "runs in evaluation mode", set()),
    "decay_on_norms": ([PIPELINE], "weight decay", "28 of 28 parameters decay", set()),
    "no_causal_mask": ([ZERO], "causal mask", "", set()),
    "wrong_vocabulary": ([ZERO], "vocabulary", "largest token 25", set()),
    "wrong_end": ([ZERO], "document ends", "256 of 256 sampled documents end with token 0", set()),
    "rate_too_high": ([config(2, lr=0.1)], "update size", "an update at the peak rate 0.1 has ", set()),
    "rate_too_low": ([config(2, lr=1e-7)], "update size", "an update at the peak rate 1e-07 has ", set()),
    "labels_shifted_twice": ([ZERO, PIPELINE], "label positions", "change by the own label 0.0e+00, by other", set()),
    "mean_of_micro_batch": ([ZERO, PIPELINE], "layout", "1.0e+00 (halves of the labels)", set()),
    "batch_norm": ([ZERO, PIPELINE], "layout", "(micro-batches of one sample)", {"gradient scale"}),
    "unit_matrices": ([ZERO, PIPELINE], "activations", "; wrong: ", set()),
    "norms_from_zero": ([PIPELINE, ZERO], "activations", "rms 0 (", {
        "causal mask", "label positions", "gradients reach"}),
    "layer_scale": ([PIPELINE, ZERO], "gradient sizes", "norms of layers ", set()),
    "local_norm": ([ZERO, PIPELINE], "gradient norm", "reported ", set()),
    "norm_with_loss_scale": ([fp16(config(0, stages=2)), fp16(config(1))], "gradient norm", "reported ", set()),
    "wrong_sign": ([PIPELINE, ZERO], "one batch is learned", "to ", set()),
    "dropout_without_mode": ([ZERO, PIPELINE], "one batch is learned", "to ", {
        "causal mask", "label positions", "layout", "gradient scale", "determinism"}),
    "positions_instead_of_tokens": ([PIPELINE, ZERO], "one batch is learned", "to ", {"causal mask"}),
    "label_in_head": ([ZERO, PIPELINE], "shuffled inputs are worse", "loss ", {
        "zeroed inputs are worse", "initial loss"}),
    "positions_of_batch": ([PIPELINE, ZERO], "shuffled inputs are worse", "loss ", {
        "zeroed inputs are worse", "layout"}),
    "unseeded_weights": ([ZERO, PIPELINE], "determinism", "different weights", set()),
    "unseeded_order": ([PIPELINE, ZERO], "determinism", "different weights", {"layout"}),
}
BUGS = {f"{name}-{index}": (name, values, *others) for name, (layouts, *others) in PLANTED.items()
        for index, values in enumerate(layouts)}
# the first layout of these is tested by default: one bug for each check
USUAL = {"shifted_labels", "frozen_layer", "wrong_loss_scale", "unnormalized_accumulation", "eval_mode",
         "decay_on_norms", "no_causal_mask", "wrong_vocabulary", "wrong_end", "rate_too_high", "labels_shifted_twice",
         "mean_of_micro_batch", "unit_matrices", "layer_scale", "local_norm", "wrong_sign", "label_in_head",
         "unseeded_weights"}
_STEPS = {"wrong_sign": 20, "dropout_without_mode": 60, "positions_instead_of_tokens": 60}
_TRAINED = ("rate_too_high", "rate_too_low", "label_in_head", "positions_of_batch")


def sanity_case(name: str, values: dict[str, Any], corpus: str, folder: Path, shape: str = "", *,
                plant: str = "nothing", steps: int = 300) -> dict[str, Any]:
    run_flags = flags(corpus, layers=2, overrides="", **({"emulate_fp16": True} if "fp16" in values else {}))
    if shape:
        model = folder / f"{name}_model.json"
        model.write_text(json.dumps({**(SHAPES | WRAPPED_MODELS)[shape], "vocab_size": 256}))
        run_flags |= {"model": str(model), "model_overrides": "vocab_size=256"}
    if name == "zero3_recipe":
        run_flags |= {"label_smoothing": 0.3, "z_loss": 0.01, "gradient_value_clipping": 0.001, "adaptive_clipping": 50,
                      "batch_schedule": "0:8,1024:16", "seq_length_schedule": "0:32,2048:64", "eod_mask_loss": True,
                      "document_attention": True}
    if plant == "wrong_vocabulary":
        run_flags["model_overrides"] = run_flags["model_overrides"].replace("256", "200")
    return case(name, "check", values, run_flags, plant=plant, steps=steps)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sanity")
    layouts = {name: (HEALTHY | MORE)[name] for name in selected_params(request, "layout")}
    cases = [*(sanity_case(name, values, corpus, folder, shape) for name, (values, shape) in layouts.items()),
             *(sanity_case(bug, BUGS[bug][1], corpus, folder, plant=BUGS[bug][0],
                           steps=300 if BUGS[bug][0] in _TRAINED else _STEPS.get(BUGS[bug][0], 2))
               for bug in selected_params(request, "bug"))]
    return run_worker(str(WORKERS / "sanity_worker.py"), cases, 2, folder)


@pytest.mark.parametrize("layout", [*HEALTHY, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_healthy_run_passes_all_checks(layout: str, results: dict[str, Any]) -> None:
    made = results[layout]["results"]
    print(*results[layout]["table"], f"{results[layout]['seconds']:.1f} s", sep="\n")
    assert len(made) == 19
    assert [name for name, result in made.items() if not result["passed"]] == []


@pytest.fixture(scope="module")
def shapes(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shapes")
    cases = [sanity_case(shape, config(0), corpus, folder, shape) for shape in selected_params(request, "shape")]
    return run_worker(str(WORKERS / "sanity_worker.py"), cases, 1, folder)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*SHAPES, *(WRAPPED_MODELS if ARE_WRAPPED else ())])
def test_a_healthy_model_of_each_architecture_passes_all_checks(shape: str, shapes: dict[str, Any]) -> None:
    """With `-s`, the output is a table of the steps in which one batch is learned."""
    made = shapes[shape]["results"]
    learned = made["one batch is learned"]
    print(f"\n{shape:30s} {learned['measured']}; {learned['bound']}")
    failed = {name: result["measured"] for name, result in made.items() if not result["passed"]}
    if shape == "mixtral_window_tied_one_expert":  # a single expert: routers have no effect
        assert "router" in failed.pop("gradients reach")
    assert failed == {}


@pytest.mark.parametrize("bug", [
    pytest.param(bug, marks=() if bug.endswith("-0") and BUGS[bug][0] in USUAL else pytest.mark.slow) for bug in BUGS])
def test_a_planted_bug_fails_the_right_check(bug: str, results: dict[str, Any]) -> None:
    name, _, check, measured, others = BUGS[bug]
    made = results[bug]["results"]
    failed = {name for name, result in made.items() if result["passed"] is False}
    assert check in failed
    print(*results[bug]["table"], sep="\n")
    if name not in _TRAINED:
        others = {*others, "one batch is learned"}  # 2 steps are too few
    assert failed <= {check, *others}
    assert measured in made[check]["measured"]
    assert f"{check}: {made[check]['remedy']}" in results[bug]["table"]


def test_a_checked_run_is_bit_equal_to_an_unchecked_one(corpus: str, tmp_path: Path) -> None:
    """With dropout, so that a changed random state would show."""
    config_path = tmp_path / "ds.json"
    config_path.write_text(json.dumps(config(1, precision="bf16", stages=2)))
    words = ["--deepspeed_config", str(config_path), "--model=tiny", f"--train_data={corpus}", "--split=80,20,0",
             f"--model_overrides=vocab_size=256,n_layer=2,n_embd=64,{DROPOUT}", "--seq_length=64", "--train_steps=3",
             "--eval_steps=1", "--log_interval=1"]
    files, losses = [], []
    for name, more in (("plain", []), ("checked", ["--sanity_check"])):
        done = train_ranks(2, [*words, f"--save={name}", *more], tmp_path)
        assert [process.returncode for process in done] == [0, 0], done[0].stdout
        run = tmp_path / name
        files.append({file: record.sha256 for file, record in
                      read_manifest(run / "checkpoints" / "global_step3").files.items() if file.endswith(".pt")})
        losses.append([row.get("loss", row.get("eval_loss")) for row in read_rows(run / "metrics.jsonl")])
    assert "all 19 checks passed" in done[0].stdout
    assert losses[0] == losses[1]
    assert files[0] == files[1]
    assert any(file.startswith("rng_state") for file in files[0])
    events = [row for row in read_rows(tmp_path / "checked" / "events.jsonl") if row["event"] == "sanity"]
    assert [(row["step"], row["reason"], len(row["checks"])) for row in events] == [(0, "all checks passed", 19)]


@pytest.mark.slow
def test_a_tensor_parallel_run_passes_the_checks(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**config(1, accumulation=2), "tensor_parallel": {"autotp_size": 2}}))
    done = train_ranks(2, ["--deepspeed_config=ds.json", "--model=tiny", f"--train_data={corpus}", "--split=80,20,0",
                           "--model_overrides=vocab_size=256,n_layer=2,n_embd=64", "--seq_length=64", "--train_steps=1",
                           "--z_loss=0.001", "--sanity_check", "--save=run"], tmp_path)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout


@pytest.mark.slow
def test_ranks_with_other_flags_are_rejected(corpus: str, tmp_path: Path) -> None:
    words = ["--overfit_steps=2", *words_of(corpus, tmp_path)]
    check_rejected(start(tmp_path, [words, [*words, "--seed=7"]], module="pretrain sanity"), "--seed: the ranks must")
    check_rejected(start(tmp_path, [words, ["--overfit_steps=3", *words[1:]]], module="pretrain sanity"),
                   "program: the ranks must")


def test_a_failed_check_rejects_the_run_and_is_the_exit_code_of_the_tool(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(2)))
    words = ["--deepspeed_config=ds.json", "--model=tiny", f"--train_data={corpus}", "--split=80,20,0",
             "--model_overrides=vocab_size=256,n_layer=1,n_embd=64", "--seq_length=64", "--train_steps=3",
             "--init_std=0.9", "--save=run"]
    tool = run_ranks([PROGRAM, "sanity", *words, "--json=out.json"], 1, cwd=tmp_path)[0]
    assert tool.returncode == 1, tool.stdout
    assert "initial loss: too high" in tool.stdout
    found = {result["check"]: result for result in json.loads((tmp_path / "out.json").read_text())}
    assert found["initial loss"]["passed"] is False
    assert found["initial loss"]["value"] > 6
    assert [name for name, result in found.items() if result["passed"] is False] == ["initial loss"]
    assert found["gradient scale"]["passed"] is None
    assert not (tmp_path / "run").exists()

    run = train_ranks(1, [*words, "--sanity_check"], tmp_path)[0]
    assert run.returncode == 2
    assert "ds-pretrain: error: --sanity_check: " in run.stdout
    assert "Traceback" not in run.stdout
    rows = read_rows(tmp_path / "run" / "events.jsonl")
    assert [row["event"] for row in rows] == ["sanity"]
    assert "initial loss" in rows[0]["reason"]


def test_the_table_is_broken_between_words() -> None:
    """A terminal of 80 columns breaks no number of the table."""
    program = ("from pretrain.extensions.sanity.extension import Result, print_table;"
               "print_table([Result('gradient scale', True, ' '.join(['0.995'] * n), '0.75 to 1.33', '') "
               "for n in range(1, 20)])")
    code, written = in_terminal([sys.executable, "-c", program])
    assert code == 0
    lines = written.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert {word for line in lines for word in line.split() if word.startswith(("0", "1"))} == {
        "0.995", "0.75", "1.33", "19"}


def test_find_lr_in_a_pipeline(corpus: str, tmp_path: Path) -> None:
    """A rate that is too high makes the loss diverge; the JSON, the table and the plot hold the same rates."""
    (tmp_path / "ds.json").write_text(json.dumps(config(1, precision="bf16", stages=2)))
    done = run_ranks([PROGRAM, "find-lr", "--from=1e-5", "--to=30", "--steps=40", "--json=lr.json",
                      "--plot=lr.svg", "--deepspeed_config=ds.json", "--model=tiny", f"--train_data={corpus}",
                      "--model_overrides=vocab_size=256,n_layer=2,n_embd=64", "--seq_length=64", "--train_steps=3",
                      "--split=80,20,0", "--save=run"], 2, cwd=tmp_path)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout
    found = json.loads((tmp_path / "lr.json").read_text())
    assert 1e-4 < found["suggested"] <= found["steepest"] < found["diverged_at"] < 30
    assert found["suggested"] <= found["diverged_at"] / 10 * (1 + 1e-9)
    assert len(found["points"]) < 40, "the test did not stop at the divergence"
    assert f"suggested peak rate {found['suggested']:.2e}" in done[0].stdout
    assert f"divergence: {found['diverged_at']:.1e}" in (tmp_path / "lr.svg").read_text()
    assert not (tmp_path / "run").exists()
