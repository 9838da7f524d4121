"""--show_predictions and --eval_tasks in real runs on two ranks: the same texts and scores in every layout."""

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.errors import FINISHED, ConfigError
from pretrain.extensions.tasks.extension import PREDICTION_ROW, TASK_ROW, Tasks, find_run_tasks
from pretrain.extensions.tasks.predictions import predictions_data
from pretrain.model.config import model_config_from
from pretrain.model.layer_specs import as_module
from pretrain.monitor.read_run_folder import read_events, read_rows
from tests.analysis.test_evaluate import in_process
from tests.extensions.tasks import WORKERS
from tests.support.byte_tokenizer import write_byte_corpus
from tests.support.cases import CPU, DROPOUT, case, config, flags
from tests.support.launch import run_worker
from tests.support.layouts import HAS_EXPERTS, MODEL_WITH_EXPERTS, dp2, experts2, pp2, sequence2, tensor2

STEPS, EVALUATED, SCORED = 6, [2, 4, 6], [3, 6]
LR = 1e-2
NAMES = "choice,shots,last,rolling"
CSV = {"csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"}}
LAYOUTS = {
    "zero0": {**dp2(0, lr=LR), **CSV}, "zero1": dp2(1, lr=LR), "zero2_cpu": dp2(2, lr=LR, offload_optimizer=CPU),
    "zero3_cpu": dp2(3, lr=LR, offload_optimizer=CPU, offload_param=CPU), "pipeline2": pp2(1, lr=LR),
    "tensor2": tensor2(1, lr=LR), "tensor2_zero3": tensor2(3, lr=LR), "sequence2": sequence2(2, lr=LR)}
FAST = ("zero0", "zero3_cpu", "pipeline2", "tensor2", "sequence2")
_TASK = {"dataset_path": "json", "test_split": "test"}
_CHOICE = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
           "doc_to_target": "{{answer}}"}


def write_tasks(folder: Path) -> None:
    """Write tasks of each kind with local data: scores with many digits differ if any likelihood does."""
    questions = [{"question": f"{number % 7} of {number}, {number % 7}", "answer": number % 2, "one": number != 5,
                  "choices": [" ~", f" of {number}, {number % 7} of {number}", f"+{number * number}"]}
                 for number in range(7)]
    texts = [{"text": text} for text in ("4 of 123, 4 of 123, " * 9, "one text and another", "5 of 6, ",
                                         "<|endoftext|>6")]
    tasks: dict[str, dict[str, Any]] = {
        "choice": {**_CHOICE, "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        "shots": {**_CHOICE, "num_fewshot": 2, "metric_list": [{"metric": "brier_score"}]},
        "last": {"output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": " of",
                 "metric_list": [{"metric": "perplexity"}]},
        "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                    "metric_list": [{"metric": "bits_per_byte"}]},
        "failing": {**_CHOICE, "doc_to_target": "{{answer // one}}", "metric_list": [{"metric": "acc"}]},
        "generating": {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{question}}",
                       "metric_list": [{"metric": "exact_match"}]}}
    for name, rows in (("questions", questions), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, task in tasks.items():
        data = "texts" if "text}" in str(task) else "questions"
        files = {"dataset_kwargs": {"data_files": {"test": str(folder / f"{data}.jsonl")}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **_TASK, **files, **task}))


