"""Wrong values of the flags: see tests/wrong_inputs/inputs.py, and of `evaluate`: commands.py there."""

import json
from typing import Any

_IN_RUN = {"train_data": "{world}/few", "tokenizer": "{world}/tokenizer.json"}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"show_predictions": 2, "split": "100,0,0"}, "--show_predictions: the run has no validation data"),
    ({}, {"eval_tasks": "arc_easy"}, "--eval_tasks: the run has no --tokenizer"),
    *(({}, {f"eval_tasks_{name}": value}, f"--eval_tasks_{name}: it has no effect without --eval_tasks")
      for name, value in (("folder", "{world}"), ("fewshot", 1), ("limit", 1), ("interval", 1))),
    *(({}, {**_IN_RUN, "eval_tasks": names, "eval_tasks_folder": f"{{world}}/{folder}"}, culprit)
      for names, folder, culprit in ((",", "done", "--eval_tasks: it names no task"),
                                     ("tasks/own", "done", "--eval_tasks tasks/own: this is a path"),
                                     ("own", "none", "--eval_tasks_folder ... there is no such folder"),
                                     ("own", "done", "--eval_tasks_folder ... the folder has no .yaml file"))),
]
_TASK = {"task": "own", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
         "dataset_kwargs": {"data_files": {"test": "/none/questions.jsonl"}}, "doc_to_text": "{{question}}"}
_OWN_TASK = {"tasks/own.yaml": json.dumps(_TASK).encode()}
_EVALUATED = "{world}/done --task_folder {world}/tasks --tasks"
LINES: list[tuple[str, str, str, dict[str, bytes]]] = [
    ("evaluate", f"{_EVALUATED} own,onw", 'Did you mean "own"', _OWN_TASK),  # only this case reads all tasks of lm-eval
    ("evaluate", f"{_EVALUATED} own", "/none/questions.jsonl", _OWN_TASK),
    ("evaluate", f"{_EVALUATED} own", "tasks/own.yaml", {"tasks/own.yaml": b"task: ["}),
    ("evaluate", f"{_EVALUATED} own", "tasks/own.yaml", {"tasks/own.yaml": b"- task"}),
    ("evaluate", f"{_EVALUATED} own", "--task_folder", {"tasks/own.json": b"{}"}),
    ("evaluate", "{world}/done --tasks own --task_folder {world}/none", "--task_folder", {}),
    *(("evaluate", f"RIGHT {flag} {value}", f"{flag}: it has no", {}) for flag, value in (
        ("--task_folder", "{world}/tasks"), ("--num_fewshot", "1"), ("--limit", "1"), ("--export", "{world}/new"))),
    *(("evaluate", f"{_EVALUATED} own {flag}", f"{flag.split()[0]}: it has no", _OWN_TASK)
      for flag in ("--stride 1", "--max_samples 1", "--eod_mask_loss", "--document_attention")),
    *(("evaluate", f"{_EVALUATED} own --export {path}", path.rsplit("/", 1)[1], _OWN_TASK)
      for path in ("{world}/file/x", "{world}/done", "/proc/x")),
]
