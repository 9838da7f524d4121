"""Wrong values of the flags: see tests/wrong_inputs/inputs.py."""

from typing import Any

_TASKS = {"train_data": "{world}/few", "tokenizer": "{world}/tokenizer.json"}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"show_predictions": 2, "split": "100,0,0"}, "--show_predictions: the run has no validation data"),
    ({}, {"eval_tasks": "arc_easy"}, "--eval_tasks: the run has no --tokenizer"),
    *(({}, {f"eval_tasks_{name}": value}, f"--eval_tasks_{name}: it has no effect without --eval_tasks")
      for name, value in (("folder", "{world}"), ("fewshot", 1), ("limit", 1), ("interval", 1))),
    *(({}, {**_TASKS, "eval_tasks": names, "eval_tasks_folder": f"{{world}}/{folder}"}, culprit)
      for names, folder, culprit in ((",", "done", "--eval_tasks: it names no task"),
                                     ("tasks/own", "done", "--eval_tasks tasks/own: this is a path"),
                                     ("own", "none", "--eval_tasks_folder ... there is no such folder"),
                                     ("own", "done", "--eval_tasks_folder ... the folder has no .yaml file"))),
]