def write_data(base: Path) -> None:
    """Write a corpus, its tokenizer and tasks."""
    write_byte_corpus(base)
    (base / "tasks").mkdir()
    write_tasks(base / "tasks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data, a tokenizer, tasks and the config.json of a model with experts."""
    base = tmp_path_factory.mktemp("evaluations")
    write_data(base)
    (base / "experts.json").write_text(json.dumps({**MODEL_WITH_EXPERTS, "vocab_size": 260}))
    return base


def run_flags(**others: Any) -> dict[str, Any]:
    given = flags("corpus", layers=2, steps=STEPS, tokenizer="tokenizer", eval_interval=2, log_interval=1,
                  save_interval=0, **others)
    model = given["model_overrides"].replace("vocab_size=256", "vocab_size=260")
    return given | {"model_overrides": model, "split": "70,20,10"}


def with_evaluations(**others: Any) -> dict[str, Any]:
    return {"show_predictions": 3, "eval_tasks": NAMES, "eval_tasks_folder": "tasks", "eval_tasks_interval": 3,
            "eval_tasks_limit": 5, **others}


def _cases() -> list[dict[str, Any]]:
    on = with_evaluations()
    cases = [case("plain", "", LAYOUTS["zero0"], run_flags())]
    cases += [case(name, "", LAYOUTS[name], run_flags(**on)) for name in FAST]
    # masks of dropout and the loss scale of fp16 would differ if an evaluation changed any state
    values, exact = dp2(2, precision="fp16"), {"overrides": DROPOUT, "emulate_fp16": True}
    cases += [case("exact_plain", "", values, run_flags(**exact)),
              case("stopped", "", values, run_flags(**exact, **on, exit_step=4)),
              case("resumed", "", values, run_flags(**exact, **on, save="run-stopped")),
              case("failing", "", LAYOUTS["zero0"], run_flags(eval_tasks="failing,choice", eval_tasks_folder="tasks")),
              case("generating", "", LAYOUTS["zero0"], run_flags(eval_tasks="generating", eval_tasks_folder="tasks"))]
    return cases


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return run_worker(str(WORKERS / "evaluations_worker.py"), _cases(), 2, folder)


def predictions_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_rows(folder / f"run-{name}" / "predictions.jsonl")


def scores_of(folder: Path, name: str) -> dict[tuple[int, str], dict[str, float]]:
    """Return the scores by step and task. A row that is written twice is an error."""
    rows = [row for row in read_rows(folder / f"run-{name}" / "metrics.jsonl")
            if str(row.get("split")).startswith("tasks/")]
    found = {(row["step"], row["split"].removeprefix("tasks/")): {
        key: value for key, value in row.items() if key not in ("step", "time", "split")} for row in rows}
    assert len(found) == len(rows)
    return found


def training_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    keys = ("step", "loss", "grad_norm", "param_norm", "loss_scale", "lr", "consumed_samples")
    return [{key: row[key] for key in keys} for row in read_rows(folder / f"run-{name}" / "metrics.jsonl")
            if "loss" in row]


def _assert_equal_layouts(folder: Path, name: str, reference: str) -> None:
    found, expected = (
        [{key: value for key, value in row.items() if key != "time"} for row in predictions_of(folder, layout)]
        for layout in (name, reference))
    assert found == expected
    scores = scores_of(folder, reference)
    assert list(scores) == [(step, task) for step in SCORED for task in NAMES.split(",")]
    for key, values in scores_of(folder, name).items():
        assert values == pytest.approx(scores[key], rel=1e-4), key


@pytest.mark.parametrize("name", [name for name in FAST if name != "zero0"])
def test_texts_and_scores_are_the_same_in_every_layout(name: str, results: dict[str, Any], folder: Path) -> None:
    assert results[name]["code"] == FINISHED
    _assert_equal_layouts(folder, name, "zero0")


@pytest.mark.slow
def test_texts_and_scores_are_the_same_in_further_layouts(folder: Path, results: dict[str, Any]) -> None:
    on = with_evaluations()
    experts = {**run_flags(**on), "model": "experts.json"}
    del experts["model_overrides"]
    documents = run_flags(**on, document_attention=True, eod_mask_loss=True, packing="best_fit")
    two = [case(name, "", values, run_flags(**on)) for name, values in LAYOUTS.items() if name not in FAST]
    two += [case(f"documents_{name}", "", LAYOUTS[name], documents) for name in FAST]
    two += [case("compiled", "", LAYOUTS["zero1"], run_flags(**on, compile_blocks=True))]
    two += [case("experts_zero2", "", dp2(2, lr=LR), experts),
            *([case("experts2", "", experts2(2, lr=LR), experts)] if HAS_EXPERTS else [])]
    four = [case("pipeline2_tensor2", "", {**pp2(1, lr=LR), **tensor2(1, micro=2, accumulation=4, lr=LR, stages=2)},
                 run_flags(**on)),
            case("pipeline2_data2", "", config(1, micro=2, accumulation=2, stages=2, lr=LR), run_flags(**on))]
    for ranks, cases in ((2, two), (4, four)):
        found = run_worker(str(WORKERS / "evaluations_worker.py"), cases, ranks, folder)
        assert {name: row["code"] for name, row in found.items()} == {one["name"]: FINISHED for one in cases}
    for name in (*(one["name"] for one in two + four),):
        kind = next((kind for kind in ("documents", "experts") if name.startswith(kind)), "")
        _assert_equal_layouts(folder, name, {"": "zero0", "documents": "documents_zero0",
                                             "experts": "experts_zero2"}[kind])


def test_training_is_the_same_bit_for_bit_with_and_without_evaluations(results: dict[str, Any], folder: Path) -> None:
    assert (results["stopped"]["code"], results["resumed"]["code"]) == (FINISHED, FINISHED)
    for name, plain in (("zero0", "plain"), ("stopped", "exact_plain")):
        assert training_rows(folder, name) == training_rows(folder, plain)
        assert not (folder / f"run-{plain}" / "predictions.jsonl").exists()


def test_a_resume_writes_nothing_twice(results: dict[str, Any], folder: Path) -> None:
    rows = predictions_of(folder, "stopped")
    assert [(row["step"], row["sequence"]) for row in rows] == [(step, n) for step in EVALUATED for n in range(3)]
    # the first process also scores its own last step
    assert list(scores_of(folder, "stopped")) == [(step, task) for step in (3, 4, 6) for task in NAMES.split(",")]


@torch.no_grad()
def test_predictions_are_the_most_likely_tokens(results: dict[str, Any], folder: Path) -> None:
    """The engine guesses all tokens and corrects them; this decodes one after the other, from the checkpoint."""
    checkpoint = folder / "run-zero0" / "checkpoints" / f"global_step{STEPS}"
    model = as_module(model_config_from(read_manifest(checkpoint).model, "manifest"))
    model.load_state_dict(CheckpointReader(checkpoint).weights())
    rows = predictions_of(folder, "zero0")
    assert [(row["step"], row["sequence"]) for row in rows] == [(step, n) for step in EVALUATED for n in range(3)]
    assert all(set(row) == set(PREDICTION_ROW) for row in rows)
    for row in rows[-3:]:
        tokens = list(row["prompt_tokens"])
        for _ in row["actual_tokens"]:
            tokens.append(int(model.eval()(torch.tensor([tokens]))[0, -1].argmax()))
        assert tokens == row["prompt_tokens"] + row["predicted_tokens"]
        assert (len(row["prompt_tokens"]), len(row["actual_tokens"])) == (32, 32)
        for name in ("prompt", "predicted", "actual"):
            text = bytes(token for token in row[f"{name}_tokens"] if token < 256)
            assert row[name] == text.decode("utf-8", "replace")
    assert len({row["predicted"] for row in rows}) > 2, "the texts should differ"
    shown = predictions_data(rows)
    assert [sample["prompt"] for sample in shown] == [row["prompt"] for row in rows[:3]]
    assert [step for step, _ in shown[0]["predicted"]] == EVALUATED[::-1]


def test_scores_are_those_of_the_checkpoint(results: dict[str, Any], folder: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    found = scores_of(folder, "pipeline2")
    assert {key for row in found.values() for key in row} <= \
        {*TASK_ROW, *(f"{metric}{end}" for metric in ("acc_norm", "brier_score", "perplexity", "bits_per_byte")
                      for end in ("", "_stderr"))}
    assert {found[STEPS, name]["questions"] for name in ("choice", "shots")} == {5}
    evaluated = in_process(monkeypatch, folder, "run-pipeline2", "--tasks", NAMES, "--task_folder", "tasks",
                           "--limit", "5")
    for name, expected in evaluated["tasks"].items():
        expected.pop("perplexity_stderr", None)  # lm-eval estimates it with random draws
        assert {key: found[STEPS, name][key] for key in expected} == pytest.approx(expected, rel=1e-5), name


def test_the_monitors_get_the_scores(results: dict[str, Any], folder: Path) -> None:
    (path,) = (folder / "csv" / "job").glob("*tasks_rolling_bits_per_byte.csv")
    points = [float(row[1]) for row in csv.reader(path.read_text().splitlines()[1:])]
    expected = [scores_of(folder, "zero0")[step, "rolling"]["bits_per_byte"] for step in SCORED]
    assert set(points) == set(expected)


def test_a_failure_of_lm_eval_does_not_end_the_run(results: dict[str, Any], folder: Path) -> None:
    assert results["failing"]["code"] == FINISHED
    events = [event for event in read_events(folder / "run-failing") if event["event"] == "tasks_failed"]
    assert [event["step"] for event in events] == EVALUATED
    assert events[0]["reason"].startswith("lm-eval cannot evaluate: ZeroDivisionError")
    assert scores_of(folder, "failing") == {}


def test_tasks_that_cannot_be_scored_in_a_run_are_rejected(results: dict[str, Any],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    assert results["generating"]["error"].startswith("--eval_tasks generating: its answers are generated texts")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--eval_tasks: the package lm_eval is not installed"):
        find_run_tasks(Tasks(eval_tasks="choice"))
