"""Scores of lm-eval in `ds-pretrain evaluate`, of checkpoints of real runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.model.config import model_config_from
from pretrain.model.layer_specs import as_module
from tests.analysis import test_evaluate
from tests.analysis.test_evaluate import STEPS, TEXTS, Evaluate, evaluate
from tests.support.launch import ROOT

runs, alone = test_evaluate.runs, test_evaluate.alone  # fixtures


def _questions(folder: Path) -> list[dict[str, Any]]:
    """Write a task of lm-eval with local data into `folder`, and return its questions."""
    questions = [{"question": f"{number % 7} of {number}, {number % 7}", "answer": number % 2,
                  "choices": [" ~", f" of {number}, {number % 7} of {number}", f"+{number * number}"]}
                 for number in range(13)]
    folder.mkdir(exist_ok=True)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    task = {"task": "local_choice", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}, "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    (folder / "local.yaml").write_text(json.dumps(task))
    return questions


@torch.no_grad()
def _scores(checkpoint: Path, questions: list[dict[str, Any]]) -> dict[str, float]:
    """Return the accuracies of our module: the choice with the largest log-likelihood, in total and per character."""
    model = as_module(model_config_from(read_manifest(checkpoint).model, "manifest"))
    model.load_state_dict(CheckpointReader(checkpoint).weights())
    right = {"acc": 0, "acc_norm": 0}
    for question in questions:
        likelihoods = []
        for choice in question["choices"]:
            tokens = [*(question["question"] + choice).encode()]
            log_p = torch.log_softmax(model.eval()(torch.tensor([tokens[:-1]]))[0].double(), 1)
            scored = range(len(tokens) - len(choice.encode()), len(tokens))
            likelihoods.append(sum(float(log_p[position - 1, tokens[position]]) for position in scored))
        per_character = [value / len(choice) for value, choice in zip(likelihoods, question["choices"], strict=True)]
        for name, values in (("acc", likelihoods), ("acc_norm", per_character)):
            right[name] += values.index(max(values)) == question["answer"]
    return {name: count / len(questions) for name, count in right.items()}


def test_tasks_of_a_local_folder(runs: Path, alone: Evaluate) -> None:
    """The scores of lm-eval with the exported model are those that our module gives, on 1 rank and on 2."""
    questions = _questions(runs / "tasks")
    checkpoint = runs / "zero3" / "checkpoints" / f"global_step{STEPS}"
    words = ("--tasks", "local_choice", "--task_folder", "tasks")
    found = alone(runs, "zero3", *words, "--export", "exported")
    expected = _scores(checkpoint, questions)
    assert expected["acc"] != expected["acc_norm"]
    assert {name: found["tasks"]["local_choice"][name] for name in expected} == expected
    assert found["data"] == []
    few = alone(runs, "exported", *words, "--limit", "5", "--micro_batch_size", "2", "--data", "text.txt")
    assert {name: few["tasks"]["local_choice"][name] for name in expected} == _scores(checkpoint, questions[:5])
    assert few["data"][0]["tokens"] == len(TEXTS[2])
    on_two = evaluate(runs, "zero3", *words, ranks=2)
    assert on_two["tasks"] == found["tasks"]


def test_a_task_whose_data_is_not_on_this_machine(runs: Path) -> None:
    (runs / "hub").mkdir()
    (runs / "hub" / "hub.yaml").write_text(json.dumps({
        "task": "on_the_hub", "dataset_path": "nobody/nothing", "output_type": "multiple_choice", "test_split": "test",
        "doc_to_text": "{{question}}"}))
    command = [str(ROOT / "tools/evaluate.py"), "zero3", "--tasks", "on_the_hub", "--task_folder", "hub"]
    done = subprocess.run([sys.executable, *command], cwd=runs, env={**os.environ, "HF_HUB_OFFLINE": "1"},
                          capture_output=True, text=True)
    status, *error = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(error)) == (2, "", 1), done.stderr
    assert status.startswith("loading the task")  # the wait for the network is announced
    assert error[0].startswith("ds-pretrain: error: --tasks on_the_hub: its data cannot be fetched")
