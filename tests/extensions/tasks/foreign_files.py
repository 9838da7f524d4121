"""Texts of a foreign run, and flags that name tasks: see tests/foreign_files/commands.py."""

FILES: dict[str, dict[str, tuple[str, ...]]] = {"run": {"predictions.jsonl": ()}}
RUN_FLAGS = {"show_predictions": 2}
PLACES = ("eval_tasks", "eval_tasks_folder")
